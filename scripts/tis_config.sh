# Sourced with the name of a host by the launch scripts that load the TIS hook. MIS_CONFIG, a preset or a file
# (default: tis), becomes a full path, because the job starts in a folder of its own. Prints what the config
# does on the host, and stops where the config cannot work with the host or the hook.

MIS_CONFIG=$(python3 -m mis_plugins config path "${MIS_CONFIG:-tis}")
checked=$(python3 -m mis_plugins config check "$MIS_CONFIG" --host "$1")
echo "$checked"
if [[ $checked != *mis_plugins.mis.compute_mis_weights* ]]; then
    echo "$0: MIS_CONFIG=$MIS_CONFIG needs the flags above; this script has those of the TIS hook" >&2
    exit 2
fi
