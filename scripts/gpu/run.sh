#!/usr/bin/env bash
# One session on an offline machine with a Hopper GPU, its own torch and the wheels of scripts/gpu/README.md:
#   bash scripts/gpu/run.sh WHEELS RESULTS [arguments of benchmarks/gpu_session.py]
# Installs the wheels of the folder WHEELS beside the machine's packages, then writes RESULTS/gpu_session.{json,md}.
set -euo pipefail
wheels=$1 results=$2
shift 2
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$repository PYTHONUNBUFFERED=1 TORCH_COMPILE_DISABLE=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
    PYTHONPATH=$site:$PYTHONPATH
    # DeepGEMM's library asks the loader for nvrtc and cuBLAS, which torch brings along in folders of its own.
    packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    nvidia=$(find "$packages/nvidia" -type d -name lib 2>/dev/null | paste -sd: || true)
    export LD_LIBRARY_PATH=$nvidia${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
if command -v nvcc >/dev/null; then # for kernels that DeepGEMM compiles at run time
    CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
    export CUDA_HOME
fi

mkdir -p "$results"
exec python3 "$repository/benchmarks/gpu_session.py" --json "$results/gpu_session.json" "$@"
