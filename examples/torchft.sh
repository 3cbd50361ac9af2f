#!/usr/bin/env bash
# Fault tolerance with TorchFT on this machine: a lighthouse and two replica groups train the digits; one of them is killed, the other
# trains on, the killed one is started again and heals. One to two minutes; the last lines are two equal test accuracies.
#
#   pip install -e '.[torchft,examples]'
#   examples/torchft.sh            # RANKS=2 examples/torchft.sh for two processes a group
set -euo pipefail

ranks=${RANKS:-1}
python=${PYTHON:-python}
port=${PORT:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
root=$(mktemp -d)
script=$(cd "$(dirname "$0")" && pwd)/digits.py
export TORCHFT_LIGHTHOUSE=http://127.0.0.1:$port RUST_LOG=error
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# One group: torchrun knows its own processes only; ft.* says where they stand among all.
start() {
  setsid "$python" -m torch.distributed.run --nnodes 1 --nproc-per-node "$ranks" --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 "$script" \
    --epochs 250 --workspace_root "$root/runs" --auto_resume true --checkpoint.interval 10 --log_interval 1000 \
    --ft.enabled true --ft.replica_id "$1" --ft.group_size 2 >>"$root/group-$1.log" 2>&1 &
  pid[$1]=$!
}

# Workers of torchrun have sessions of their own: kill it and all that it has started.
kill_group() {
  local workers
  workers=$(pgrep -P "${pid[$1]}" || true)
  kill -KILL "${pid[$1]}" $workers 2>/dev/null || true
  wait "${pid[$1]}" 2>/dev/null || true
}

await() {
  for _ in $(seq 600); do
    if grep -q "$2" "$root/group-$1.log" 2>/dev/null; then return; fi
    sleep 0.2
  done
  echo "group $1 never said: $2"
  tail -n 20 "$root/group-$1.log"
  exit 1
}

finish() {
  kill_group 0
  kill_group 1
  kill "$lighthouse" 2>/dev/null || true
  rm -rf "$root"
}

declare -A pid=([0]="" [1]="")
"$(dirname "$("$python" -c 'import sys; print(sys.executable)')")/torchft_lighthouse" --bind "127.0.0.1:$port" --min_replicas 1 \
  --join_timeout_ms 1000 --quorum_tick_ms 50 --heartbeat_timeout_ms 2000 &
lighthouse=$!
trap finish EXIT

start 0
start 1
await 0 "epoch 10:"
echo "both groups train:      $(grep -o 'epoch 10:.*' "$root/group-0.log")"
kill_group 1
echo "group 1 is killed"
await 0 "epoch 40:"
echo "group 0 trains on:      $(grep -o 'epoch 40:.*' "$root/group-0.log")"
: >"$root/group-1.log"
start 1
await 1 "Healed from another replica group"
echo "group 1 is back:        $(grep -o 'Healed from.*' "$root/group-1.log" | tail -n 1)"
wait "${pid[0]}" "${pid[1]}"
for group in 0 1; do
  echo "group $group has ended with $(grep -o 'test accuracy.*' "$root/group-$group.log")"
done
