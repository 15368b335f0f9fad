#!/usr/bin/env bash
# GRPO on Qwen3-4B with Miles on Megatron, TP 2 x CP 2 on 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis.sh [more flags of Miles]
#
# MODEL_DIR holds Qwen3-4B (Hugging Face) and Qwen3-4B_torch_dist (converted by Miles); DATA_DIR holds
# dapo-math-17k/dapo-math-17k.jsonl.
# MIS_CONFIG names another preset or file, of the TIS hook. To watch without correcting, write --get-mismatch-metrics
# in place of --use-tis below.
# A Ray cluster must be up (ray start --head --num-gpus 8).
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${MODEL_DIR:=$HOME/models}" "${DATA_DIR:=$HOME/datasets}" "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-miles}"
: "${NUM_GPUS:=8}" "${RAY_ADDRESS:=http://127.0.0.1:8265}"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" miles

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
# The shape of the model, as Miles describes it: one line of words.
model=$(python3 "$MILES_DIR/miles/utils/external_utils/model_args_utils.py" qwen3-4B)
read -ra MODEL <<<"$model"

environment="{\"env_vars\": {\"PYTHONPATH\": \"$MILES_DIR:$MEGATRON_DIR\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}"
ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$environment" -- python3 "$MILES_DIR/train.py" \
    "${MODEL[@]}" "${CORRECTION[@]}" "${CHECKPOINT[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${OPTIMIZER[@]}" \
    "${PARALLELISM[@]}" "${PRECISION[@]}" "${ENGINE[@]}" "$@"
