# Sourced by the launch scripts: GRPO on Qwen3-4B, 8 GPUs of one node. Holds the arguments that the launches
# share. MODEL_DIR holds Qwen3-4B (Hugging Face), and for Megatron Qwen3-4B_torch_dist (converted by the
# host); MODEL_NAME names another model there. DATA_DIR holds dapo-math-17k/dapo-math-17k.jsonl. A Ray cluster
# must be up (ray start --head --num-gpus 8).

: "${MODEL_DIR:=$HOME/models}" "${DATA_DIR:=$HOME/datasets}" "${MODEL_NAME:=Qwen3-4B}"
: "${NUM_GPUS:=8}" "${RAY_ADDRESS:=http://127.0.0.1:8265}"

CHECKPOINT=(
    --hf-checkpoint "$MODEL_DIR/$MODEL_NAME"
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
ENGINE=(--sglang-mem-fraction-static 0.7) # of SGLang
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
PLACEMENT=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$NUM_GPUS"
    --colocate
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)
MEGATRON_ALONE=( # for any layout of the ranks
    --ref-load "$MODEL_DIR/${CONVERTED:=${MODEL_NAME}_torch_dist}"
    --attention-backend flash
    --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32
    --attention-dropout 0
    --hidden-dropout 0
    --rollout-num-gpus-per-engine "${ENGINE_GPUS:=1}"
)
MEGATRON=( # TP 2 x CP 2, for the launches with a correction
    "${MEGATRON_ALONE[@]}"
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

shape_of() { # the model $1 as Miles describes it, one line of words, into MODEL
    local words
    words=$(python3 "$MILES_DIR/miles/utils/external_utils/model_args_utils.py" "$1")
    read -ra MODEL <<<"$words"
}

with_megatron() { # the Ray environment of the host in folder $1 beside Megatron
    echo "{\"env_vars\": {\"PYTHONPATH\": \"$1:$MEGATRON_DIR\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}"
}

submit() { # a job of the host in folder $1, in the Ray environment $2, with the arguments above and "${@:3}"
    ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$2" -- python3 "$1/${TRAIN_SCRIPT:-train.py}" \
        "${CHECKPOINT[@]}" "${ROLLOUT[@]}" "${ENGINE[@]}" "${OBJECTIVE[@]}" "${OPTIMIZER[@]}" "${PLACEMENT[@]}" "${@:3}"
}
