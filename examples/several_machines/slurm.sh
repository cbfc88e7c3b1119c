#!/bin/bash
# From the root of the repository: sbatch examples/several_machines/slurm.sh
# One task on each machine, which uses all of its GPUs. Sent again, it goes on from the newest checkpoint.
#SBATCH --job-name=roundpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
set -eu

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

exec srun python examples/several_machines/train.py --num-nodes "$SLURM_NNODES" --model "${MODEL:-Qwen/Qwen3-8B}" \
    --length 2048 --batch-size 64 --lr 1e-5 --max-steps 1000 --folder "${FOLDER:-run}" "$@"
