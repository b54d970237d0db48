#!/usr/bin/env bash
# Eight nodes of eight GPUs, one process a GPU: sbatch examples/launch/slurm.sh
# JAX finds the other processes by SLURM's variables. A requeued job resumes with --resume auto.
#SBATCH --job-name=twinkle-jax
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@180
set -euo pipefail

# --signal: three minutes before the time is up every task gets SIGTERM, and the run saves a checkpoint.
# --kill-on-bad-exit: if one task cannot even start, SLURM ends the others.
srun --kill-on-bad-exit=1 twinkle-jax train \
  --model "${MODEL:-/shared/models/Qwen2.5-7B-Instruct}" \
  --task "${TASK:-/shared/data/train.jsonl}" \
  --output_dir "${OUTPUT_DIR:-/shared/runs/qwen}" \
  --resume auto \
  --dtype bfloat16 \
  --mesh.fsdp 64 \
  --distributed.connect_timeout 300
