#!/usr/bin/env bash
# GRPO on Qwen2.5-1.5B and gsm8k with Miles, fully asynchronous: 6 of 8 GPUs roll out, 2 train, and each token weighs by the version after its own.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen2.5-1.5b-async.sh [more flags of Miles]
#
# MODEL_DIR holds Qwen2.5-1.5B-Instruct (Hugging Face) and Qwen2.5-1.5B_torch_dist (converted by Miles); DATA_DIR holds
# gsm8k/train.parquet. STALENESS is Miles's bound, from the engine's version; training is one version later.
# SEGMENT_WISE=false is the arm to compare with: standard decoupled PPO, whose weights are logged by age as well.
# qwen3-4b.sh has what this launch shares with the others.
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${SAVE_DIR:=$HOME/runs/qwen2.5-1.5b-async}"
: "${SEGMENT_WISE:=true}" "${STALENESS:=2}" "${TRAIN_GPUS:=2}" "${ROLLOUT_GPUS:=6}"
MODEL_NAME=Qwen2.5-1.5B-Instruct CONVERTED=Qwen2.5-1.5B_torch_dist TRAIN_SCRIPT=train_async.py
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"
mkdir -p "$SAVE_DIR"
config=$SAVE_DIR/mis.yaml
printf 'mis:\n  segment_wise: {enabled: %s}\n  metrics: all\n' "$SEGMENT_WISE" >"$config"
python3 -m mis_plugins config check "$config" --host miles

CORRECTION=(
    --loss-type custom_loss
    --custom-loss-function-path mis_plugins.mis.policy_loss
    --custom-config-path "$config"
    --custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
)
VERSIONS=(
    --fully-async
    --max-weight-staleness "$STALENESS"
    --pause-generation-mode retract
    --custom-generate-function-path mis_plugins.mis.generate_with_versions
    --custom-convert-samples-to-train-data-path mis_plugins.mis.convert_with_versions
    --custom-megatron-init-path mis_plugins.mis.carry_versions
    --sglang-stream-interval 1
    --sglang-incremental-streaming-output
)
ROLLOUT=(
    --prompt-data "$DATA_DIR/gsm8k/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
    --num-rollout 290
    --rollout-batch-size 256
    --n-samples-per-prompt 4
    --rollout-max-response-len 1024
    --rollout-temperature 1
    --global-batch-size 1024
    --balance-data
)
ENGINE=(--sglang-mem-fraction-static 0.8)
OBJECTIVE=(
    --advantage-estimator grpo
    --eps-clip 0.4
    --entropy-coef 0
)
OPTIMIZER=(
    --optimizer adam
    --lr 1.7e-5
    --lr-decay-style constant
    --weight-decay 0.017
    --adam-beta1 0.9
    --adam-beta2 0.999
)
PLACEMENT=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$TRAIN_GPUS"
    --rollout-num-gpus "$ROLLOUT_GPUS"
    --use-dynamic-batch-size
    --max-tokens-per-gpu 10240
)

# Miles's shape says --rotary-base 10000, and its validator wants the model's own 1000000; argparse takes the last.
shape_of qwen2.5-1.5B
submit "$MILES_DIR" "$(with_megatron "$MILES_DIR")" "${MODEL[@]}" --rotary-base 1000000 "${MEGATRON_ALONE[@]}" \
    "${CORRECTION[@]}" "${VERSIONS[@]}" "$@"
