#!/bin/bash
# On each machine: HOST=the-first-machine examples/several_machines/torchrun.sh
# One process on each, which uses all of its GPUs. Lost processes are started again, from the newest checkpoint.
set -eu
: "${HOST:?is the name of one of the machines, which all can reach}"
NODES=${NODES:-2}

# torchrun would set it to 1, also for the optimizer, which runs on the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}

exec torchrun --nnodes="$NODES" --nproc-per-node=1 --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$HOST:29500" --rdzv-id=1 \
    "$(dirname "$0")/train.py" --num-nodes "$NODES" --model "${MODEL:-Qwen/Qwen3-8B}" \
    --length 2048 --batch-size 64 --lr 1e-5 --max-steps 1000 --folder "${FOLDER:-run}" "$@"
