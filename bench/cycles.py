"""What more H-cycles give a trained HRM, and which samples take them: exact matches by level of difficulty.

    torchrun --nproc_per_node=2 train_hrm.py --size puzzle --random-cycles 4 --out runs/random
    python bench/cycles.py runs/random --data shards/task-addition-bytes --cycles 1,2,4,8,16

Of models trained with --halt also the expected number of cycles of a response's tokens, by the weights that
they give to the states after each; --picture draws it.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import data  # noqa: E402
import ddp_utils  # noqa: E402
from model import HRM  # noqa: E402


@torch.no_grad()
def by_level(model: HRM, dataset: data.Dataset, device) -> dict[str, tuple[float, float]]:
    """Of each level, and of all as "": exact matches, and the mean of the cycles that tokens chose."""
    sums = {}  # of each level: samples, exact ones, tokens, their cycles
    for name, shards in dataset.val.items():
        sums[name] = torch.zeros(4, dtype=torch.float64)
        for x, y in data.validation_batches(shards, 16, 0, 1, device):
            _, found = model(x, y)
            taken = 1 + model.think(x)[1]  # of each token that chooses its cycles
            counted = y >= 0
            found = found["samples"], found["exact"], counted.sum(), (taken * counted).sum()
            sums[name] += torch.stack(found).double().cpu()
    sums = {"": sum(sums.values())} | sums
    return {name: ((exact / samples).item(), (cycles / tokens).item())
            for name, (samples, exact, tokens, cycles) in sums.items()}


def draw(lines: dict[str, dict[str, float]], path: Path) -> None:
    """The mean number of cycles by level."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for i, (label, levels) in enumerate(lines.items()):
        axes.plot(levels.keys(), levels.values(), marker="os^Dv"[i % 5], label=label)
    axes.set(xlabel="level of difficulty", ylabel="expected H-cycles of a token of the response")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = data.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--data", type=Path, required=True, help="what it was trained on, prepared")
    parser.add_argument("--cycles", default="1,2,4,8,16")
    parser.add_argument("--picture", type=Path, help="PNG of the cycles by level, a line for each run")
    args = parser.parse_args()
    world = ddp_utils.init("gloo", "auto")
    lines = {}
    for run, cycles in itertools.product(args.runs, map(int, args.cycles.split(","))):
        model, _ = ddp_utils.load_model(HRM, run, world, lambda text: None, eval_cycles=cycles)
        model.compute_dtype = ddp_utils.compute_dtype("auto", world.device)
        found = by_level(model.eval(), data.Dataset([args.data], model.config.seq_len), world.device)
        if not lines:
            print("| run | cycles |" + "".join(f" {name or 'all'} |" for name in found) + "\n" + "|---" * (
                len(found) + 2) + "|")
        print(f"| {run.name} | {cycles} |" + "".join(
            f" {exact:.1%}" + f" ({taken:.2f} cycles)" * model.config.halt + " |"
            for exact, taken in found.values()), flush=True)
        lines[f"{run.name}, at most {cycles}"] = {name: taken for name, (_, taken) in found.items() if name}
    if args.picture:
        draw(lines, args.picture)


if __name__ == "__main__":
    main()
