#!/usr/bin/env bash
# GRPO on Qwen3-4B with Miles on FSDP, 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis-fsdp.sh [more flags of Miles]
#
# MODEL_DIR holds Qwen3-4B (Hugging Face); DATA_DIR holds dapo-math-17k/dapo-math-17k.jsonl. On FSDP Miles knows no
# context parallelism and never calls --rollout-data-postprocess-path, so `scope: rollout` cannot run.
# MIS_CONFIG names another preset or file, of the TIS hook. To watch without correcting, write --get-mismatch-metrics
# in place of --use-tis below.
# A Ray cluster must be up (ray start --head --num-gpus 8).
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}"
: "${MODEL_DIR:=$HOME/models}" "${DATA_DIR:=$HOME/datasets}" "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-fsdp}"
: "${NUM_GPUS:=8}" "${RAY_ADDRESS:=http://127.0.0.1:8265}"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" fsdp

CORRECTION=(
    --use-tis
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_fsdp
    --custom-config-path "$MIS_CONFIG"
)
CHECKPOINT=(
    --hf-checkpoint "$MODEL_DIR/Qwen3-4B"
    --ref-load "$MODEL_DIR/Qwen3-4B"
    --save "$SAVE_DIR"
    --save-interval 50
)
ROLLOUT=(
    --prompt-data "$DATA_DIR/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 1000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)
OBJECTIVE=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
    --entropy-coef 0
)
OPTIMIZER=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)
BACKEND=(
    --train-backend fsdp
    --gradient-checkpointing
    --attn-implementation flash_attention_2
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$NUM_GPUS"
    --colocate
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)
ENGINE=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)

environment="{\"env_vars\": {\"PYTHONPATH\": \"$MILES_DIR\"}}"
ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$environment" -- python3 "$MILES_DIR/train.py" \
    "${CORRECTION[@]}" "${CHECKPOINT[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${OPTIMIZER[@]}" "${BACKEND[@]}" \
    "${ENGINE[@]}" "$@"
