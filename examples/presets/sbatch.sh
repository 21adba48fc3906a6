#!/bin/bash
#SBATCH --job-name=megatron-fsdp
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300

# Started at the root of the repository, with the nodes that the preset is for, of eight GPUs each:
# DATA=... TOKENIZER=... sbatch --nodes=8 examples/presets/sbatch.sh llama3-8b-64gpu

set -euo pipefail

PRESET=${1:?name a preset of examples/presets, such as llama3-8b-64gpu}
GPUS=${PRESET##*-}
if [ "${GPUS%gpu}" != "$((8 * SLURM_NNODES))" ]; then
    echo "$PRESET is for ${GPUS%gpu} GPUs, and $SLURM_NNODES nodes have $((8 * SLURM_NNODES)): give --nodes for it" >&2
    exit 2
fi

# Gathers and reductions must run beside compute.
unset CUDA_DEVICE_MAX_CONNECTIONS

# Buffers that NCCL registers (--use-nccl-ub) must not grow.
unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
FOLDER=${FOLDER:-runs/$PRESET}

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node=8 \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD:29500" \
    --max-restarts=3 \
    pretrain_gpt.py \
    --config "examples/presets/$PRESET.yaml" \
    --use-nccl-ub \
    --data-path "$DATA" \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "$TOKENIZER" \
    --out "$FOLDER" \
    --save "$FOLDER/checkpoints" \
    --load "$FOLDER/checkpoints" \
    --save-interval 500 \
    --keep-last 3 \
    --async-save
