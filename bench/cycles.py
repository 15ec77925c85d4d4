"""Does an HRM answer better with more cycles? Exact matches by level of difficulty, and the picture of it.

    torchrun --nproc_per_node=2 train_hrm.py --size puzzle
    python bench/cycles.py runs/hrm-puzzle-task-addition-bytes --picture cycles.png

The levels are the validation sets of --data. Training has those whose name begins with trained.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import data
import ddp_utils
from model import HRM
from weights.use import load_model


@torch.no_grad()
def by_cycles(model: HRM, shards: data.Shards, most: int, world) -> list[float]:
    """The share of exact matches after each cycle, from 1 to `most`."""
    exact, samples = torch.zeros(most), 0
    for x, y in data.validation_batches(shards, 16, world):
        for cycle, z_h in enumerate(model.states(x, most)):
            _, found = model.loss(z_h, x, y)
            exact[cycle] += found["exact"].cpu()
        samples += found["samples"].item()
    return (exact / samples).tolist()


def cycle_numbers(text: str) -> list[int]:
    return [ddp_utils.positive_int(n) for n in text.split(",")]


def mean(levels: dict[str, list[float]], prefix: str) -> list[float]:
    """The mean over the levels whose name begins so, number by number."""
    chosen = [numbers for name, numbers in levels.items() if name.startswith(prefix)]
    return [sum(values) / len(values) for values in zip(*chosen)]


def draw(levels: dict[str, list[float]], trained_with: int, path: Path) -> None:
    """A line for each level, dashed for those of training, with a mark at the most cycles of training."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for i, (name, exact) in enumerate(levels.items()):
        style = "--" if name.startswith("trained") else "-"
        axes.plot(range(1, len(exact) + 1), [100 * share for share in exact], color=f"C{i}", label=name,
                  linestyle=style, marker="os^DvPXh"[i % 8], markevery=3)
    axes.axvline(trained_with, color="gray", linewidth=1)
    axes.text(trained_with, 3, " most cycles in training")
    axes.set(xlabel="cycles", ylabel="exact matches in %", ylim=(0, 101))
    axes.legend(title="level", loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = data.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--data", type=Path, default="shards/task-addition-bytes", help="prepared samples")
    parser.add_argument("--cycles", type=cycle_numbers, default="1,2,3,4,6,8,12,16,24",
                        help="columns of the table")
    parser.add_argument("--picture", type=Path, help="PNG of the first run, a line for each level")
    args = parser.parse_args()
    world = ddp_utils.init("gloo", "auto")
    columns = args.cycles
    if args.picture and not args.picture.parent.is_dir():
        raise data.UserError(f"{args.picture.parent} is no directory: create it, or name another --picture.")
    print("| run | level |" + "".join(f" {n} |" for n in columns) + "\n" + "|---" * (len(columns) + 2) + "|")
    for run in args.runs:
        model = load_model(HRM, ddp_utils.load_checkpoint(run, lambda text: None), world)
        if model.config.response < 0 or model.config.halt:
            raise data.UserError(f"{run} was trained on text or with --halt: name a run on a task.")
        ddp_utils.use_device(model, world.device, ddp_utils.compute_dtype("auto", world.device))
        model.eval()
        dataset = data.Dataset([args.data], model.config.seq_len)
        levels = {name: by_cycles(model, shards, max(columns), world)
                  for name, shards in dataset.val.items()}
        for prefix in ("trained", "untrained"):
            if any(name.startswith(prefix) for name in dataset.val):
                levels[f"mean of {prefix}"] = mean(levels, prefix)
        for name, exact in levels.items():
            cells = [f"{exact[n - 1]:.1%}" for n in columns]
            print(f"| {run.name} | {name} | {' | '.join(cells)} |", flush=True)
        if args.picture and run == args.runs[0]:
            named = {name: exact for name, exact in levels.items() if not name.startswith("mean")}
            draw(named, model.config.h_cycles, args.picture)


if __name__ == "__main__":
    ddp_utils.launch(main)
