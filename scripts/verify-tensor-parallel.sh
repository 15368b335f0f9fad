#!/usr/bin/env bash
# SGLang on one rank against Megatron-core on 2 and 4, and on 2 against 1, on CPU: unequal tensor parallelism, equal bits.
#   bash scripts/verify-tensor-parallel.sh            twenty minutes on 2 cores
#   RESULTS=runs/certificates bash scripts/verify-tensor-parallel.sh --tokens 500
# Certificates and pictures: lab/results/certificate-*-tp*. Ends at the first that is not "equal".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1
results=${RESULTS:-lab/results}

verify() { # ranks of the engine, ranks of the trainer, dtype
    local name="$results/certificate-sglang-tp$1-megatron-tp$2-$3"
    echo "$name"
    python -m lab.certificate_picture "$name.png" --engine sglang --engine-tensor-parallel "$1" \
        --trainer megatron --trainer-tensor-parallel "$2" --leaves 4 --dtype "$3" \
        --json "$name.json" "${@:4}"
}

PYTHON=$(command -v python) bash true_on_policy/engines/install.sh sglang
for dtype in fp32 bf16; do
    verify 1 2 "$dtype" "$@"
    verify 1 4 "$dtype" "$@"
    verify 2 1 "$dtype" "$@"
done
