#!/usr/bin/env bash
# GRPO on Qwen3-4B with slime on Megatron, TP 2 x CP 2 on 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against slime's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of slime
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis-slime.sh [more flags of slime]
#
# qwen3-4b.sh says what MODEL_DIR and DATA_DIR hold.
# MIS_CONFIG names a preset or a file of the TIS hook; without it `tis` corrects (docs/choose.md). To watch only,
# set MIS_CONFIG=metrics-only and write --get-mismatch-metrics in place of --use-tis below. A rollout is one optimizer
# step here, so that a config with `scope: rollout` needs these flags at the end:
# --rollout-data-postprocess-path mis_plugins.mis.normalize_rollout --get-mismatch-metrics
set -euo pipefail

: "${SLIME_DIR:=$HOME/slime}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-slime}"
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" slime

CORRECTION=(
    --use-tis
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp
    --custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
    --custom-config-path "$MIS_CONFIG"
)
# The shape of the model, as slime describes it: fills MODEL_ARGS.
# shellcheck disable=SC1091
source "$SLIME_DIR/scripts/models/qwen3-4B.sh"

submit "$SLIME_DIR" "$(with_megatron "$SLIME_DIR")" "${MODEL_ARGS[@]}" "${MEGATRON[@]}" "${CORRECTION[@]}" "$@"
