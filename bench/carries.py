"""How many columns does a cycle move a carry? A table and a picture, for runs of --size puzzle.

    python bench/carries.py RUN [RUN ...] --picture carries.png

The columns of each sum add up to 9 in a chain of 1 to 11, and no carry enters the chain. After 16 cycles a
digit to its right changes, so that a carry passes through all of it. From its old state the model gets 1, 2,
4, 8 and 16 cycles for the new sum; `start` is 16 cycles from the first state. Prints exact matches in %.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loggers.picture import figure_class, save_picture
from model import HRM
from weights.use import load_run

DIGITS = 12
CYCLES = 1, 2, 4, 8, 16


def chain(some: random.Random, length: int) -> tuple[list[int], list[int], list[int]]:
    """Digits of a number, of one to add without a carry into the chain, and of one to add with it."""
    while True:
        begin = some.randrange(DIGITS - length)
        first = some.choices(range(10), k=DIGITS)
        second = [9 - a if begin <= i < begin + length else some.randrange(10) for i, a in enumerate(first)]
        source = begin + length
        first[source] = some.randrange(1, 9)
        second[source] = some.randrange(9 - first[source])
        nines = "".join("9" if a + b == 9 else " " for a, b in zip(first, second))
        if max(map(len, nines.split())) == length:
            changed = [*second]
            changed[source] = some.randrange(10 - first[source], 10)
            return first, second, changed


def row_of(model: HRM, first: list[int], second: list[int]) -> list[int]:
    """The ids of a sum and its answer, as in the training data."""
    a, b = (int("".join(map(str, digits))) for digits in (first, second))
    return [model.config.start, *f"{a:0{DIGITS}}+{b:0{DIGITS}}".encode(), model.config.response,
            *f"{a + b:0{DIGITS + 1}}".encode()]


def cycles_of(model: HRM, idx: torch.Tensor, state, count: int):
    """The states (z_H, z_L) after `count` cycles from `state`, or from the model's first state."""
    rope, mask = model.rope[:, :idx.size(1)], model.mask(idx, None)
    x = model.embed(idx) * model.config.embed_scale
    z_h, z_l = state or (x, model.z_l_init.expand_as(x))
    for _ in range(count):
        z_l = model.L(z_l + z_h + x, rope, mask)
        z_h = model.H(z_h + z_l, rope, mask)
    return z_h, z_l


def exact(model: HRM, state, idx: torch.Tensor) -> float:
    answer = idx[:, -DIGITS - 1:]
    return float((model.logits(state[0])[:, -DIGITS - 2:-1].argmax(-1) == answer).all(1).double().mean())


@torch.no_grad()
def table_of(model: HRM, lengths: range, count: int) -> dict[str, list[float]]:
    """For `start` and each number of cycles, the share of exact matches by length of the chain."""
    some = random.Random(0)
    table = {name: [] for name in ("start", *map(str, CYCLES))}
    for length in tqdm(lengths, "chains", disable=None):
        sums = [chain(some, length) for _ in range(count)]
        old = torch.tensor([row_of(model, first, second) for first, second, _ in sums])
        new = torch.tensor([row_of(model, first, changed) for first, _, changed in sums])
        table["start"].append(exact(model, cycles_of(model, new, None, CYCLES[-1]), new))
        state, done = cycles_of(model, old, None, CYCLES[-1]), 0
        for cycles in CYCLES:
            state, done = cycles_of(model, new, state, cycles - done), cycles
            table[str(cycles)].append(exact(model, state, new))
    return table


def draw(tables: dict[str, dict[str, list[float]]], lengths: range, path: Path):
    figure = figure_class()(figsize=(4.5 * len(tables), 4))
    for axes, (title, table) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items()):
        for name, shares in table.items():
            style = {"color": "black", "linestyle": "--"} if name == "start" else {}
            axes.plot(lengths, [100 * share for share in shares], label=name, **style)
        axes.set(title=title, xlabel="columns that the carry passes", ylabel="exact matches in %",
                 ylim=(-2, 102))
        axes.legend(title="cycles after the change")
    save_picture(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--picture", type=Path, help="file to draw to (needs matplotlib)")
    parser.add_argument("--sums", type=int, default=50, help="of each length (%(default)s)")
    parser.add_argument("--longest", type=int, default=DIGITS - 1, help="longest chain (%(default)s)")
    args = parser.parse_args()
    lengths, tables = range(1, args.longest + 1), {}
    for run in args.runs:
        model, _ = load_run(HRM, run)
        tables[run.name] = table = table_of(model, lengths, args.sums)
        print(f"{run.name}\n{'columns':8}" + "".join(f"{name:>7}" for name in table))
        for i, length in enumerate(lengths):
            print(f"{length:<8}" + "".join(f"{100 * shares[i]:7.0f}" for shares in table.values()))
    if args.picture:
        draw(tables, lengths, args.picture)


if __name__ == "__main__":
    main()
