#!/usr/bin/env bash
# Everything CI checks: lint, format, types, tests with shapes checked at run time. Arguments go to pytest.
#   bash scripts/test.sh quick                lint, format and the math's tests, in less than two minutes
#   bash scripts/test.sh                      all but the tests of rollout engines
#   bash scripts/test.sh -k weights -x        the checks, then only these tests
#   bash scripts/test.sh --engines            all of it; installs SGLang and vLLM (10 GB free)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cleanup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1

MATH=(tests/terms tests/correction tests/loss/test_objective.py)

if [ "${1:-}" = quick ]; then
    ruff check .
    ruff format --check .
    exec python -m pytest --numprocesses "${TEST_WORKERS:-2}" --ignore=tests/correction/test_parallel.py \
        --jaxtyping-packages mis_plugins,true_on_policy,shapes.checked "${MATH[@]}" "${@:2}"
fi

if [ "${1:-}" = --engines ]; then
    shift
    export MIS_TEST_ENGINES=1 # tests/engines/conftest.py collects its tests then
    PYTHON=$(command -v python) bash true_on_policy/engines/install.sh sglang vllm & # beside the checks, which use one core
    installer=$!
fi

ruff check .
ruff format --check .
pyright

if [ -n "${installer:-}" ] && ! wait "$installer"; then
    echo "error: an engine could not be installed; its reason stands above, perhaps before what pyright says" >&2
    exit 1
fi

# Two runs: a process that has pinned kernels or trained in Megatron holds threads, and ranks forked from it may hang.
mapfile -t pinning < <(grep -rlE --include='test_*.py' --exclude-dir=engines '^ *(from|import) true_on_policy' tests)
run_tests() { # 5 is "no test selected", which -k may leave of one half
    python -m pytest --numprocesses "${TEST_WORKERS:-2}" --max-worker-restart 0 --dist loadfile --no-loadscope-reorder \
        --durations 10 -r s \
        --jaxtyping-packages mis_plugins,true_on_policy,shapes.checked "$@" || [ $? -eq 5 ]
}
run_tests "${pinning[@]}" "$@"
run_tests tests --ignore=tests/engines "${pinning[@]/#/--ignore=}" "$@"
if [ -n "${MIS_TEST_ENGINES:-}" ]; then # two engines at a time: each takes some 3 GB
    run_tests tests/engines "$@"
fi
