"""Does an HRM answer better with more cycles? Prints the exact matches of a run by level of difficulty and
number of cycles, for all held-out samples, and draws them: RUN/levels.png.

    torchrun --nproc_per_node=2 train_hrm.py --size puzzle
    python examples/levels.py runs/hrm-puzzle-task-addition-bytes

The levels are the validation sets of the run's data. Training has those with a name that begins with trained.
torchrun makes it faster, as it does for the trainer.
"""

import sys
from pathlib import Path

import torch
from tqdm import tqdm  # comes with datasets

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a copy beside model.py doesn't need this line
import data
import ddp_utils as ddp
from cli.errors import UserError, say
from cli.parser import ArgumentParser, local_path, positive_int
from loggers.command import show_picture
from loggers.picture import figure_class, save_picture
from model import HRM
from monitor import read_config
from prepare.pipeline import directory_of
from weights.use import load_run

BATCH = 8  # rows
COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of cycles in the table


@torch.no_grad()
def by_cycles(model: HRM, shards: data.Shards, most: int, world: ddp.World) -> list[float]:
    """The share of exact matches after each of `most` cycles. Every rank calls this."""
    sums = torch.zeros(1 + most, dtype=torch.float64, device=world.device)
    for x, y in data.validation_batches(shards, BATCH, world):
        for cycle, z_h in enumerate(model.high_level_states(x, most), 1):
            _, batch_sums = model.loss(z_h, x, y)
            sums[cycle] += batch_sums["exact"]
        sums[0] += batch_sums["samples"]
    samples, *exact = ddp.reduce_sum([*sums], world)
    return [n / max(samples, 1) for n in exact]


def means(levels: dict[str, list[float]]) -> dict[str, list[float]]:
    """The mean over the levels in training, and over the others, for each number of cycles."""
    averages = {}
    for prefix in ("trained", "untrained"):
        chosen = [shares for name, shares in levels.items() if name.startswith(prefix)]
        if chosen:
            averages[f"mean of {prefix}"] = [sum(values) / len(values) for values in zip(*chosen)]
    return averages


def table(levels: dict[str, list[float]]) -> str:
    most = max(map(len, levels.values()))
    columns = sorted({most, *(n for n in COLUMNS if n < most)})
    width = max(map(len, levels))
    lines = ["level".ljust(width) + "".join(f"{n:7}" for n in columns)]
    for name, shares in levels.items():
        lines.append(name.ljust(width) + "".join(f"{100 * shares[n - 1]:7.1f}" for n in columns))
    return "\n".join(lines)


def draw(levels: dict[str, list[float]], trained_with: int, path: Path):
    """Draws a line for each level (dashed: in training), and marks the most cycles in training. Raises
    UserError and whatever matplotlib raises.
    """
    figure = figure_class()(figsize=(8, 4.5))
    axes = figure.subplots()
    for i, (name, exact) in enumerate(levels.items()):
        style = "--" if name.startswith("trained") else "-"
        axes.plot(range(1, len(exact) + 1), [100 * share for share in exact], color=f"C{i}", label=name,
                  linestyle=style)
    axes.axvline(trained_with, color="gray", linewidth=1)
    axes.text(trained_with, 3, " most cycles in training")
    axes.set(xlabel="cycles", ylabel="exact matches in %", ylim=(0, 101))
    axes.legend(title="level", loc="lower right")
    save_picture(figure, path)


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=local_path, metavar="RUN", help="a run directory")
    parser.add_argument("--cycles", type=positive_int, help="cycles at most (default: as in evaluation)")
    args = parser.parse_args()
    config = read_config(args.run)
    if config.get("family") != "HRM":
        raise UserError(f"{args.run} is not the directory of a run of train_hrm.py: name one that is.")
    world = ddp.init()
    model, _ = load_run(HRM, args.run, world.device)
    c = model.config
    if c.response < 0 or c.halt:
        raise UserError(f"{args.run} was trained on text or with --halt: name another run.")
    flags = config["settings"]
    directories = [directory_of(source, flags) for source in data.sources_of(flags["data"])]
    sets = data.Dataset(directories, c.seq_len).val
    if not sets:
        raise UserError(f"{args.run} has no validation set: name another run.")
    levels = {name: by_cycles(model, shards, args.cycles or c.max_eval_cycles, world)
              for name, shards in tqdm(sets.items(), "levels", disable=not world.is_rank0 or None)}
    if world.is_rank0:
        say(f"exact matches in % by cycles (at most {c.h_cycles} in training):")
        say(table(levels | means(levels)))
        show_picture(args.run / "levels.png", draw, levels, c.h_cycles)


if __name__ == "__main__":
    ddp.launch(main)
