"""What to learn from pairs, and what a prompt may see: the two models, three objectives, several seeds.

    python bench/objectives.py --steps 300 --seeds 0,1,2 --out runs/objectives

After Table 3 of the HRM-Text paper (arXiv 2605.20613), in small: models of nearly as many parameters, on the
functions of Python's own source (docstring and head -> body), after as many steps. The loss is that of the
response tokens of held-out prompts, whatever was learned. Run it again and it goes on where it stopped.
"""

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import data  # noqa: E402
import ddp_utils  # noqa: E402
from model import GPT2, HRM, num_params  # noqa: E402

MODELS = {"HRM": (HRM, "train_hrm.py", "--init identity --n-layer 1 --d-model 64 --n-head 1 --ff 192"),
          "GPT-2 modern": (GPT2, "train_gpt2.py", "--modern --n-layer 2 --d-model 64 --n-head 1")}
OBJECTIVES = {"all tokens": "--attention isolated --loss all",
              "responses": "--attention isolated --loss response",
              "responses, prefix": "--attention prefix --loss response"}


def train(name: str, objective: str, seed: int, args: argparse.Namespace) -> Path:
    _, script, shape = MODELS[name]
    out = args.out / f"{name}-{objective}-{seed}".replace(" ", "-").replace(",", "")
    flags = {"--data": args.data, "--seq-len": args.row, "--out": out, "--steps": args.steps, "--seed": seed,
             "--eval-every": args.steps, "--save-every": args.steps, "--max-new-tokens": 1, "--device": "cpu"}
    command = [sys.executable, ROOT / script, *shape.split(), *OBJECTIVES[objective].split()]
    command += [part for pair in flags.items() for part in pair]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    print(f"{out.name}: trained", file=sys.stderr, flush=True)
    return out


@torch.no_grad()
def held_out(out: Path, name: str, args: argparse.Namespace, world) -> tuple[float, float, int]:
    """Mean loss of the responses, the fraction of their tokens that is the likeliest one, and parameters."""
    model, _ = ddp_utils.load_model(MODELS[name][0], out, world, lambda text: None)
    model.eval()
    shards = data.Dataset([args.data], args.row, loss="response").val[""]
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in data.validation_batches(shards, 8, 0, 1, "cpu"):
        _, found = model(x, y)
        sums += torch.stack([found["loss"], found["correct"], (y >= 0).sum()]).double()
    return sums[0].item() / sums[2].item(), sums[1].item() / sums[2].item(), num_params(model)


def main() -> None:
    parser = data.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[0, 1, 2])
    parser.add_argument("--row", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    args = parser.parse_args()
    shards = args.out / "shards"
    args.data = data.prepare("pairs:stdlib", shards, "bpe:4096", row=args.row, val_split="hash:0.05")
    runs = [(name, objective, seed) for seed in args.seeds for name in MODELS for objective in OBJECTIVES]
    with ThreadPoolExecutor(data.cpu_count()) as pool:
        outs = dict(zip(runs, pool.map(lambda run: train(*run, args), runs)))
    world = ddp_utils.init("gloo", "cpu")
    print(f"{args.steps} steps of 16 rows of {args.row} tokens, seeds {args.seeds}\n")
    print("| model | parameters | objective | loss of held-out responses | lowest to highest | right |")
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        for objective in OBJECTIVES:
            found = [held_out(outs[name, objective, seed], name, args, world) for seed in args.seeds]
            losses = [loss for loss, _, _ in found]
            right = statistics.mean(right for _, right, _ in found)
            print(f"| {name} | {found[0][2]:,} | {objective} | {statistics.mean(losses):.3f} | "
                  f"{min(losses):.3f} to {max(losses):.3f} | {right:.1%} |")


if __name__ == "__main__":
    main()
