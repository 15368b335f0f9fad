#!/usr/bin/env bash
# Every correction, both advantages, three seeds, 200 rollouts each, and the gradient's direction over rollout precisions.
#   bash scripts/experiment-collapse.sh            about half an hour on 2 cores; what the same committed code finished
#                                                  with the same settings is not repeated
#   bash scripts/experiment-collapse.sh --smoke    a few minutes, shows only that it works, in runs/collapse-smoke
# Results: lab/results/collapse.{json,md,png} and collapse-group.png
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

exec python -m lab.collapse "$@"
