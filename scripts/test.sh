#!/usr/bin/env bash
# Everything CI checks: lint, format, types, tests with shapes checked at run time. Arguments go to pytest.
#   bash scripts/test.sh                      all of it
#   bash scripts/test.sh -k weights -x        the checks, then only these tests
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

ruff check .
ruff format --check .
pyright
python -m pytest --numprocesses "${TEST_WORKERS:-2}" --dist loadfile --durations 10 -r s \
    --jaxtyping-packages mis_plugins,true_on_policy,shapes.checked "$@"
