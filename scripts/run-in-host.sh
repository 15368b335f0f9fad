#!/usr/bin/env bash
# Runs the real, unmodified train.py of Miles or slime on a CPU, with Ray, the real SGLang and a weight update every
# step, and judges what our hooks did there. Exit 0 only if every asserted line holds.
#
#   bash scripts/run-in-host.sh miles|slime [--checkout DIR --megatron DIR] [-- FLAGS OF THE HOST]
#   bash scripts/run-in-host.sh rows [ROW ...] [--hosts DIR]      the rows of lab/in_host/rows.py without a record
#   bash scripts/run-in-host.sh matrix [--hosts DIR]              all rows anew, one after the other; goes on where it stopped
#   bash scripts/run-in-host.sh on-policy [--hosts DIR]           log-probs equal to the engine's to the bit
#   bash scripts/run-in-host.sh table                             table and certificate from the records, without a host
#
# The checkouts are yours: nothing of them is copied or changed. lab/in_host/trees.py names the commits that are
# known to work, and the command says how to get them. The first call installs about 4 GB into .venv-in-host beside this
# folder, or IN_HOST_VENV: SGLang's environment and what the hosts import. A run takes two to five minutes.
set -euo pipefail
[[ " $* " != *" --help "* ]] || exec sed -n '2,/^set /s/^# \?//p' "$0"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=${IN_HOST_VENV:-$repository/.venv-in-host}
[[ $environment = /* ]] || environment=$PWD/$environment
wanted=$repository/lab/in_host/requirements.txt
stamp=$environment/.mis-plugins-in-host
# setup.py holds the entry points by which an engine finds our plugin.
state=$(cat "$wanted" "$repository/setup.py" | cksum)

if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
    SGLANG_VENV=$environment bash "$repository/true_on_policy/engines/install.sh" sglang
    "$environment/bin/python" -m pip install -qq --no-deps --requirement "$wanted"
    "$environment/bin/python" -m pip install -qq --no-deps --editable "$repository"
    echo "$state" >"$stamp"
fi
exec env PYTHONPATH="$repository" "$environment/bin/python" -m lab.run_in_host "$@"
