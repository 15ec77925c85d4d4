"""--wandb: sends the records of a run to Weights & Biases."""

import os
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from cli.errors import PACKAGE_ERRORS, UserError
from loggers.machine import why_not


def require_wandb():
    """Raises UserError if the package is missing."""
    if not find_spec("wandb"):
        raise UserError("--wandb needs the package wandb: pip install wandb, or give --no-wandb.")


class WandbRun:
    """One run of Weights & Biases for each run directory, online or, with WANDB_MODE=offline, on disk. Each
    start sends all records, because the previous one may have been killed before it had sent them. The server
    skips steps that it already has, so a start that drops records of later steps begins another run there.
    """

    def __init__(self, log, process):
        """`process` is the ddp_utils.Process that ends: after an error, wandb would drop what isn't sent."""
        settings = log.settings
        self._run = None  # stays None if nothing can be sent
        self._process = process
        process.at_end.callback(self.close)
        began = str(settings.get("began")).split()[-1]  # distinguishes directories of the same name
        get = os.environ.get
        # if a start was killed, the service of a parent process may still hold its run
        os.environ.pop("WANDB_SERVICE", None)
        try:
            import wandb
            branch = log.out / "wandb-branch"  # the end of the id
            if branch.is_file() and (log.out / "metrics.jsonl").read_bytes().count(b"\n") > len(log.records):
                branch.write_text(f"-{os.urandom(2).hex()}")
            branch.touch()
            own_id = re.sub(r"[^\w.-]", "-", f"{log.out.name}-{began}{branch.read_text()}")
            self._run = wandb.init(
                project=get("WANDB_PROJECT", Path(settings["trainer"]).stem), dir=log.out,
                id=get("WANDB_RUN_ID", own_id), name=get("WANDB_NAME", log.out.name), resume="allow",
                reinit="create_new", config=settings, settings=wandb.Settings(console="off"))
            for record in log.records:
                self.log(record)
        except PACKAGE_ERRORS as error:
            self.close()
            log.say(f"nothing is sent to Weights & Biases: {why_not('wandb', error)}")

    def log(self, record: dict):
        if self._run:
            self._run.log(record, step=record["step"])

    def close(self):
        run, self._run = self._run, None
        if run:
            with suppress(*PACKAGE_ERRORS):
                run.finish(self._process.exit_code)
