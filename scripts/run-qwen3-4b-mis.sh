#!/usr/bin/env bash
# GRPO on Qwen3-4B with Miles on Megatron, TP 2 x CP 2 on 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis.sh [more flags of Miles]
#
# qwen3-4b.sh says what MODEL_DIR and DATA_DIR hold.
# MIS_CONFIG names a preset or a file of the TIS hook; without it `tis` corrects (docs/choose.md). To watch only,
# set MIS_CONFIG=metrics-only and write --get-mismatch-metrics in place of --use-tis below.
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}" "${MEGATRON_DIR:=$HOME/Megatron-LM}"
: "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-miles}"
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" miles

CORRECTION=(
    --use-tis
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp
    --custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step
    --custom-config-path "$MIS_CONFIG"
)

shape_of qwen3-4B
submit "$MILES_DIR" "$(with_megatron "$MILES_DIR")" "${MODEL[@]}" "${MEGATRON[@]}" "${CORRECTION[@]}" "$@"
