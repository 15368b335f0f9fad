#!/usr/bin/env bash
# Compares formulas for the weights of stale tokens with the pack's own: which brings the gradient nearest to
# the on-policy gradient, at ages up to 2 and 8.
#   bash scripts/experiment-async-weights.sh            a run that this committed code finished is not repeated
#   bash scripts/experiment-async-weights.sh --smoke --seeds 0    a minute, shows only that it works
# Results: lab/results/async_weights.{json,md}
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

exec python -m lab.async_weights "$@"
