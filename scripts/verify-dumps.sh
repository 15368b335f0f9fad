#!/usr/bin/env bash
# Compares recorded tensors of two engines bit by bit and names the first operation that differs (docs/diff.md).
#   bash scripts/verify-dumps.sh ENGINE_DUMP TRAINER_DUMP --by-token --model CHECKPOINT
# Exit codes: 0 equal, 1 different, 2 not comparable. Arguments go to python -m true_on_policy diff.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" python -m true_on_policy diff "$@"
