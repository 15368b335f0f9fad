#!/usr/bin/env bash
# The real SGLang against the real Megatron-core on a real model and real prompts, on CPU, token by token, bit by bit.
#   bash scripts/verify-real-model.sh                 an hour on 2 cores; fetches a model of 93 MB once
#   RESULTS=runs/certificates bash scripts/verify-real-model.sh --tokens 500
# Certificates and pictures: lab/results/certificate-*-smollm2-135m-*. Ends at the first that is not "equal".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1
results=${RESULTS:-lab/results}

PYTHON=$(command -v python) bash true_on_policy/engines/install.sh sglang
for dtype in bf16 fp32; do
    name="$results/certificate-sglang-megatron-smollm2-135m-$dtype-engine"
    echo "$name"
    python -m lab.certificate_picture "$name.png" --engine sglang --trainer megatron --model smollm2-135m --prompts builtin \
        --tokens 5000 --dtype "$dtype" --json "$name.json" "$@"
done
