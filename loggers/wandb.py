"""--wandb: the records of a run in Weights & Biases."""

import os
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from cli.errors import FAULTS, UserError, at_end
from loggers.machine import why_not


def require_wandb():
    """Raises UserError if the package is missing."""
    if not find_spec("wandb"):
        raise UserError("--wandb needs the package wandb: pip install wandb, or give --no-wandb.")


class WandbRun:
    """A run of Weights & Biases for each run directory, online or, as WANDB_MODE says, offline. Each start
    sends all records, because the one before may have been killed before it had sent its own; the server
    leaves out steps that it has.
    """

    def __init__(self, log):
        settings = log.settings
        self._run = None  # none if nothing can be sent
        at_end.callback(self.close)  # after an error wandb's own process would drop what it has not sent
        began = str(settings.get("began")).split()[-1]  # tells apart two directories of one name
        # a service that a parent process started may still hold this run, of a start that was killed
        os.environ.pop("WANDB_SERVICE", None)
        try:
            import wandb
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", Path(settings["trainer"]).stem), dir=log.out,
                id=re.sub(r"[^\w.-]", "-", f"{log.out.name}-{began}"), name=log.out.name, resume="allow",
                reinit="create_new", config=settings, settings=wandb.Settings(console="off"))
            for record in log.records:
                self.log(record)
        except FAULTS as error:
            self.close()
            log.say(f"nothing is sent to Weights & Biases: {why_not('wandb', error)}")

    def log(self, record: dict):
        if self._run:
            self._run.log(record, step=record["step"])

    def close(self):
        run, self._run = self._run, None
        if run:
            with suppress(*FAULTS):
                run.finish(at_end.exit_code)
