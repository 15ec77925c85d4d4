"""Times a training step on PCs with a gigabit switch, for each --comm: what do slow links cost?

Needs root and iproute2.

    python bench/lab.py --parameters 12.4M --compute 0.233,0.095 --rate 1gbit

Five processes share the few cores of this machine, so their computing time says nothing about five PCs.
Instead, each step pauses for as long as a PC's card would compute. Then the trainers' own code (DDP and its
hook, or `Late`) sends over the links of the lab (tests/helpers/lab.py). `Late` sends numbers packed
beforehand, because quantizing for five processes on these cores would hide all else. The table has, for
each pause:

    free      a step over links without a limit, in ms
    limited   a step over links of --rate
    kept      free / limited: the share of their speed that the PCs keep on this network
    linear    pause / limited: less, because here five processes also share the cores to send

A model with a tenth of the parameters on a card ten times as fast has the same ratios.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
# this directory has a lab.py too
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from lab import Lab, Unavailable  # noqa: E402

from cli.parser import ArgumentParser, parse_count  # noqa: E402
from training.strategies import wrap  # noqa: E402

WAYS = ("fp32", "bf16", "late")
BLOCKS = 12  # tensors of the model; DDP puts them into buckets


def communicate() -> None:
    """On a node: pauses and sends what the trainer would send. Rank 0 prints the time of each step."""
    import torch

    import ddp_utils
    from cluster.late import BLOCK, Late
    comm, compute, steps = json.loads(os.environ["WORK"])
    world = ddp_utils.init("gloo", "cpu", 300)
    n = int(os.environ["PARAMETERS"]) // BLOCKS

    class Sum(torch.nn.Module):  # has gradients, but no computation
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(n) for _ in range(BLOCKS))

        def forward(self):
            return sum(p.sum() for p in self.weights)

    class Packed(Late):
        def pack(self, gradients):
            blocks = -(-len(self.moved) // (BLOCK * self.size))
            return torch.zeros(self.size, blocks, BLOCK + 2, dtype=torch.int8)

        def add_up(self, received):
            return received[0]

        def _wait(self):
            if self._under_way:
                self._under_way.result()
                self._under_way = None

    model = Sum()
    wrapped = wrap(model, world, comm)
    run = SimpleNamespace(world=world, steps=0, saved=None, args=SimpleNamespace(timeout=300))
    late = Packed(model, [torch.optim.SGD(model.parameters())], run) if comm == "late" else None
    times = []
    for _ in range(3 + steps):
        begun = time.perf_counter()
        time.sleep(compute)
        if late:
            late.exchange()
        else:
            wrapped().backward()
        wrapped.zero_grad(set_to_none=True)
        ddp_utils.reduce_sum([0.0], world)  # the vote and the number of labels
        times.append(time.perf_counter() - begun)
    if late:
        late.state_dict()
    if world.is_rank0:
        print(json.dumps(times[3:]), flush=True)


def step_seconds(args, comm: str, compute: float, rate: str | None) -> float:
    """Median seconds of a step in a lab."""
    try:
        with Lab(args.nodes, rate) as lab:
            work = json.dumps([comm, compute, args.steps])
            done = [lab.wait(process, 600) for process in lab.by_hand(
                args.nodes, "bench/lab.py", WORK=work, PARAMETERS=args.parameters)]
    except Unavailable as reason:
        raise SystemExit(f"error: no lab here: {reason}")
    for code, text in done:
        if code:
            raise SystemExit(text)
    return statistics.median(json.loads(done[0][1].splitlines()[-1]))


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=parse_count, default=12_400_000)
    parser.add_argument("--compute", default="0.233,0.095", help="seconds of computing in a step of a node")
    parser.add_argument("--comm", default=",".join(WAYS))
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rate", default="1gbit", help="speed of each link")
    parser.add_argument("--steps", type=int, default=15, help="steps to time, after three that warm up")
    args = parser.parse_args()
    print(f"{args.nodes} nodes at {args.rate}, {args.parameters:,} parameters\n")
    print("| pause ms | --comm | free ms | limited ms | kept | linear |")
    print("|---|---|---|---|---|---|", flush=True)
    for compute in map(float, args.compute.split(",")):
        for comm in args.comm.split(","):
            free, limited = (step_seconds(args, comm, compute, rate) for rate in (None, args.rate))
            print(f"| {1e3 * compute:.0f} | {comm} | {1e3 * free:.0f} | {1e3 * limited:.0f} | "
                  f"{free / limited:.1%} | {compute / limited:.1%} |", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        import ddp_utils
        ddp_utils.launch(communicate)
    else:
        main()
