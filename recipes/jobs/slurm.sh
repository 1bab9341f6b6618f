#!/bin/bash
# Several machines under Slurm: srun starts one torchrun on each, and they meet at the first.
#   sbatch recipes/jobs/slurm.sh meta-llama/Llama-2-7b-hf --recipe llama2-7b-yarn-32k --out DIR
# The words are those of `ropepatch extend`; DIR lies on a disk that all machines share. After a time-out the same
# command goes on. Every GPU reads rows of its own: divide gradient_accumulation_steps by their number.
# Not run on a cluster: its commands are tested (tests/recipes/test_jobs.py).
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
  -m ropepatch extend "$@"
