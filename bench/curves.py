"""Trains GPT-2 by our recipe and by nanoGPT's, on the same text for the same time: validation loss over time.

    python bench/curves.py DATA --nanogpt DIR --json FILE     # ten minutes; DATA: a prepared directory

Ours is `train_gpt2.py --modern --optimizer muon`. The other is nanoGPT's model (DIR has its model.py), its
AdamW (betas 0.9 and 0.95, decay 0.1) and its clipping at 1, with our loader and validation set. Both take 64
x 1024 tokens a step, warm up for a tenth of the steps, then fall as a cosine to a tenth of the rate. Each
gets the best of the same three rates for a model of 6 blocks of 384 channels and 256 tokens. A short run then
measures its step, which gives the number of steps for --seconds. Only training steps count, not start and
evaluations.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
from cli.errors import RunError, UserError, run_command  # noqa: E402
from cli.parser import ArgumentParser, local_path  # noqa: E402

RATES = 6e-4, 2e-3, 6e-3
WARMUP, LOWEST = 0.1, 0.1  # of the steps, and of the rate
POINTS = 10  # evaluations of a run
LARGE = {"n_layer": 12, "n_head": 12, "d_model": 768, "seq_len": 1024, "batch": 64}
SMALL = {"n_layer": 6, "n_head": 6, "d_model": 384, "seq_len": 256, "batch": 64}
TINY = {"n_layer": 1, "n_head": 2, "d_model": 32, "seq_len": 64, "batch": 32}  # to try this out on a CPU


def nanogpt(args: argparse.Namespace) -> None:
    """Trains by nanoGPT's recipe, and writes lines of metrics.jsonl as ours does."""
    import torch

    from model import learning_rate, pad_vocab
    from ops.device import compute_dtype
    spec = importlib.util.spec_from_file_location("nanogpt", args.nanogpt / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = module
    spec.loader.exec_module(module)
    device = torch.device(args.device)
    shape = json.loads(args.shape)
    seq_len, batch = shape["seq_len"], shape["batch"]
    dataset = data.Dataset([args.data], seq_len)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = module.GPT(module.GPTConfig(
        block_size=seq_len, vocab_size=pad_vocab(dataset.tokenizer.vocab_size), n_layer=shape["n_layer"],
        n_head=shape["n_head"], n_embd=shape["d_model"], dropout=0.0, bias=False)).to(device)
    optimizer = model.configure_optimizers(0.1, args.lr, (0.9, 0.95), device.type)
    run = torch.compile(model) if device.type == "cuda" else model
    world = SimpleNamespace(rank=0, world_size=1, device=device)
    loader = data.Loader(dataset.train, batch, world, seed=0)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16,
                              enabled=compute_dtype("auto", device) == torch.bfloat16)

    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        total = count = 0
        for shards in dataset.val.values():
            for x, y in data.validation_batches(shards, batch, world):
                with autocast:
                    _, loss = run(x, y)
                labels = (y >= 0).sum().item()
                total, count = total + loss.item() * labels, count + labels
        model.train()
        return total / count

    args.out.mkdir(parents=True)
    with open(args.out / "metrics.jsonl", "w", buffering=1) as log:
        synchronize()
        begun, since = time.perf_counter(), 0
        for step in range(1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, args.steps, args.lr, WARMUP, "cosine", LOWEST)
            _, [(x, y)] = loader.step(1)
            with autocast:
                _, loss = run(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            evaluating = step % args.eval_every == 0
            if evaluating or step % 10 == 0 or step in (1, args.steps):
                loss = loss.item()  # waits for the device
                speed = (step - since) * batch * seq_len / (time.perf_counter() - begun)
                log.write(json.dumps({"step": step, "loss": loss, "tokens_per_sec": speed}) + "\n")
                if evaluating:
                    log.write(json.dumps({"step": step, "val_loss": evaluate()}) + "\n")
                begun, since = time.perf_counter(), step
    loader.close()


def start(who: str, args: argparse.Namespace, shape: dict, lr: float, steps: int, out: Path):
    """Starts a run of a recipe in a process of its own, which evaluates at POINTS steps."""
    every = max(steps // POINTS, 1)
    flags = {"data": args.data, "out": out, "lr": lr, "steps": steps, "eval_every": every,
             "device": args.device}
    if who == "nanogpt":
        command = [__file__, flags.pop("data")]
        flags |= {"nanogpt": args.nanogpt, "shape": json.dumps(shape)}
    else:
        command = [ROOT / "train_gpt2.py", "--size", "gpt2", "--modern", "--optimizer", "muon"]
        flags |= shape | {"global_batch": shape["batch"], "schedule": "cosine", "warmup": WARMUP,
                          "min_lr": LOWEST, "save_every": steps, "eval_batches": 0, "max_new_tokens": 1}
    command += [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), value)]
    return subprocess.Popen([sys.executable, *map(str, command)], stdout=sys.stderr)


