#!/usr/bin/env bash
# GRPO on Qwen3-4B with Miles, truly on policy: the same kernels on both sides, every log-prob compared by its bits.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... [TRAIN_BACKEND=fsdp] bash scripts/run-qwen3-4b-true-on-policy.sh [more flags of Miles]
#
# TRAIN_BACKEND is megatron (TP 8 on both sides, 8 GPUs) or fsdp. qwen3-4b.sh says what MODEL_DIR and DATA_DIR hold.
# BITWISE_CONFIG names a file with the key `bitwise:`, for example to stop at the first difference (docs/gpu.md).
# The trainer pins its kernels, and refuses to start where the contract cannot hold. On Megatron an init hook
# of Miles pins; on FSDP, where Miles calls no such hook, Ray's setup hook of worker processes pins. Trainers
# and engines write what they run to D=SAVE_DIR/true_on_policy, which this command reads:
#   python -m true_on_policy doctor --engine URL --engine-dump $D --trainer-dump $D
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}" "${MEGATRON_DIR:=$HOME/Megatron-LM}" "${TRAIN_BACKEND:=megatron}"
: "${SAVE_DIR:=$HOME/runs/qwen3-4b-true-on-policy-$TRAIN_BACKEND}" "${BITWISE_CONFIG:=}"
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"

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
environment=("PYTHONPATH=$MILES_DIR" "TRUE_ON_POLICY_ENGINE_DUMP=$SAVE_DIR/true_on_policy" "${TRUE_ON_POLICY_ENV[@]}")
if [[ $TRAIN_BACKEND == megatron ]]; then
    COMPARISON+=(
        --custom-megatron-init-path true_on_policy.hosts.miles_init
        --custom-megatron-before-train-step-hook-path true_on_policy.hosts.report_step
    )
    CHECKPOINT+=(--ref-load "$MODEL_DIR/Qwen3-4B_torch_dist")
    shape_of qwen3-4B
    BACKEND=("${MODEL[@]}" --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32)
    environment[0]+=:$MEGATRON_DIR
    environment+=("CUDA_DEVICE_MAX_CONNECTIONS=1")
else
    CHECKPOINT+=(--ref-load "$MODEL_DIR/Qwen3-4B")
    BACKEND=(--gradient-checkpointing)
    hook=', "worker_process_setup_hook": "true_on_policy.fsdp_worker.watch"'
fi

variables=$(printf ', "%s"' "${environment[@]/=/\": \"}")
runtime="{\"env_vars\": {${variables#, }}${hook:-}}"
submit "$MILES_DIR" "$runtime" "${BACKEND[@]}" "${TRUE_ON_POLICY_ARGS[@]}" "${COMPARISON[@]}" "$@"
