#!/usr/bin/env bash
# Segment-wise decoupled PPO, also clipped against the next version, and standard decoupled PPO: variance of
# the weights by age, the gradient's direction, rewards and throughput, at three learning rates and three
# seeds.
#   bash scripts/experiment-async.sh            a run that this committed code finished is not repeated
#   bash scripts/experiment-async.sh --throughput         throughput alone, put into the results that are there; wants a machine without other work
#   bash scripts/experiment-async.sh --only "clip against next"   rewards of one method, put into the results that are there
#   bash scripts/experiment-async.sh --smoke --seeds 0    minutes, shows only that it works, in runs/async-smoke
#   bash scripts/experiment-async.sh --tables             tables and picture of the results that are there
# Results: lab/results/async.{json,md,png}
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

exec python -m lab.asynchrony "$@"
