#!/usr/bin/env bash
# The real SGLang against the real Megatron-core and Hugging Face on CPU, token by token, bit by bit.
#   bash scripts/verify-sglang-megatron.sh            three quarters of an hour on 2 cores
#   RESULTS=runs/certificates bash scripts/verify-sglang-megatron.sh --tokens 500
# Certificates and pictures: lab/results/certificate-*. Ends at the first that is not "equal".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
export OMP_NUM_THREADS=1
results=${RESULTS:-lab/results}

verify() {
    local name="$results/certificate-sglang-$1-$2-$3-$4"
    shift 4
    echo "$name"
    python -m lab.certificate_picture "$name.png" --engine sglang --json "$name.json" "$@"
}

PYTHON=$(command -v python) bash true_on_policy/engines/install.sh sglang
for trainer in megatron hf; do
    for model in tiny-qwen3 tiny-qwen3-tied; do
        verify "$trainer" "$model" fp32 engine --trainer "$trainer" --model "$model" "$@"
        for norm_order in engine trainer; do
            verify "$trainer" "$model" bf16 "$norm_order" --trainer "$trainer" --model "$model" --dtype bf16 \
                --norm-order "$norm_order" "$@"
        done
    done
done
for model in tiny-qwen2.5 tiny-llama tiny-qwen3-vl; do # tiny-qwen3 has both orders above
    for dtype in fp32 bf16; do
        verify megatron "$model" "$dtype" engine --trainer megatron --model "$model" --dtype "$dtype" "$@"
    done
done
for dtype in fp32 bf16; do # Hugging Face's trainer holds the vision tower too
    verify hf tiny-qwen3-vl "$dtype" engine --trainer hf --model tiny-qwen3-vl --dtype "$dtype" "$@"
done
