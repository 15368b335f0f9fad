#!/usr/bin/env bash
# GRPO on Qwen3-4B with Miles, truly on policy: the same kernels on both sides, every log-prob compared by its bits.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... [TRAIN_BACKEND=fsdp] bash scripts/run-qwen3-4b-true-on-policy.sh [more flags of Miles]
#
# TRAIN_BACKEND is megatron (TP 8 on both sides, 8 GPUs) or fsdp. MODEL_DIR holds Qwen3-4B (Hugging Face), and for
# megatron Qwen3-4B_torch_dist (converted by Miles); DATA_DIR holds dapo-math-17k/dapo-math-17k.jsonl.
# BITWISE_CONFIG names a file with the key `bitwise:`, for example to stop at the first difference (docs/gpu.md).
# The trainer pins, and refuses to start where the contract cannot hold: on Megatron by an init hook of Miles, which calls
# none on FSDP; there by Ray's setup hook of worker processes. Trainers and engines write what they run to
# D=SAVE_DIR/true_on_policy: python -m true_on_policy doctor --engine URL --engine-dump $D --trainer-dump $D reads it.
# A Ray cluster must be up (ray start --head --num-gpus 8).
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}" "${MEGATRON_DIR:=$HOME/Megatron-LM}" "${TRAIN_BACKEND:=megatron}"
: "${MODEL_DIR:=$HOME/models}" "${DATA_DIR:=$HOME/datasets}"
: "${SAVE_DIR:=$HOME/runs/qwen3-4b-true-on-policy-$TRAIN_BACKEND}" "${BITWISE_CONFIG:=}"
: "${NUM_GPUS:=8}" "${RAY_ADDRESS:=http://127.0.0.1:8265}"

# What both sides must agree on. `wait` gives the exit status of the command, which mapfile does not look at.
contract=(python3 -m true_on_policy flags --model qwen3-4B --backend "$TRAIN_BACKEND" --miles)
mapfile -t TRUE_ON_POLICY_ARGS < <("${contract[@]}")
wait $!
mapfile -t TRUE_ON_POLICY_ENV < <("${contract[@]}" --env)
wait $!

COMPARISON=(
    --loss-type custom_loss
    --custom-loss-function-path true_on_policy.hosts.policy_loss
)
if [[ $BITWISE_CONFIG ]]; then
    BITWISE_CONFIG=$(realpath -e "$BITWISE_CONFIG")
    COMPARISON+=(--custom-config-path "$BITWISE_CONFIG")
fi
CHECKPOINT=(
    --hf-checkpoint "$MODEL_DIR/Qwen3-4B"
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
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)
ENGINE=(
    --sglang-mem-fraction-static 0.7
)
environment=("PYTHONPATH=$MILES_DIR" "TRUE_ON_POLICY_ENGINE_DUMP=$SAVE_DIR/true_on_policy" "${TRUE_ON_POLICY_ENV[@]}")
if [[ $TRAIN_BACKEND == megatron ]]; then
    COMPARISON+=(
        --custom-megatron-init-path true_on_policy.hosts.miles_init
        --custom-megatron-before-train-step-hook-path true_on_policy.hosts.report_step
    )
    CHECKPOINT+=(--ref-load "$MODEL_DIR/Qwen3-4B_torch_dist")
    # The shape of the model, as Miles describes it: one line of words.
    model=$(python3 "$MILES_DIR/miles/utils/external_utils/model_args_utils.py" qwen3-4B)
    read -ra BACKEND <<<"$model"
    BACKEND+=(
        --attention-softmax-in-fp32
        --accumulate-allreduce-grads-in-fp32
    )
    environment[0]+=:$MEGATRON_DIR
    environment+=("CUDA_DEVICE_MAX_CONNECTIONS=1")
else
    CHECKPOINT+=(--ref-load "$MODEL_DIR/Qwen3-4B")
    BACKEND=(--gradient-checkpointing)
    hook=', "worker_process_setup_hook": "true_on_policy.fsdp_worker.watch"'
fi

variables=$(printf ', "%s"' "${environment[@]/=/\": \"}")
runtime="{\"env_vars\": {${variables#, }}${hook:-}}"
ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$runtime" -- python3 "$MILES_DIR/train.py" \
    "${BACKEND[@]}" "${TRUE_ON_POLICY_ARGS[@]}" "${COMPARISON[@]}" "${CHECKPOINT[@]}" "${ROLLOUT[@]}" \
    "${OBJECTIVE[@]}" "${OPTIMIZER[@]}" "${PARALLELISM[@]}" "${ENGINE[@]}" "$@"
