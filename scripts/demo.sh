#!/usr/bin/env bash
# The demonstration, on CPU: a policy whose rollout engine and trainer disagree, trained without and with correction.
#   bash scripts/demo.sh            about 4 minutes on 2 cores; all of it in runs/demo, or runs/demo-2 and so on
#   bash scripts/demo.sh --smoke    a minute: only shows that it works
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

exec python -m lab.demo "$@"
