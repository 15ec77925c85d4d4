"""What slow links cost: speed and loss of each way to talk less, on PCs with a gigabit switch.

Needs root and iproute2.

    python bench/lab.py                       # about 3 minutes for each setting on two idle cores
    python bench/lab.py --quick               # everything once, briefly: the numbers mean nothing
    python bench/lab.py --setting '--comm bf16' --setting '--outer-every 20 --outer-start 60' \\
        --seeds 3 --flags '--modern --optimizer muon --steps 600'

Five processes share the few cores of this machine, so the time of their steps says nothing about five PCs.
Computing and communicating are therefore measured apart, each alone on the machine:

    t1        one process with one thread makes the step of one node: its share of the global batch
    comm      what the nodes send in a step, as the trainer sends it (DDP and its hook, Outer.meet, vote),
              over links of 1 Gbit/s in the lab (tests/lab.py), while nobody computes. The mean over the run:
              the steps before DiLoCo begins count, and so does every meeting
    tokens/s  of all nodes: tokens of a global batch / (t1 + comm). One node has its share of them in t1
    eff.      t1 / (t1 + comm), which is tokens/s over nodes x tokens/s of one. Nothing is taken to overlap,
              though DDP sends while the backward pass computes: so this is a lower bound
    steady    the same without the steps before DiLoCo begins, which a longer run hardly has

comm includes what the processors do for it (sums and casts), on cores that five processes
share: `idle net` is comm over links without a limit, of which real PCs see a smaller part.

The validation loss is that of the last step of a training run on all nodes, at equal tokens; means over
--seeds. `t lab` and `t free` are the steps of that run over limited and unlimited links, for comparison.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this directory has a lab.py too

from lab import Lab, Unavailable  # noqa: E402

SETTINGS = ["--comm fp32", "--comm bf16"] + [
    f"--outer-every {every} --outer-start {start}"
    for every, start in ((5, 60), (10, 60), (20, 60), (20, 0), (50, 60))]


def parse(flags: list[str]) -> argparse.Namespace:
    """The trainer's arguments with all defaults, `--batch` as in data.plan_batch."""
    import train_gpt2
    return train_gpt2.parse_args(list(map(str, flags)))


# -----------------------------------------------------------------------------------------------------------
# Communication alone


def communicate() -> None:
    """One node: sends what the trainer would. Rank 0 prints {what: [seconds, bytes it has sent]}."""
    import torch
    import torch.distributed as dist

    import data
    import ddp_utils
    import train_gpt2
    from model import GPT2, GPT2Config, pad_vocab

    repeats = int(os.environ["REPEATS"])
    args = train_gpt2.parse_args()
    world = ddp_utils.init("gloo", "cpu", 300)
    directory = data.directory_of(args.data, args.tokenizer)
    tokenizer = data.Dataset(directory, args.seq_len, args.tokenizer).tokenizer
    model = GPT2(GPT2Config(vocab_size=tokenizer.vocab_size,
                            padded_vocab=args.vocab_size or pad_vocab(tokenizer.vocab_size),
                            **ddp_utils.flags_of_model(GPT2Config, args)))

    class Sum(torch.nn.Module):  # has the gradients of the model without its computation
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return sum(p.sum() for p in self.model.parameters())

    def timed(function, times: int) -> list[tuple[float, int]]:
        found = []
        for _ in range(times):
            dist.barrier()
            sent = Path("/sys/class/net/eth0/statistics/tx_bytes")
            begun, before = time.perf_counter(), int(sent.read_text())
            function()
            found.append((time.perf_counter() - begun, int(sent.read_text()) - before))
        return found

    def median(found) -> list[float]:
        return [statistics.median(column) for column in zip(*found)]

    wrapped = ddp_utils.wrap(Sum(), world, args.comm)

    def step():
        wrapped().backward()
        wrapped.zero_grad(set_to_none=True)

    steps = timed(step, 2 + repeats)
    found = {"synced": median(steps[2:]),  # two steps settle DDP's buckets
             "vote": median(timed(lambda: ddp_utils.reduce_sum([0.0], world), 5 * repeats))}
    if args.outer_every:
        outer = ddp_utils.Outer(model, args.outer_every, 0, args.outer_lr, args.outer_momentum)
        outer.apart(0)
        found["meeting"] = median(timed(outer.meet, repeats))
    if world.is_rank0:
        print(json.dumps(found), flush=True)


def per_step(found: dict, args) -> dict[str, list[float]]:
    """[seconds, bytes] in a step: the mean over the run, and in the `steady` state once DiLoCo has begun."""
    apart_from = args.outer_start if args.outer_every else args.steps
    later = range(apart_from + 1, args.steps + 1)
    meetings = sum((step - apart_from) % args.outer_every == 0 or step % args.eval_every == 0
                   or step % args.save_every == 0 or step == args.steps for step in later)
    run, steady = [], []
    for i in range(2):
        synced = min(apart_from, args.steps) * found["synced"][i]
        meeting = found.get("meeting", [0, 0])[i]
        run.append((synced + meetings * meeting) / args.steps + found["vote"][i])
        steady.append((meeting / args.outer_every if args.outer_every else found["synced"][i])
                      + found["vote"][i])
    return {"run": run, "steady": steady}


# -----------------------------------------------------------------------------------------------------------
# Runs


