#!/usr/bin/env bash
# What the correction costs a training step: time, operators, collectives, bytes, peak memory, and the ratio to a plain
# per-sequence implementation. Arguments go to benchmarks/correction_cost.py (--help lists them; --smoke is quick).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

mkdir -p runs/bench
python benchmarks/correction_cost.py --json runs/bench/correction_cost.json "$@"
