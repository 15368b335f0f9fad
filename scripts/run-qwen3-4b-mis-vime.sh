#!/usr/bin/env bash
# GRPO on Qwen3-4B with vime on Megatron, TP 2 x CP 2 on 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own, and no checkout of vime. tests/documents/test_scripts.py checks the
# flags by name against vime's, whose files were read.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of vime
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis-vime.sh [more flags of vime]
#
# qwen3-4b.sh says what MODEL_DIR and DATA_DIR hold.
# MIS_CONFIG names a preset or a file of the TIS hook; without it `tis` corrects (docs/choose.md). To watch only,
# set MIS_CONFIG=metrics-only and write --get-mismatch-metrics in place of --use-tis below. A rollout is one optimizer
# step here, so that a config with `scope: rollout` needs these flags at the end:
# --rollout-data-postprocess-path mis_plugins.mis.normalize_rollout --get-mismatch-metrics
set -euo pipefail

: "${VIME_DIR:=$HOME/vime}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-vime}"
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" vime
ENGINE=(--vllm-gpu-memory-utilization 0.7)

CORRECTION=(
    --use-tis
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp
    --custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
    --custom-config-path "$MIS_CONFIG"
)
# The shape of the model, as vime describes it: fills MODEL_ARGS.
# shellcheck disable=SC1091
source "$VIME_DIR/scripts/models/qwen3-4B.sh"

submit "$VIME_DIR" "$(with_megatron "$VIME_DIR")" "${MODEL_ARGS[@]}" "${MEGATRON[@]}" "${CORRECTION[@]}" "$@"
