#!/bin/bash
#SBATCH --job-name=deepseek-v3-1024gpu
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300

# Started at the root of the repository: DATA=... TOKENIZER=... sbatch examples/presets/sbatch_deepseek_v3_1024gpu.sh

set -euo pipefail

# Gathers and reductions must run beside compute.
unset CUDA_DEVICE_MAX_CONNECTIONS

# Buffers that NCCL registers (--use-nccl-ub) must not grow.
unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
FOLDER=${FOLDER:-runs/deepseek-v3-1024gpu}

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node=8 \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD:29500" \
    --max-restarts=3 \
    pretrain_gpt.py \
    --config examples/presets/deepseek-v3-1024gpu.yaml \
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
