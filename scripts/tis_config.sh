# Sourced with the name of a host by the launch scripts that load the TIS hook: MIS_CONFIG, a preset or a file (default:
# tis), becomes a full path, as the job starts in a folder of its own. Says what it will do there, and stops at one that
# cannot work with that host or that hook.

MIS_CONFIG=$(python3 -m mis_plugins config path "${MIS_CONFIG:-tis}")
checked=$(python3 -m mis_plugins config check "$MIS_CONFIG" --host "$1")
echo "$checked"
if [[ $checked != *mis_plugins.mis.compute_mis_weights* ]]; then
    echo "$0: MIS_CONFIG=$MIS_CONFIG needs the flags above; this script has those of the TIS hook" >&2
    exit 2
fi
