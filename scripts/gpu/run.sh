#!/usr/bin/env bash
# One session on a machine with a Hopper GPU and its own torch, which ends in one file, RESULTS/receipt.json:
#   bash scripts/gpu/run.sh WHEELS RESULTS [arguments of lab/gpu_session.py]
# Installs the wheels of the folder WHEELS, or what pack.sh left there, beside the machine's packages. A folder WHEELS
# that is missing is made, and wheels.txt fetched into it, but for --dry-run. The exit code is that of gpu_session.py: 0
# every demand holds, 1 one does not, 2 a section did not finish or this script failed.
set -Eeuo pipefail
trap 'exit 2' ERR
if [ $# -lt 2 ]; then
    echo "usage: run.sh WHEELS RESULTS [arguments of lab/gpu_session.py]" >&2
    exit 2
fi
wheels=$1 results=$2
shift 2
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} # where the caller's has a checkout of Miles, it is timed too
export PYTHONUNBUFFERED=1 TORCH_COMPILE_DISABLE=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

if [ ! -e "$wheels" ] && [[ " $* " != *" --dry-run "* ]]; then
    echo "fetching the wheels of scripts/gpu/wheels.txt into $wheels" >&2
    python3 -m pip download -q --no-deps --only-binary=:all: -r "$repository/scripts/gpu/wheels.txt" -d "$wheels"
fi
shopt -s nullglob
wheel=("$wheels"/*.whl) part=("$wheels"/part.*)
if [ $((${#wheel[@]} + ${#part[@]})) -gt 0 ]; then
    site=$(mktemp -d)
    if [ ${#wheel[@]} -gt 0 ]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${wheel[@]}"
    fi
    if [ ${#part[@]} -gt 0 ]; then
        # Python 3.11.0 to 3.11.3 has no filter to name.
        unpack='import sys, tarfile; parts = tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz")'
        unpack+='; parts.extractall(sys.argv[1], **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))'
        cat "${part[@]}" | python3 -c "$unpack" "$site"
    fi
    PYTHONPATH=$site:$PYTHONPATH
    export DG_JIT_CACHE_DIR=$site/deep_gemm_cache # one for all sections; the default is in HOME, which may be unset
    # DeepGEMM's library asks the loader for nvrtc and cuBLAS, which torch brings along in folders of its own.
    packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    nvidia=$(find "$packages/nvidia" -type d -name lib 2>/dev/null | paste -sd: || true)
    export LD_LIBRARY_PATH=$nvidia${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
if command -v nvcc >/dev/null; then # for kernels that are compiled at run time; the nvcc on PATH may be a wrapper
    CUDA_HOME=${CUDA_HOME:-$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's|^#$ _HERE_=\(.*\)/bin$|\1|p' || true)}
    export CUDA_HOME
fi

python3 -m lab.gpu_session --help >/dev/null # ends here where a package cannot be imported
code=0
python3 -m lab.gpu_session --receipt "$results/receipt.json" "$@" || code=$?
exit $((code > 1 ? 2 : code)) # a session that was killed did not finish
