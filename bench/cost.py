"""What a run of each size costs: hours of training and memory. Prints the table of docs/clusters.md.

    python bench/cost.py                         # all sizes, in minutes; needs no GPU
    python bench/cost.py mlm base large          # these sizes of a trainer

All of it is predicted:

* The memory is what --dry-run says, with --strategy ddp and the preset's micro-batch.
* One size of each trainer was timed, on one H200, without --fast, at commit 5aebec8. The others do as many
  FLOPs per second as that one, but a step has at least 4 ms for each call of a block, which is about what
  Python takes to launch it.
* Eight GPUs share the batch and are eight times as fast. Evaluations and saves are left out.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import model
from loggers.mfu import PEAK_TFLOPS, flops_per_token
from startup.dry_run import dry_run, empty_model
from startup.plan import plan_batch
from startup.run import resolve_flags

MODELS = {"gpt2": model.GPT2, "hrm": model.HRM, "mlm": model.MLM}
# The size that was timed and its tokens per second: bench/results/2026-11-27-gpu-h200.md, the first day. The
# second day had no number for the MLM. The HRM recomputed with `selective`, which `auto` takes on an H200.
MEASURED = {"gpt2": ("gpt2", 495_712), "hrm": ("1b", 24_153), "mlm": ("base", 352_771)}
# The host took 57.5 ms to launch the 12 blocks of GPT-2; 22 blocks of the MLM took 92.9 ms in all
CALL_SECONDS = 0.004
H200, RTX_3090 = PEAK_TFLOPS[r"\bH200\b"], PEAK_TFLOPS["RTX 3090$"]


def sizes_of(trainer: str) -> dict[str, dict]:
    return importlib.import_module(f"train_{trainer}").SIZES


def options(trainer: str, size: str) -> tuple:
    """The settings of a size, and further arguments of its model's `dummy_inputs`."""
    module = importlib.import_module(f"train_{trainer}")
    args = resolve_flags(module.parse_args(["--size", size, "--dry-run", "8x141"]))
    if trainer == "hrm":
        return args, {"bp_steps": module.truncation(args)[1]}
    return args, {"mask_rate": args.mask_rate} if trainer == "mlm" else {}


def flops(trainer: str, size: str) -> float:
    args, example = options(trainer, size)
    return flops_per_token(MODELS[trainer], empty_model(MODELS[trainer], args).config, **example)


def tokens(row: dict) -> int:
    return row["steps"] * row["global_batch"] * row["seq_len"]


def tokens_of(row: dict) -> str:
    count = tokens(row)
    return f"{count / 1e9:.1f} B" if count > 1e8 else f"{count / 1e6:.1f} M"


def hours(trainer: str, size: str, gpus: int, peak: float = H200) -> float:
    """Predicted from the size that was timed. `peak` is the GPU's, in TFLOP/s."""
    row = sizes_of(trainer)[size]
    timed, speed = MEASURED[trainer]
    seconds = tokens(row) / (speed * gpus * peak / H200)
    if size != timed:
        seconds *= flops(trainer, size) / flops(trainer, timed)
        c = empty_model(MODELS[trainer], options(trainer, size)[0]).config
        calls = c.n_layer * (c.cycles * (c.l_cycles + 1) if trainer == "hrm" else 1)
        _, _, micro_steps = plan_batch(gpus, None, None, None, row["global_batch"], row["batch"])
        seconds = max(seconds, row["steps"] * micro_steps * calls * CALL_SECONDS)
    return seconds / 3600


def memory(trainer: str, size: str) -> tuple[float, str]:
    """GB of each process with --strategy ddp, predicted, and what it recomputes."""
    torch.compiler.reset()  # forgets the size before
    args, example = options(trainer, size)
    share, _ = dry_run(MODELS[trainer], args, lambda text: None, **example)
    return 141 * share, args.checkpoint_activations


def rounded(value: float) -> str:
    """Two digits, from 0.1 upwards."""
    return "< 0.1" if value < 0.1 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def line(trainer: str, size: str) -> str:
    row = sizes_of(trainer)[size]
    cells = [f"{trainer} `{size}`", tokens_of(row), f"{row['steps']:,}"]
    needed, recomputed = memory(trainer, size)
    cells += [rounded(needed), recomputed, *(rounded(hours(trainer, size, gpus)) for gpus in (1, 8))]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", nargs="?", choices=MODELS)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="sizes of this trainer (all)")
    args = parser.parse_args()
    print("| `--size` | tokens | steps | GB per GPU | recomputed | hours on 1 H200 | on 8 |\n" +
          "|---" * 7 + "|", flush=True)
    for trainer in [args.trainer] if args.trainer else MODELS:
        sizes = sizes_of(trainer)
        if unknown := set(args.sizes) - sizes.keys():
            sys.exit(f"error: no size {', '.join(sorted(unknown))}: choose from {', '.join(sizes)}.")
        for size in args.sizes or sizes:
            print(line(trainer, size), flush=True)
    if not args.sizes:
        print(f"\nGPT-2 124M on 8 RTX 3090: {rounded(hours('gpt2', 'gpt2', 8, RTX_3090))} hours (predicted)")


if __name__ == "__main__":
    main()
