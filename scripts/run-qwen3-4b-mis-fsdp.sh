#!/usr/bin/env bash
# GRPO on Qwen3-4B with Miles on FSDP, 8 GPUs, the mismatch corrected by mis_plugins.
#
# Not run here: the project has no GPU of its own. tests/documents/test_scripts.py checks the flags by name against Miles's.
#
#   pip install /path/to/mis-plugins          on every node, in the environment of Miles
#   MODEL_DIR=... DATA_DIR=... bash scripts/run-qwen3-4b-mis-fsdp.sh [more flags of Miles]
#
# qwen3-4b.sh says what MODEL_DIR and DATA_DIR hold. On FSDP Miles knows no context parallelism and never
# calls --rollout-data-postprocess-path, so `scope: rollout` cannot run. MIS_CONFIG names a preset or a file
# of the TIS hook; without it `tis` corrects (docs/choose.md). To watch only, set MIS_CONFIG=metrics-only and
# write --get-mismatch-metrics in place of --use-tis below.
set -euo pipefail

: "${MILES_DIR:=$HOME/miles}"
: "${SAVE_DIR:=$HOME/runs/qwen3-4b-mis-fsdp}"
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-4b.sh"
source "$(dirname "${BASH_SOURCE[0]}")/tis_config.sh" fsdp

CORRECTION=(
    --use-tis
    --custom-tis-function-path mis_plugins.mis.compute_mis_weights_fsdp
    --custom-config-path "$MIS_CONFIG"
)
FSDP=(
    --ref-load "$MODEL_DIR/Qwen3-4B"
    --train-backend fsdp
    --gradient-checkpointing
    --attn-implementation flash_attention_2
    --rollout-num-gpus-per-engine 1
)

environment="{\"env_vars\": {\"PYTHONPATH\": \"$MILES_DIR\"}}"
submit "$MILES_DIR" "$environment" "${FSDP[@]}" "${CORRECTION[@]}" "$@"
