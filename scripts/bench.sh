#!/usr/bin/env bash
# What the correction costs a training step: time, operators, collectives, bytes, peak memory, and the ratio to a plain
# per-sequence implementation. Arguments go to lab/correction_cost.py (--help lists them; --smoke is quick).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

mkdir -p runs/bench
python -m lab.correction_cost --json runs/bench/correction_cost.json "$@"
