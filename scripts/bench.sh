#!/usr/bin/env bash
# What the correction costs a training step: time, operators, collectives, bytes, peak memory, and a floor of memory
# traffic beside. Arguments go to lab/peer_cost.py (--help tells how the peers join in; --smoke is quick).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

mkdir -p runs/bench
python -m lab.peer_cost --json runs/bench/peer_cost.json "$@"
