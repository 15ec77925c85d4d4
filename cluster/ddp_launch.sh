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
# back, as in trainer@.service. NNODES=1 needs only GPUS_PER_NODE.
#
# With NNODES=2:5 the other nodes may leave and come back, see docs/clusters.md. Node 0 starts with those that are
# here, once none has come for MEET_SECONDS (30), and takes in those that come later after ADMIT_SECONDS (600). The
# launchers meet at MASTER_PORT, and torchrun uses the port beside it. Exit code 1 also if this node was stopped.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started with sh
set -euo pipefail

fail() {
    echo "ddp_launch.sh: $1" >&2
    exit 2
}

number() { # NAME LOW HIGH, and the variable that the user has set, if it's another one
    local value=${!1} set=${4:-$1}
    if ! [[ $value =~ ^[0-9]{1,6}$ ]] || ((10#$value < $2 || 10#$value > $3)); then
        fail "$set=${!set} is not a whole number from $2 to $3${4:+, or a range of two such numbers like 2:5}."
    fi
}

if [[ ${NNODES:-} == 1 ]]; then
    MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500} NODE_RANK=${NODE_RANK:-0}
fi
for name in MASTER_ADDR MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE; do
    [[ -n ${!name:-} ]] || fail "$name is not set: set MASTER_ADDR (IPv4 address of node 0), MASTER_PORT \
(29500), NNODES (how many machines, or 2:5 for two to five), NODE_RANK (0 to NNODES - 1) and GPUS_PER_NODE (processes on this one)."
done
PREFLIGHT_TIMEOUT=${PREFLIGHT_TIMEOUT:-120}
number MASTER_PORT 1 65535
export MEET_SECONDS=${MEET_SECONDS:-30} ADMIT_SECONDS=${ADMIT_SECONDS:-600} LAUNCHER_DIR=''
number MEET_SECONDS 0 86400
number ADMIT_SECONDS 0 999999
fewest=${NNODES%%:*} most=${NNODES#*:} # the same for a number
number most 1 4096 NNODES
number fewest 1 "$((10#$most))" NNODES
number NODE_RANK 0 $((10#$most - 1))
number GPUS_PER_NODE 1 64
number PREFLIGHT_TIMEOUT 1 86400
(($# > 0)) || fail "no script is named: ddp_launch.sh train_gpt2.py --size gpt2"
if [[ ! -f $1 ]] && command -v -- "$1" >/dev/null; then
    words=("${@:2}")
    fail "$1 is a program, not a trainer: start it alone, in Docker with \
docker compose run --rm --entrypoint $1 trainer ${words[*]@Q}"
fi
[[ $1 != -* ]] || fail "$1 stands where a trainer belongs: name that first, as in ddp_launch.sh train_gpt2.py --size gpt2"
if [[ ! -f $1 && $1 != *.py && ! -f $1.py ]]; then
    fail "$1 is no program on this machine or in this container, and no trainer in $PWD: install it, or start it \
where it is installed."
fi
[[ -f $1 ]] || fail "$1 does not exist in $PWD: go to the directory of the trainers first, and name a file, \
such as train_gpt2.py."
command -v torchrun >/dev/null || fail "torchrun is not on the PATH: activate the virtual environment."

dies_with_this=(env) # else torchrun would train on alone
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")") # also if this is a symbolic link
port=$((10#$MASTER_PORT)) nodes=$((10#$fewest)) patience=$((10#$PREFLIGHT_TIMEOUT)) trained=no barrier=20
if [[ $fewest != "$most" ]]; then
    nodes+=:$((10#$most)) patience=inf barrier=1
    command -v setpriv >/dev/null && dies_with_this=(setpriv --pdeathsig TERM env --default-signal=INT)
fi

meet() {
    exec "${dies_with_this[@]}" python3 "$here/roll_call.py" "$MASTER_ADDR" "$port" "$nodes" \
        "$((10#$NODE_RANK))" "$((10#$GPUS_PER_NODE))" "$patience" "$trained" "$LAUNCHER_DIR"
}

# With gloo, torchrun's own restarts (PET_MAX_RESTARTS) work only if each has its own store
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# After SIGTERM, torchrun gives its processes so many seconds to write a checkpoint
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-50}
launch() { # RANK NODES INTERFACE PORT SCRIPT...
    if ((10#$most > 1)) && [[ -n $3 ]]; then
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$3}
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$3}
    fi
    # Static rendezvous: rank 0 is always on node 0. Without --signals-to-handle, SIGUSR1, SIGUSR2 and SIGXCPU
    # would end only torchrun.
    # torchrun always exits with 1. The first failed process tells a mistake (2) from what may work at the next
    # try. If a signal ends a torchrun, the others wait for it at a barrier: for seconds instead of five minutes.
    exec "${dies_with_this[@]}" python3 -P -c 'import functools, sys
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
LocalElasticAgent.__init__ = functools.partialmethod(LocalElasticAgent.__init__, exit_barrier_timeout='$barrier')
try:
    main()
except ChildFailedError as error:
    print(error, file=sys.stderr)
    sys.exit(2 if error.get_first_failure()[1].exitcode == 2 else 1)
' --nnodes="$2" --node-rank="$1" --nproc-per-node="$GPUS_PER_NODE" \
        --master-addr="$MASTER_ADDR" --master-port="$4" --rdzv-conf="timeout=$PREFLIGHT_TIMEOUT" \
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU "${@:5}"
}

if [[ $fewest == "$most" ]]; then
    place=$(meet)
    read -r rank count _ interface <<<"$place"
    launch "$rank" "$count" "$interface" "$port" "$@"
fi

# A range of nodes: meet, train and meet again, until the run is complete or this node is stopped. The trainer
# writes into LAUNCHER_DIR how far it came, see StopVote in ddp_utils.py.
base=$(mktemp -d) torchrun='' meeting='' stopped=''
trap 'kill -s INT $meeting 2>/dev/null && wait "$meeting" || true; rm -rf "$base"' EXIT # it tells the nodes that wait
for name in TERM INT HUP QUIT USR1 USR2 XCPU; do
    # shellcheck disable=SC2064  # the name of now
    trap "stopped=yes; [[ -n \$torchrun ]] || exit 130; kill -s $name \$torchrun || true" "$name"
done
set -m # each child has its own process group, so Ctrl-C reaches it only once, through this script

while :; do
    if [[ -z $meeting ]]; then
        meet >"$base/place" &
        meeting=$!
    fi
    wait "$meeting" || exit "$?"
    meeting=''
    read -r rank count newcomer interface <"$base/place"
    LAUNCHER_DIR=$(mktemp -d "$base/XXXXXX")
    if ((10#$NODE_RANK == 0)); then # the next meeting begins now, so that newcomers hear when it will be
        meet >"$base/place" &
        meeting=$!
    fi
    launch "$rank" "$count" "$interface" $((port ^ 1)) "$@" &
    torchrun=$! code=1
    while kill -s 0 "$torchrun" 2>/dev/null; do # a signal interrupts `wait`
        code=0
        wait "$torchrun" || code=$?
    done
    torchrun=''
    [[ $code != 0 || -n $stopped || -e $LAUNCHER_DIR/stopped ]] || exit 0 # the run is complete
    if [[ -e $LAUNCHER_DIR/trained ]]; then
        trained=yes
    elif [[ $newcomer == self ]]; then
        exit "$code" # the others train without this node
    fi
    if [[ -n $stopped || ($code == 2 && $newcomer == nobody) ]]; then
        [[ -z $meeting ]] || sleep 10 # the others come and hear that node 0 has ended
        exit "$code"
    fi
    touch "$LAUNCHER_DIR/ended"
done
