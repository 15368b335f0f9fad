#!/usr/bin/env bash
# Weights of stale tokens beside those of the pack: which brings a gradient nearest to the on-policy one, at ages up to 2 and 8.
#   bash scripts/experiment-async-weights.sh            what the same committed code finished with the same settings is not repeated
#   bash scripts/experiment-async-weights.sh --smoke --seeds 0    a minute, shows only that it works
# Results: benchmarks/results/async_weights.{json,md}
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

exec python benchmarks/async_weights.py "$@"
