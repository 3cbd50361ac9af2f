#!/bin/bash
# One script on several machines: start this on each of them, with the same HEAD and NNODES.
#
#   HEAD=node1:29500 NNODES=2 NPROC=8 examples/multinode.sh examples/gpt.py --steps 3600 --auto_resume true
#   HEAD=127.0.0.1:29500 NNODES=2 LOCAL_ADDR=127.0.0.1 examples/multinode.sh examples/digits.py     # started twice, on one machine
#
# The second line ends at 0.975 test accuracy, after 18 s of processor time in all. HEAD is the machine that the others meet at, and a free
# port there. The processes get their ranks when all machines have come. With --max-restarts, a rank that dies restarts all of them, and
# auto_resume goes on from the newest checkpoint: put workspace_root onto a file system that all machines share. Two agents on one machine
# do the same, which is how the test runs it.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # restarts can hang on the shared store (pytorch#135712)
exec torchrun \
    --nnodes "${NNODES:?the number of machines}" \
    --nproc-per-node "${NPROC:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?host:port of one of the machines}" \
    --rdzv-id "${JOB:-danling}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    "$@"
