#!/usr/bin/env bash
# What the correction costs a training step: time, operators, collectives, bytes, peak memory, and a floor of memory
# traffic beside.
#   bash scripts/bench.sh --smoke     quick; `python -m lab.peer_cost --help` lists all arguments, and how peers join in
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

mkdir -p runs/bench
python -m lab.peer_cost --json runs/bench/peer_cost.json "$@"
