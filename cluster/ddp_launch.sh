#!/usr/bin/env bash
# Starts a trainer on this node. Run the same line on every node, each with its own NODE_RANK:
#
#   MASTER_ADDR=192.168.50.10 MASTER_PORT=29500 NNODES=5 NODE_RANK=0 GPUS_PER_NODE=1 \
#       cluster/ddp_launch.sh train_gpt2.py --size gpt2
#
# MASTER_ADDR is the IPv4 address of node 0, which writes the checkpoints. GPUS_PER_NODE is the number of
# processes to start here; it may differ between nodes. First all nodes meet. After PREFLIGHT_TIMEOUT (120)
# seconds the launcher says which are missing. Exit code 2: a variable or a flag is wrong. 1: the nodes did not
# meet, or the run failed. The same line resumes from the newest checkpoint, so a loop around it brings a node
# back, as in trainer@.service.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -euo pipefail

fail() {
    echo "ddp_launch.sh: $1" >&2
    exit 2
}

number() { # NAME LOW HIGH
    local value=${!1}
    if ! [[ $value =~ ^[0-9]{1,6}$ ]] || ((10#$value < $2 || 10#$value > $3)); then
        fail "$1=$value is not a whole number from $2 to $3."
    fi
}

for name in MASTER_ADDR MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE; do
    [[ -n ${!name:-} ]] || fail "$name is not set: set MASTER_ADDR (IPv4 address of node 0), MASTER_PORT \
(29500), NNODES (how many machines), NODE_RANK (0 to NNODES - 1) and GPUS_PER_NODE (processes on this one)."
done
PREFLIGHT_TIMEOUT=${PREFLIGHT_TIMEOUT:-120}
number MASTER_PORT 1 65535
number NNODES 1 4096
number NODE_RANK 0 $((10#$NNODES - 1))
number GPUS_PER_NODE 1 64
number PREFLIGHT_TIMEOUT 1 86400
(($# > 0)) || fail "no script is named: ddp_launch.sh train_gpt2.py --size gpt2"
if [[ ! -f $1 ]] && command -v "$1" >/dev/null; then
    words=("${@:2}")
    fail "$1 is a program, not a trainer: start it alone, in Docker with \
docker compose run --rm --entrypoint $1 trainer ${words[*]@Q}"
fi
[[ -f $1 ]] || fail "$1 does not exist in $PWD: go to the directory of the trainers first."
command -v torchrun >/dev/null || fail "torchrun is not on the PATH: activate the virtual environment."

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")") # also if this is a symbolic link
interface=$(python3 "$here/roll_call.py" "$MASTER_ADDR" "$((10#$MASTER_PORT))" \
    "$((10#$NNODES))" "$((10#$NODE_RANK))" "$((10#$GPUS_PER_NODE))" "$((10#$PREFLIGHT_TIMEOUT))")
if ((10#$NNODES > 1)) && [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
fi

# With gloo, torchrun's own restarts (PET_MAX_RESTARTS) work only if each has its own store
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# After SIGTERM, torchrun gives its processes so many seconds to write a checkpoint
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-50}
# Static rendezvous: rank 0 is always on node 0. Without --signals-to-handle, SIGUSR1, SIGUSR2 and SIGXCPU would
# end only torchrun.
# torchrun always exits with 1. The first failed process tells a mistake (2) from what may work at the next try.
# If a signal ends a torchrun, the others wait for it at a barrier: for 20 s instead of five minutes.
exec python3 -P -c 'import functools, sys
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
LocalElasticAgent.__init__ = functools.partialmethod(LocalElasticAgent.__init__, exit_barrier_timeout=20)
try:
    main()
except ChildFailedError as error:
    print(error, file=sys.stderr)
    sys.exit(2 if error.get_first_failure()[1].exitcode == 2 else 1)
' --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$GPUS_PER_NODE" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --rdzv-conf="timeout=$PREFLIGHT_TIMEOUT" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU "$@"
