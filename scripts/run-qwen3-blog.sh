#!/usr/bin/env bash
# The nine runs of the Miles blog "Let Speed Be With Stability" on the mismatch, with Miles on Megatron and 8 GPUs.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   RECIPE=dense-3 MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-blog.sh [more flags of Miles]
#
# RECIPE        model                   config
# dense-1 to 4  Qwen3-4B-Base           the presets miles-blog-dense-1 to 4; 1 corrects nothing
# moe-1 to 4    Qwen3-30B-A3B-Base      the presets miles-blog-moe-1 to 4, from the checkpoint of step 300 in LOAD_DIR
# moe-r3        Qwen3-30B-A3B-Base      nothing is corrected; Miles replays the engine's routes (R3) from the same step
#
# DATA_DIR holds dapo-math-17k/dapo-math-17k.jsonl, aime-2024/aime-2024.jsonl and aime-2025/aime-2025.jsonl.
#
# Departures from the blog's section "Experiments" (Awesome-ML-SYS-Tutorial, rlhf/slime/mismatch/blog-en.md):
#   prompts     dapo-math-17k, where the blog trains on aaabiao/dapo_filter
#   estimator   GRPO with one optimizer step a rollout, where the blog names REINFORCE, which Miles lacks: the ratio is
#               1, and the group's mean and standard deviation stand for the baseline
#   prompts whose answers all score alike are sampled again (DAPO's filter); the blog names no filter
#   batch, learning rate, lengths and layout are those of qwen3-4b.sh: the blog names none
#   dense-3, -4 have the window of the MoE runs: the blog names none
#   moe-1 to 4  start at LOAD_DIR's step 300, as the blog's do; its own checkpoint is zhuohaoli/qwen3-30b-a3b-base-mismatch
#
# GPU memory of the MoE runs, computed and not measured: 30.5e9 parameters at TP 2, EP 8 are 3.6e9 of experts and 0.8e9
# others a GPU. Weights and fp32 gradients take 25 GiB of it; Adam's states would take 43 GiB more, which leaves too little
# of 80 GB for activations, so they lie in 340 GiB of the node's memory (--optimizer-cpu-offload). The weights of a
# rollout engine are 57 GiB, which one such GPU cannot hold beside its cache: ENGINE_GPUS is 8.
set -euo pipefail

: "${RECIPE:?dense-1 to dense-4, moe-1 to moe-4, or moe-r3}"
: "${MILES_DIR:=$HOME/miles}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${SAVE_DIR:=$HOME/runs/blog-$RECIPE}" "${LOAD_DIR:=$HOME/runs/blog-moe}"
ROUTES=() EXPERTS=()
case $RECIPE in
dense-[1-4])
    MODEL_NAME=Qwen3-4B-Base MIS_CONFIG=miles-blog-$RECIPE shape=qwen3-4B
    ;;
moe-[1-4] | moe-r3)
    MODEL_NAME=Qwen3-30B-A3B-Base MIS_CONFIG=miles-blog-$RECIPE shape=qwen3-30B-A3B
    EXPERTS=(--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --load "$LOAD_DIR" --ckpt-step 300
        --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
    : "${ENGINE_GPUS:=8}"
    ;;
*)
    echo "$0: RECIPE=$RECIPE is none of dense-1 to dense-4, moe-1 to moe-4, moe-r3" >&2
    exit 2
    ;;
esac
if [[ $RECIPE == moe-r3 ]]; then
    MIS_CONFIG=metrics-only
    ROUTES=(--use-rollout-routing-replay)
fi
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" miles

apply=--use-tis
if [[ $checked == *--get-mismatch-metrics* ]]; then apply=--get-mismatch-metrics; fi # a config that only watches
CORRECTION=(
    "$apply"
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp
    --custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
    --custom-config-path "$MIS_CONFIG"
)
FILTER=(
    --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)
EVALUATION=(
    --eval-interval 20
    --eval-prompt-data
    aime24 "$DATA_DIR/aime-2024/aime-2024.jsonl"
    aime25 "$DATA_DIR/aime-2025/aime-2025.jsonl"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)

shape_of "$shape"
submit "$MILES_DIR" "$(with_megatron "$MILES_DIR")" "${MODEL[@]}" "${MEGATRON[@]}" "${EXPERTS[@]}" "${ROUTES[@]}" \
    "${CORRECTION[@]}" "${FILTER[@]}" "${EVALUATION[@]}" "$@"
