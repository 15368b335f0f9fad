#!/usr/bin/env bash
# The real SGLang against Megatron-core's mixture of experts on CPU, token by token, bit by bit: Qwen3-MoE.
#   bash scripts/verify-experts.sh            2,000 tokens, fp32 and bf16, 8 experts top 2 and 64 experts top 8
#   RESULTS=runs/certificates bash scripts/verify-experts.sh --tokens 500
# Certificates and pictures: lab/results/certificate-*-moe*. Ends at the first that is not "equal".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1
results=${RESULTS:-lab/results}

PYTHON=$(command -v python) bash true_on_policy/engines/install.sh sglang
for model in tiny-qwen3-moe tiny-qwen3-moe-64; do
    for dtype in bf16 fp32; do
        name="$results/certificate-sglang-megatron-$model-$dtype-engine"
        echo "$name"
        python -m lab.certificate_picture "$name.png" --engine sglang --trainer megatron --model "$model" --dtype "$dtype" \
            --json "$name.json" "$@"
    done
done
