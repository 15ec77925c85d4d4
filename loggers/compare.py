"""Compares runs: a table, with the flags that differ, and the losses of all in one picture."""

import math
from pathlib import Path

from cli.errors import say
from loggers.picture import figure_class, save_picture
from monitor import read_config

# How the table sums up the curves of a run
NUMBERS = {"tokens": "max", "val_loss": "min", "val_bits_per_byte": "min", "tokens_per_sec": "median",
           "hours": "max"}


def compare(runs: dict[Path, list[dict]], as_json: bool) -> dict:
    """Prints a table of runs, given their records. Returns their curves, with the hours of training, which
    leave out evaluations, saves and pauses. `efficiency` compares the tokens per second of a process with the
    first run's. The number of processes is that of a run's last start.
    """
    from pandas import DataFrame  # comes with datasets
    table, curves, first = {}, {}, None
    for run, records in runs.items():
        curve = DataFrame(records, columns=["step", "loss", *NUMBERS], dtype=float)
        curve = curves[run] = curve.groupby("step", as_index=False).last()  # a step and its evaluation
        curve["hours"] = (curve.tokens.diff() / curve.tokens_per_sec / 3600).fillna(0).cumsum()
        config = read_config(run)
        settings = config.get("settings", {})
        numbers = {"parameters": config.get("parameters"), **curve.agg(NUMBERS)}
        speed = numbers["tokens_per_sec"] / settings.get("world_size", math.nan)
        first = first or speed
        numbers |= {"tokens_per_sec_per_process": speed, "efficiency": round(speed / first, 3)}
        table[str(run)] = numbers | settings
    table = DataFrame(table).drop(["out", "resume", "wanted_batch", "eval_batch", "largest_batch"],
                                  errors="ignore")  # of one command, or not flags
    # None is a value. NaN isn't: another trainer or an older run has no such flag
    differ = table.map(lambda value: value if value != value else str(value)).nunique(axis=1) > 1
    differ[[*numbers]] = True
    table = table[differ]
    say(table.to_json() if as_json else table.to_string(na_rep="-", float_format="{:.8g}".format))
    return curves


def draw_losses(curves: dict, path: Path):
    """Draws training losses, and as dots those of validation, over steps, tokens and hours. Raises whatever
    matplotlib does, and UserError.
    """
    figure = figure_class()(figsize=(16, 6), layout="constrained")
    for axes, x in zip(figure.subplots(1, 3), ("step", "tokens", "hours")):
        for i, (run, curve) in enumerate(curves.items()):
            axes.semilogy(curve[x], curve.loss, f"C{i}", alpha=0.3)
            axes.semilogy(curve[x], curve.val_loss, f"C{i}o", label=run)
        axes.set(xlabel=x, ylabel="loss in nats per token (dots: validation)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center")  # names may be long
    save_picture(figure, path)
