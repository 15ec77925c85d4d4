"""Do two versions of the code compute the same? Trains small models with both and compares what they learn.

    git worktree add ../before b3718ba && python bench/same.py ../before . [WORD …]   # cases with the words
    python bench/same.py --control ../before .     # the new one learns labels of another row: all must fail
    python bench/same.py --equal ../before .       # all bit for bit, for code that should change no bit

The first version prepares the data. Each case says how close both have to be:

equal      losses and the tensors of the last checkpoint are the same bits
gradient   each tensor of the first step's gradient, to 1e-6 of its norm
loss       the mean over 20 steps, to 2e-3

The same version begins and continues a resumed run. An infinite run skips its third update.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SMALL = {"d_model": 32, "n_head": 2, "n_layer": 2, "global_batch": 8, "batch": 4, "steps": 20,
         "save_every": 20, "eval_every": 20, "log_every": 1, "lr": 1e-3, "warmup": 5, "eval_batches": 2,
         "precision": "fp32", "device": "cpu"}
OWN = {"gpt2": {"seq_len": 32, "max_new_tokens": 2}, "hrm": {"seq_len": 32, "ff": 64, "max_new_tokens": 2},
       "mlm": {"seq_len": 32, "ff": 48, "window": 16, "mask_rate": 0.25}}  # so that a power of two is masked
ONE_STEP = {"steps": 1, "grad_clip": 0}  # the first moment of AdamW is then a tenth of the gradient
PAIRS = {"data": "pairs", "seq_len": 128}
# Runs a trainer with an infinite gradient in its third step, or with the labels of another row
WRAPPER = """
import itertools, runpy, sys
sys.path.insert(0, ".")
import numpy as np
import data, ddp_utils
changes, *sys.argv = sys.argv[1:]
if "infinite" in changes:
    try:
        import training.step as owner
    except ImportError:
        owner = ddp_utils  # until 2026-11-28
    steps, clip = itertools.count(1), owner.clip_grad_norm
    def infinite(parameters, max_norm):
        parameters = list(parameters)
        if next(steps) == 3:
            parameters[-1].grad.fill_(float("inf"))
        return clip(parameters, max_norm)
    owner.clip_grad_norm = infinite
if "control" in changes:
    take, mask = data.Shards.take, data.Masker.__call__
    def shifted(self, rows, x, y):
        take(self, rows, x, y)
        y[:] = np.roll(y, 1, axis=0)
    def shifted_labels(*arguments):
        positions, labels = mask(*arguments)
        return positions, np.roll(labels, 1, axis=0)
    data.Shards.take, data.Masker.__call__ = shifted, shifted_labels
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MUON = {"optimizer": "muon"}


def cases():
    """(name, how close, trainer, ranks, flags)."""
    for trainer in OWN:
        for ranks in (1, 2):
            for strategy in ("ddp", "zero3"):
                yield "plain text", "equal", trainer, ranks, {"strategy": strategy}
        for flags in ({}, {**MUON, "strategy": "zero1", "ema": 0.9}):
            yield "resumed", "equal", trainer, 2, flags
        for flags in ({}, {**MUON, "strategy": "zero1"}, {"strategy": "zero3-offload"},
                      {"optimizer": "adam-atan2"}, {"precision": "fp16"}):
            yield "infinite", "equal", trainer, 2, flags
        yield "three ranks", "gradient", trainer, 3, {"global_batch": 12, "batch": 2, **ONE_STEP}
        yield "bf16", "loss", trainer, 2, {"precision": "bf16"}
        yield "Muon", "loss", trainer, 2, MUON
    for trainer in ("gpt2", "hrm"):
        for ranks in (1, 2, 3):
            yield "pairs", "gradient", trainer, ranks, {"global_batch": 12, "batch": 2, **PAIRS, **ONE_STEP}
        yield "pairs", "loss", trainer, 2, PAIRS
    for ranks in (1, 3):  # short documents have fewer tokens than --mask-rate asks for
        yield "short documents", "gradient", "mlm", ranks, {
            "data": "short", "mask_rate": 0.9, "global_batch": 12, "batch": 2, **ONE_STEP}
    yield "halting", "loss", "hrm", 2, {"halt": True}


# More cases for each trainer
MORE = [{**MUON, "strategy": "zero1"}, {"strategy": "zero1"}, {"strategy": "zero2"},
        {"strategy": "zero3-offload"}, {"comm": "bf16"}, {"ema": 0.9, "schedule": "wsd"},
        {"optimizer": "adam-atan2", "strategy": "zero1"}, {"precision": "fp16"},
        {"checkpoint_activations": "selective", "precision": "bf16"}, {"checkpoint_activations": "block"},
        {"grad_clip": 0, "schedule": "constant"}]
MORE_OF = {"gpt2": [{"modern": True, **MUON}, {"dropout": 0.1}], "mlm": [{"dropout": 0.1}],
           "hrm": [{"h_cycles": "1:3", "bp_cycles": 1, "inject_input": True}, {"dropout": 0.1},
                   {"init": "published", "ema": 0.9}, {"halt": True, "precision": "bf16"}]}


