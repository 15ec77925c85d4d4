"""A run as lists (history.json) and as a picture (training_history.png)."""

import io
import json
import os
import time
from pathlib import Path

from cli.errors import PACKAGE_ERRORS, UserError
from cli.files import write_atomically
from loggers.machine import why_not
from monitor import own_keys


class History:
    """Rewrites history.json and training_history.png after evaluations and at the end."""

    def __init__(self, log):
        self._log = log
        self._next = 0.0  # when to write again at the earliest

    def log(self, record: dict):
        if "val_loss" in record:
            self._save()

    def _save(self, last: bool = False):
        """Writes both files. Takes at most 5 % of the run's time, except for the `last` time."""
        start = time.perf_counter()
        out, records = self._log.out, self._log.records
        if not records or not last and start < self._next:
            return
        keys = dict.fromkeys(key for record in records for key in record)
        history = {key: [record.get(key) for record in records] for key in keys}
        try:
            write_atomically(out / "history.json", json.dumps(history).encode())
            draw_curves(out.name, records, out / "training_history.png")
        except PACKAGE_ERRORS as error:
            if last or isinstance(error, UserError):  # a full disk each time, a missing matplotlib only once
                self._log.say(f"training_history.png is not drawn: {why_not('matplotlib', error)}")
        self._next = time.perf_counter() + 20 * (time.perf_counter() - start)

    def close(self):
        self._save(last=True)


def figure_class():
    backend = os.environ.pop("MPLBACKEND", None)  # a notebook's backend makes the import fail
    try:
        from matplotlib.figure import Figure  # not pyplot, which needs a display
    finally:
        if backend:
            os.environ["MPLBACKEND"] = backend
    return Figure


def save_picture(figure, path: Path):
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    write_atomically(path, picture.getvalue())


def draw_curves(name: str, records: list[dict], path: Path):
    """Draws loss, learning rate, throughput, a trainer's own numbers and exact matches over steps, as a PNG
    800 pixels wide. Raises UserError and whatever matplotlib raises.
    """
    keys = dict.fromkeys(key for record in records for key in record)
    own = [key for key in own_keys(keys) if "/" not in key]
    rows = ["lr", "tokens_per_sec", *own, *keys.keys() & {"val_exact"}]
    figure = figure_class()(figsize=(8, 4.8 + 1.6 * len(rows)), layout="constrained")
    loss, *others = figure.subplots(1 + len(rows), 1, sharex=True, height_ratios=(3, *[1] * len(rows)))

    def curve(axes, key: str, **style):
        points = [r for r in records if r.get(key) is not None]
        axes.plot([r["step"] for r in points], [r[key] for r in points], **style)

    curve(loss, "loss", label="training loss", linewidth=1, alpha=0.6)
    curve(loss, "val_loss", label="validation loss", marker="o", markersize=5)
    loss.set(title=name, ylabel="loss (nats per token)")
    loss.legend()
    labels = {"lr": "learning rate", "tokens_per_sec": "tokens/s"}
    for key, axes in zip(rows, others):
        curve(axes, key)
        axes.set(ylabel=labels.get(key, key))
    others[1].set(ylim=(0, None))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.axes[-1].set(xlabel="step")
    save_picture(figure, path)
