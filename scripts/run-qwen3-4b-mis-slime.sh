#!/usr/bin/env bash
# GRPO on Qwen3-4B with slime on Megatron, TP 2 x CP 2 on 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against slime's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of slime
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis-slime.sh [more flags of slime]
#
# MODEL_DIR holds Qwen3-4B (Hugging Face) and Qwen3-4B_torch_dist (converted by slime); DATA_DIR holds
# dapo-math-17k/dapo-math-17k.jsonl.
# MIS_CONFIG names another preset or file, of the TIS hook. To watch without correcting, write --get-mismatch-metrics
# in place of --use-tis below. A config with `scope: rollout` needs these flags at the end, as a rollout is one optimizer
# step here: --rollout-data-postprocess-path mis_plugins.mis.normalize_rollout --get-mismatch-metrics
# A Ray cluster must be up (ray start --head --num-gpus 8).
set -euo pipefail

: "${SLIME_DIR:=$HOME/slime}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${MODEL_DIR:=$HOME/models}" "${DATA_DIR:=$HOME/datasets}" "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-slime}"
: "${NUM_GPUS:=8}" "${RAY_ADDRESS:=http://127.0.0.1:8265}"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" slime

CORRECTION=(
    --use-tis
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp
    --custom-config-path "$MIS_CONFIG"
)
CHECKPOINT=(
    --hf-checkpoint "$MODEL_DIR/Qwen3-4B"
    --ref-load "$MODEL_DIR/Qwen3-4B_torch_dist"
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
PARALLELISM=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$NUM_GPUS"
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
PRECISION=(
    --attention-backend flash
    --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32
    --attention-dropout 0
    --hidden-dropout 0
)
ENGINE=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)
# The shape of the model, as slime describes it: fills MODEL_ARGS.
# shellcheck disable=SC1091
source "$SLIME_DIR/scripts/models/qwen3-4B.sh"

environment="{\"env_vars\": {\"PYTHONPATH\": \"$SLIME_DIR:$MEGATRON_DIR\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}"
ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$environment" -- python3 "$SLIME_DIR/train.py" \
    "${MODEL_ARGS[@]}" "${CORRECTION[@]}" "${CHECKPOINT[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${OPTIMIZER[@]}" \
    "${PARALLELISM[@]}" "${PRECISION[@]}" "${ENGINE[@]}" "$@"