def more_cases():
    for trainer in OWN:
        for flags in MORE + MORE_OF[trainer]:
            yield "more", "equal", trainer, 2, flags
        yield "epochs", "equal", trainer, 1, {
            "epochs": 1.3, "eval_every": 30, "data": "short", "steps": None, "global_batch": 64, "batch": 32}


def prepare(root: Path, code: Path) -> None:
    """Makes shards of bytes, and of pairs with different lengths, some of them with hardly any label."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:12]
    (root / "text.txt").write_text("\n".join(f.read_text(encoding="utf-8") for f in files), encoding="utf-8")
    some = random.Random(0)
    pairs = [{"q": f"{i} " + "why " * some.randint(0, 25), "a": "so " * some.choice([1, 1, 2, 9])}
             for i in range(3000)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    short = [{"text": "word " * some.choice([0, 1, 1, 9])} for _ in range(9000)]
    (root / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    usual = [sys.executable, str(code / "data.py"), "prepare", "--tokenizer", "bytes", "--workers", "1"]
    subprocess.run([*usual, "--dataset", "text:text.txt", "--out", "text"], cwd=root, check=True)
    subprocess.run([*usual, "--dataset", "jsonl:short.jsonl", "--out", "short"], cwd=root, check=True)
    subprocess.run([*usual, "--dataset", "jsonl:pairs.jsonl", "--out", "pairs", "--row", "128",
                    "--prompt-field", "q", "--response-field", "a", "--val-split", "hash:0.1"], cwd=root,
                   check=True)


def train(code: Path, root: Path, out: Path, trainer: str, ranks: int, flags: dict, changes: str) -> None:
    listed = [f"--out={out}"]
    for key, value in ({"data": "text"} | SMALL | OWN[trainer] | flags).items():
        if value is None:
            continue
        if key == "data":
            value = root / value
        listed += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(root / "wrapper.py"), changes] if changes else []
    done = subprocess.run([*command, f"train_{trainer}.py", *listed], cwd=code, text=True,
                          capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{command} {trainer} {listed}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")


def losses(out: Path) -> list[tuple]:
    """(step, name, value) of all losses in the log."""
    found = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found += [(record["step"], key, record[key]) for key in ("loss", "val_loss")
                  if record.get(key) is not None]
    return sorted(found)


def tensors(out: Path) -> dict:
    newest = max((out / "checkpoints").glob("step_*.pt"))
    saved = torch.load(newest, weights_only=True)["tensors"]
    return {f"{group}/{name}": t for group in saved for name, t in saved[group].items()}


def difference(how: str, before: Path, after: Path) -> str:
    """Says how two runs differ, "" if they're as close as they have to be."""
    if how == "loss":
        a, b = (statistics.mean(v for _, key, v in losses(out) if key == "loss") for out in (before, after))
        return "" if abs(a - b) <= 2e-3 else f"mean losses {a:.5f} and {b:.5f}"
    a, b = tensors(before), tensors(after)
    if a.keys() != b.keys():
        return f"unlike names: {sorted(a.keys() ^ b.keys())[:4]}"
    if how == "gradient":
        far = {name: ((t - b[name]).norm() / t.norm()).item() for name, t in a.items()
               if name.endswith("exp_avg")}
        worst = max(far, key=far.get)
        return "" if far[worst] <= 1e-6 else f"{worst} differs by {far[worst]:.1e} of its norm"
    unequal = [name for name in a if not torch.equal(a[name], b[name])]
    if unequal:
        return f"{len(unequal)} of {len(a)} tensors, {unequal[0]} among them"
    unequal = [a for a, b in zip(losses(before), losses(after), strict=True) if a != b]
    return f"{len(unequal)} losses in the log, {unequal[0]} among them" if unequal else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--equal", action="store_true")
    args = parser.parse_args()
    versions = [args.before.resolve(), args.after.resolve()]
    wrong = count = 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        prepare(root, versions[0])
        (root / "wrapper.py").write_text(WRAPPER)
        for name, how, trainer, ranks, flags in [*cases(), *(more_cases() if args.equal else ())]:
            how = "equal" if args.equal else how
            changed = " ".join(f"{key}={value}" for key, value in flags.items())
            text = f"{trainer}, {ranks} ranks, {name}, {changed}: {how}"
            if not all(word in text for word in args.words):
                continue
            count += 1
            outs = [root / f"{count}-before", root / f"{count}-after"]
            for code, out, control in zip(versions, outs, ("", "control" * args.control)):
                changes = control + "infinite" * (name == "infinite")
                if name == "resumed":
                    train(code, root, out, trainer, ranks, flags | {"steps": 10, "save_every": 10}, changes)
                train(code, root, out, trainer, ranks, flags, changes)
            found = difference(how, *outs)
            wrong += bool(found)
            print(f"{text}: {found or 'the same'}", flush=True)
    print(f"{count - wrong} of {count} are the same")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
