"""--wandb: the records of a run in Weights & Biases."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from data import UserError
from loggers.machine import why_not
from monitor import FAULTS, at_exit


class WandbRun:
    """A run of Weights & Biases for each run directory, online or, as WANDB_MODE says, offline. Each start
    sends all records, because the one before may have been killed before it had sent its own; the server
    leaves out steps that it has.
    """

    living: ClassVar[list] = []  # what wandb.init returned, for finish_all

    def __init__(self, out: Path, say):
        self._out = out
        self._say = say
        self._run = None  # none if nothing can be sent

    def open(self, records: list[dict], settings: dict):
        self.close()
        began = str(settings.get("began")).split()[-1]  # tells apart two directories of one name
        # a service that a parent process started may still hold this run, of a start that was killed
        os.environ.pop("WANDB_SERVICE", None)
        try:
            import wandb
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", Path(settings["trainer"]).stem), dir=self._out,
                id=re.sub(r"[^\w.-]", "-", f"{self._out.name}-{began}"), name=self._out.name, resume="allow",
                reinit="create_new", config=settings, settings=wandb.Settings(console="off"))
            self.living.append(self._run)
            if self.finish_all not in at_exit:
                at_exit.append(self.finish_all)
            for record in records:
                self.write(record)
        except FAULTS as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
                raise UserError("--wandb needs the package wandb: pip install wandb, or give --no-wandb.")
            self._run = None
            self._say(f"nothing is sent to Weights & Biases: {why_not('wandb', error)}")

    def write(self, record: dict):
        if self._run:
            self._run.log(record, step=record["step"])

    def close(self):
        if self._run in self.living:
            self.living.remove(self._run)
            with suppress(*FAULTS):
                self._run.finish()

    @classmethod
    def finish_all(cls, exit_code: int):
        """Ends what an error has left open; without this, wandb's own process drops what it has not sent."""
        while cls.living:
            with suppress(*FAULTS):
                cls.living.pop().finish(exit_code)
