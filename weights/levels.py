"""Exact matches by level and number of cycles: a table in the log, and levels.png."""

from pathlib import Path

import torch
from tqdm import tqdm  # comes with datasets

from cli.errors import FAULTS
from cli.flags import SHARDED
from data import Shards, validation_batches
from ddp_utils import Run, StopVote, World, reduce_sum
from loggers.machine import why_not
from loggers.picture import figure_class, save_picture
from training.state import TrainState

MOST_ROWS = 100  # rows of each level that the end of a run evaluates, almost 600 sums
COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of cycles in the table


def show_levels(state: TrainState, run: Run):
    """Shows, at the end of a run, how an HRM answers each validation set of pairs after each cycle. Does
    nothing unless training drew the number of cycles at random. Every rank calls this. A signal ends the
    table, and the run is still complete.
    """
    c, named = state.model.config, run.dataset.val
    # sharded parameters are gathered only for whole forward passes
    if len(named) < 2 or not c.least_cycles or c.response < 0 or run.args.strategy in SHARDED:
        return
    levels, samples, stop = {}, [], StopVote(run.world)
    state.model.eval()
    with state.averaged_weights():
        # shows progress on rank 0, if that has a terminal
        for name, shards in tqdm(named.items(), "levels", disable=not run.world.is_rank0 or None):
            levels[name], number = by_cycles(state.model, shards, c.used_cycles, state.world, run.batch,
                                             MOST_ROWS, stop)
            samples.append(round(number))
            stop.read()
            if stop.agreed:
                return run.say("the table of exact matches by cycles was stopped")
    state.model.train()
    run.say(f"exact matches in % by cycles ({c.least_cycles} to {c.h_cycles} in training), "
            f"at least {min(samples)} held-out samples a level:\n" + table(levels | means(levels)))
    if not run.world.is_rank0:
        return
    path = run.out / "levels.png"
    try:
        draw(levels, c.h_cycles, path)
        run.say(f"as a picture: {path}")
    except FAULTS as error:
        run.say(f"levels.png is not drawn: {why_not('matplotlib', error)}")


@torch.no_grad()
def by_cycles(model, shards: Shards, most: int, world: World, batch: int,
              rows: int | None = None, stop=None) -> tuple[list[float], float]:
    """The share of exact matches after each of `most` cycles, and the number of samples. Ends early when
    `stop`, a StopVote, hears a signal. Every rank calls this.
    """
    sums = torch.zeros(1 + most, dtype=torch.float64, device=world.device)
    for x, y in validation_batches(shards, batch, world, rows):
        for cycle, z_h in enumerate(model.high_level_states(x, most), 1):
            _, batch_sums = model.loss(z_h, x, y)
            sums[cycle] += batch_sums["exact"]
        sums[0] += batch_sums["samples"]
        if stop and stop.vote():
            break
    samples, *exact = reduce_sum([*sums], world)
    return [n / max(samples, 1) for n in exact], samples


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