def step_time(out: Path, after: int) -> float:
    """Seconds of a step in a run directory: the mean over the log lines behind step `after`."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tokens = records[0]["tokens"] / records[0]["step"]
    return statistics.mean(tokens / r["tokens_per_sec"] for r in records if r["step"] > after)


def finish(lab: Lab, processes) -> list[str]:
    """What the processes have printed. Exits with that if one fails."""
    done = [lab.wait(process, 3600) for process in processes]
    for code, text in done:
        if code:
            raise SystemExit(text)
    return [text for _, text in done]


def train(lab: Lab, *flags) -> Path:
    """A training run on all nodes; returns its directory."""
    finish(lab, lab.torchrun([1] * lab.count, "train_gpt2.py", *flags, "--out", "run"))
    return lab.home(0) / "run"


@contextmanager
def lab_or_exit(count: int, rate: str | None):
    try:
        with Lab(count, rate) as lab:
            yield lab
    except Unavailable as reason:
        raise SystemExit(f"error: no lab here: {reason}")


def measure(args, setting: list[str]) -> dict:
    """One row of the table."""
    flags = [*args.base, *setting]
    parsed = parse(flags)
    row = {"setting": " ".join(setting)}
    for name, rate in (("comm", args.rate), ("free", None)):
        with lab_or_exit(args.nodes, rate) as lab:
            processes = lab.by_hand(args.nodes, "bench/lab.py", *flags, REPEATS=args.repeats)
            row[name] = per_step(json.loads(finish(lab, processes)[0].splitlines()[-1]), parsed)
    losses = []
    for seed in range(args.seeds):
        with lab_or_exit(args.nodes, args.rate) as lab:
            out = train(lab, *flags, "--seed", seed)
            losses.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"])
            row["lab"] = step_time(out, max(10, parsed.outer_start if parsed.outer_every else 0))
    row["val_loss"], row["losses"] = statistics.mean(losses), losses
    short = ["--steps", str(min(parsed.steps, 40)), "--outer-start", "0"]
    with lab_or_exit(args.nodes, None) as lab:
        row["lab free"] = step_time(train(lab, *flags, *short), 10)
    return row


def measure_one(args, directory: Path) -> float:
    """t1: one process with one thread makes the step of one node."""
    share = parse(args.base).global_batch // args.nodes
    flags = [*args.base, "--steps", "40", "--global-batch", share, "--out", directory / "one"]
    subprocess.run([sys.executable, ROOT / "train_gpt2.py", *map(str, flags)], check=True, timeout=3600,
                   stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return step_time(directory / "one", 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", help=f"trainer flags of a row (default: {SETTINGS})")
    parser.add_argument("--flags", default="", help="trainer flags of all rows, such as '--data DIR'")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rate", default="1gbit", help="of each link (1gbit)")
    parser.add_argument("--seeds", type=int, default=1, help="training runs of each setting (1)")
    parser.add_argument("--repeats", type=int, default=7, help="of each collective (7)")
    parser.add_argument("--t1", type=float, help="seconds, of other computers, instead of measuring")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny, 20 steps, two settings")
    args = parser.parse_args()

    defaults = "--size tiny --global-batch 20 --batch 4 --precision fp32 --log-every 10 --max-new-tokens 1"
    args.base = shlex.split(f"{defaults} {args.flags}")
    settings = args.setting or SETTINGS
    if args.quick:
        args.repeats, settings = 2, args.setting or [SETTINGS[0], "--outer-every 5 --outer-start 10"]
        args.base += ["--steps", "20"]
    with tempfile.TemporaryDirectory() as directory:
        if "--data" not in args.base:
            shards = Path(directory, "shards")
            subprocess.run([sys.executable, ROOT / "data.py", "prepare", "--dataset", "stdlib", "--tokenizer",
                            "bpe:4096", "--out", shards], check=True, stdout=subprocess.DEVNULL)
            args.base += ["--data", str(shards)]
        parsed = parse(args.base)
        t1 = args.t1 or measure_one(args, Path(directory))
        tokens = parsed.global_batch * parsed.seq_len
        print(f"{args.nodes} nodes at {args.rate}, {' '.join(args.base)}: {tokens:,} tokens a step; t1 "
              f"{1e3 * t1:.0f} ms, one node {tokens / args.nodes / t1:,.0f} tokens/s; times in ms\n")
        columns = ("setting", "val loss", "+ nats", "MB sent", "comm", "idle net", "t lab", "t free", "eff.",
                   "steady", "tokens/s")
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
        first = None
        for setting in settings:
            row = measure(args, shlex.split(setting)) | {"t1": t1, "nodes": args.nodes}
            first = first or row
            (comm, sent), (steady, _) = row["comm"]["run"], row["comm"]["steady"]
            cells = (row["setting"], f"{row['val_loss']:.4f}", f"{row['val_loss'] - first['val_loss']:+.4f}",
                     f"{sent / 1e6:.2f}", f"{1e3 * comm:.1f}", f"{1e3 * row['free']['run'][0]:.1f}",
                     f"{1e3 * row['lab']:.0f}", f"{1e3 * row['lab free']:.0f}", f"{t1 / (t1 + comm):.1%}",
                     f"{t1 / (t1 + steady):.1%}", f"{tokens / (t1 + comm):,.0f}")
            print("| " + " | ".join(cells) + " |", flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        import ddp_utils
        ddp_utils.launch(communicate)
    else:
        main()
