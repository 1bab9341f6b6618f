#!/bin/bash
# Several machines under Slurm: srun starts one torchrun on each.
#   sbatch recipes/jobs/slurm.sh meta-llama/Llama-2-7b-hf --recipe llama2-7b-yarn-32k --out DIR
# The arguments are those of `ropepatch train`. DIR is on a disk that all machines share. After a time-out the same
# command resumes. Divide gradient_accumulation_steps by the number of GPUs to keep the batch.
# Its commands are tested (tests/recipes/test_jobs.py), but it was not run on a cluster.
#SBATCH --job-name=ropepatch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$head:29500" \
  -m ropepatch train "$@"
