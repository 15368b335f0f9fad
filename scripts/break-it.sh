#!/usr/bin/env bash
# Tries to break the pack with random cases in every room: bash scripts/break-it.sh [--minutes N] [--seed S] [--room R]
# A fault prints the command that replays it. `python -m lab.break_it --help` lists all arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

python -m lab.break_it "$@"
