"""Which setting learns best? Trains each at several learning rates and seeds, to equal tokens, FLOPs or time.

    python bench/learning.py --data stdlib --settings hrm,gpt2 --lr 6e-3,1.2e-2,2.4e-2 --seeds 7
    python bench/learning.py --data stdlib --settings hrm=6e-3,plain=6e-3,gpt2=1.2e-2 --seeds 1,2,3
    python bench/learning.py --data task:addition --settings puzzle,puzzle-plain --lr 1e-2 --steps 600

Each run is a run directory under --out, so the same command resumes, and `tensorboard --logdir DIR` compares
the runs. The table has the mean over the seeds for each rate, and marks a setting's best rate: the one with
the lowest validation loss, on a task that of the easier half of the levels. --flags are added to all runs.
With --equal flops, all train for as many FLOPs as the first setting does in --steps; with --equal time, for
as many CPU seconds, measured in runs of --steps (evaluations included). Choose rates on one seed and one
--val-split, and report others.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ddp_utils  # noqa: E402
from cli.errors import UserError  # noqa: E402
from cli.files import cpu_count  # noqa: E402
from cli.flags import flags_of_model  # noqa: E402
from cli.parser import ArgumentParser, expanded, local_path  # noqa: E402
from startup import dry_run  # noqa: E402
from startup.run import resolve_flags  # noqa: E402

SETTINGS = {
    "hrm": "train_hrm.py",
    "published": "train_hrm.py --init published",
    "plain": "train_hrm.py --h-cycles 1 --l-cycles 1",  # the same parameters without recurrence
    "deep": "train_hrm.py --h-cycles 1 --l-cycles 1 --n-layer 6",  # about as many FLOPs as hrm
    "plain-muon": "train_hrm.py --h-cycles 1 --l-cycles 1 --optimizer muon",
    "hrm-muon": "train_hrm.py --optimizer muon",
    "gpt2": "train_gpt2.py --modern --optimizer muon",
    # for tasks, with one block a stack
    "puzzle": "train_hrm.py --size puzzle",
    "puzzle-published":
        "train_hrm.py --size puzzle --h-cycles 2 --l-cycles 3 --bp-steps 2:5 --no-inject-input",
    "puzzle-calls": "train_hrm.py --size puzzle --h-cycles 1:4 --l-cycles 3 --bp-steps 2:5",  # H first
    "puzzle-plain": "train_hrm.py --size puzzle --h-cycles 1 --no-inject-input",
    "puzzle-deep": "train_hrm.py --size puzzle --h-cycles 1 --no-inject-input --n-layer 3",
    "puzzle-gpt2": "train_gpt2.py --modern --optimizer muon --n-layer 7 --n-head 4",  # FLOPs of puzzle
}


def parameters_and_flops(setting: str, args: argparse.Namespace) -> tuple[int, float]:
    """Of a model: its parameters, and the FLOPs of a token in training, after the ramp of bp_steps."""
    import torch

    import train_gpt2
    import train_hrm
    from loggers.mfu import flops_per_token
    from model import GPT2, HRM, num_params, pad_vocab
    script, *flags = shlex.split(SETTINGS[setting])
    known = {"train_hrm.py": (train_hrm, HRM), "train_gpt2.py": (train_gpt2, GPT2)}
    if script not in known:
        raise UserError(f"FLOPs are known of {' and '.join(known)}, not of {script}: train it "
                        "in a loop of commands, with an --out for each.")
    trainer, kind = known[script]
    parsed = resolve_flags(trainer.parse_args([*flags, *args.flags, "--data", args.data]))
    ids = dry_run.expected_ids(parsed.data, parsed.tokenizer)
    with torch.device("meta"):
        model = kind(kind.Config(vocab_size=ids, padded_vocab=pad_vocab(ids),
                                 **flags_of_model(kind.Config, parsed)))
    c = model.config
    if kind is GPT2:
        return num_params(model), flops_per_token(GPT2, c)
    bp_steps = trainer.truncation(parsed)[1]
    drawn = range(c.least_cycles or c.cycles, c.cycles + 1)
    return num_params(model), statistics.fmean(
        flops_per_token(HRM, c, bp_steps=bp_steps, cycles=cycles) for cycles in drawn)


def halves(record: dict, metric: str = "val_exact") -> tuple[float, float] | None:
    """A metric's means over the easier and over the harder half of the levels of a task; None without levels.
    """
    levels = [record[key] for key in sorted(record) if key.startswith(f"{metric}/")]
    half = len(levels) // 2
    return (statistics.mean(levels[:half]), statistics.mean(levels[half:])) if half else None


def chosen_loss(record: dict) -> float:
    """The loss by which the best rate is chosen."""
    both = halves(record, "val_loss")
    return both[0] if both else record["val_loss"]


def draw(curves: dict[str, list[list[dict]]], path: Path) -> None:
    """Exact matches in the harder half of the levels, or without levels the validation loss, over the steps:
    of each setting the mean of its seeds, and thin lines for each seed.
    """
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for i, (name, seeds) in enumerate(curves.items()):
        levels = halves(seeds[0][-1])
        points = [[r for r in records if r.get("val_loss") is not None] for records in seeds]
        lines = [[halves(r)[1] if levels else r["val_loss"] for r in records] for records in points]
        steps = [0, *(r["step"] for r in points[0])] if levels else [r["step"] for r in points[0]]
        lines = [[0.0] * (levels is not None) + line for line in lines]  # before the first step none is right
        for line in lines:
            axes.plot(steps, line, color=f"C{i}", linewidth=0.6)
        axes.plot(steps, [statistics.mean(at) for at in zip(*lines)], color=f"C{i}", marker="os^Dv"[i % 5],
                  label=name)
        axes.set(xlabel="steps", ylabel="exact matches, harder half" if levels else "validation loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def train(setting: str, lr: str, seed: str, steps: int, args: argparse.Namespace) -> list[dict] | None:
    """The records of a run, which is made, or finished, if necessary; None if it failed. The last record gets
    the CPU seconds of the process, `cpu`, NaN if it took more than one.
    """
    script, *flags = shlex.split(SETTINGS[setting])
    source = Path(args.data.replace(":", "-")).name
    name = "-".join([source, setting, f"lr{lr}-seed{seed}-{steps}", *args.flags])
    out = args.out / name.replace("/", "-")
    command = [sys.executable, ROOT / script, "--data", args.data, "--out", out, "--seed", seed, "--lr", lr,
               "--steps", steps, "--eval-every", max(steps // 4, 1), "--save-every", max(steps // 4, 1),
               "--eval-batches", 0, "--max-new-tokens", 1, "--device", args.device, *flags, *args.flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(cpu_count() // args.jobs, 1))}
    measured = out / "cpu_seconds.txt"
    begun = (out / "metrics.jsonl").exists()  # then this process is not all of the run
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(list(map(str, command)), stdout=said, stderr=said, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            print(f"{out.name} failed: {said.read().strip().splitlines()[-1]}", file=sys.stderr)
            return None
    if not measured.exists():
        measured.write_text("nan" if begun else f"{usage.ru_utime + usage.ru_stime:.0f}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    records[-1]["cpu"] = float(measured.read_text())
    print(f"{out.name}: validation loss {records[-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    return records


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=expanded, default="stdlib", help="as for the trainers")
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"some of {', '.join(SETTINGS)}")
    parser.add_argument("--lr", default="3e-3", help="learning rates of settings without =RATE")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--equal", choices=("tokens", "flops", "time"), default="tokens")
    parser.add_argument("--flags", type=shlex.split, default=[], help="such as --flags '--ema 0.99'")
    parser.add_argument("--jobs", type=int, default=cpu_count(), help="runs at the same time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=local_path, default=Path("runs/learning"))
    parser.add_argument("--picture", type=local_path, help="a PNG of the curves at the best rates")
    args = parser.parse_args()
    seeds = args.seeds.split(",")
    rates = {name: [rate] if rate else args.lr.split(",") for name, _, rate in (
        part.partition("=") for part in args.settings.split(","))}
    settings = [*rates]
    if unknown := set(settings) - SETTINGS.keys():
        raise SystemExit(f"error: unknown setting {min(unknown)}: choose from {', '.join(SETTINGS)}.")
    sizes = {setting: parameters_and_flops(setting, args) for setting in settings}
    cost = {setting: sizes[setting][1] if args.equal == "flops" else 1.0 for setting in settings}  # of a step
    runs = [(setting, lr, seed) for seed in seeds for setting in settings for lr in rates[setting]]
    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in range(1 + (args.equal == "time")):
            steps = {setting: round(args.steps * cost[settings[0]] / cost[setting]) for setting in settings}
            each = (steps[setting] for setting, _, _ in runs)
            logs = dict(zip(runs, pool.map(train, *zip(*runs), each, itertools.repeat(args))))
            for setting in settings if args.equal == "time" else ():
                cpu = [log[-1]["cpu"] for run, log in logs.items() if log and run[0] == setting]
                cost[setting] = statistics.fmean(cpu) if cpu else cost[setting]
    print(f"{args.data}, equal {args.equal}, seeds {args.seeds} {' '.join(args.flags)}\n")
    print("| setting | parameters | MFLOP a token | steps | lr | CPU s | loss | "
          "easier half, by seed | harder half |")
    print("|---|---|---|---|---|---|---|---|---|")
    curves = {}
    for setting in settings:
        of_rate = {lr: [log for seed in seeds if (log := logs[setting, lr, seed])] for lr in rates[setting]}
        of_rate = {lr: found for lr, found in of_rate.items() if found}
        means = {lr: statistics.mean(chosen_loss(log[-1]) for log in found) for lr, found in of_rate.items()}
        best = min(means, key=means.get, default=None)
        curves |= {setting: of_rate[best]} if best else {}
        for lr, found in of_rate.items():
            last = [log[-1] for log in found]
            exact = [halves(record) or (record.get("val_exact", math.nan),) * 2 for record in last]
            easy, hard = (", ".join(f"{100 * x:.1f}" for x in half) for half in zip(*exact))
            print(f"| {setting} | {sizes[setting][0]:,} | {sizes[setting][1] / 1e6:.1f} | {steps[setting]} | "
                  f"{lr}{' (best)' * (lr == best and len(of_rate) > 1)} | "
                  f"{statistics.mean(record['cpu'] for record in last):.0f} | "
                  f"{statistics.mean(record['val_loss'] for record in last):.4f} | {easy} | {hard} |")
    if args.picture:
        draw(curves, args.picture)


if __name__ == "__main__":
    ddp_utils.launch(main)