def records_of(process, out: Path) -> tuple[list[dict], list[dict]]:
    """The evaluations and the logged steps of a run, once it has ended. Raises RunError if it failed."""
    if process.wait():
        raise RunError(f"the run {out.name} has failed with exit code {process.returncode}; "
                            "what it said is above.")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "val_loss" in r], [r for r in records if "tokens_per_sec" in r]


def best_rates(recipes: list[str], args: argparse.Namespace, folder: Path) -> dict[str, dict[float, float]]:
    """For each recipe the rates with the validation losses of the small model; all train at the same time."""
    runs = {(who, lr): folder / f"{who}-small-{lr}" for who in recipes for lr in RATES}
    steps = POINTS if args.tiny else 300
    processes = {run: start(run[0], args, TINY if args.tiny else SMALL, run[1], steps, out)
                 for run, out in runs.items()}
    for process in processes.values():  # if one has failed, none goes on alone
        process.wait()
    losses = {run: records_of(processes[run], out)[0][-1]["val_loss"] for run, out in runs.items()}
    return {who: {lr: losses[who, lr] for lr in RATES} for who in recipes}


def curve(who: str, lr: float, args: argparse.Namespace, folder: Path) -> dict:
    """Trains for --seconds at this rate, and returns losses over time."""
    import numpy as np
    shape = TINY if args.tiny else LARGE
    tokens = shape["batch"] * shape["seq_len"]
    out = folder / f"{who}-short"
    _, steps = records_of(start(who, args, shape, lr, 40, out), out)
    step_seconds = tokens / float(np.median([r["tokens_per_sec"] for r in steps[1:]]))
    count = POINTS * max(round(args.seconds / step_seconds / POINTS), 1)
    out = folder / who
    begun = time.perf_counter()
    evaluations, steps = records_of(start(who, args, shape, lr, count, out), out)
    measured = [0, *(r["step"] for r in steps)]
    seconds = np.cumsum([(b - a) * tokens / r["tokens_per_sec"]
                         for a, b, r in zip(measured, measured[1:], steps)])
    seconds -= seconds[0] - step_seconds  # the first step compiles
    took = dict(zip(measured[1:], seconds.tolist()))
    rows = data.Dataset([args.data], shape["seq_len"]).train.rows
    return {"lr": lr, "steps": count, "step_ms": 1000 * seconds[-1] / count,
            "whole_s": time.perf_counter() - begun, "epochs": count * shape["batch"] / rows,
            "curve": [[took[r["step"]], r["step"], r["val_loss"]] for r in evaluations]}


def append(args: argparse.Namespace, line: dict) -> None:
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(line) + "\n")


def report(found: dict) -> None:
    for who, r in found.items():
        rates = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in r["rates"].items())
        print(f"{who}: rate {r['lr']:g} (of {rates}), {r['steps']} steps of {r['step_ms']:.1f} ms, the text "
              f"seen {r['epochs']:.2f} times")
    print("\n| who | seconds | step | validation loss |\n|---|---|---|---|")
    for who, r in found.items():
        for seconds, step, loss in r["curve"]:
            print(f"| {who} | {seconds:.1f} | {step} | {loss:.4f} |")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("data", type=local_path, help="a directory that `data.py prepare` made")
    parser.add_argument("--nanogpt", type=local_path, help="directory of nanoGPT's model.py (none)")
    parser.add_argument("--seconds", type=float, default=150, help="training time of each recipe (150)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try this out")
    parser.add_argument("--json", type=local_path, help="append the numbers to this file as a line")
    for name, kind in {"shape": str, "lr": float, "steps": int, "eval-every": int, "out": Path}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # of one run of nanoGPT's recipe
    args = parser.parse_args()
    if args.shape:
        return nanogpt(args)
    if not data.Dataset([args.data], (TINY if args.tiny else LARGE)["seq_len"]).val:
        raise UserError(f"{args.data} has no validation set: prepare it with --val-split hash:0.02.")
    recipes = ["ours"] + ["nanogpt"] * bool(args.nanogpt)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        rates = best_rates(recipes, args, Path(folder))
        for who in recipes:
            best = min(rates[who], key=rates[who].get)
            found[who] = {"rates": rates[who]} | curve(who, best, args, Path(folder))
            append(args, {"kind": "curve", "who": who} | found[who])  # so that it stays if the rest is cut
    append(args, {"kind": "curves", "found": found})
    report(found)


if __name__ == "__main__":
    run_command(main)
