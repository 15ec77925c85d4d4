"""The code of a run: its copies in the run directory, what has changed since, its commit."""

import filecmp
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import nn

import monitor
from cli.errors import access
from cli.files import to_json
from ddp_utils import Run
from model import num_params


def project_files(trainer: Path) -> dict[str, Path]:
    """The imported files of the project, by their names in a run directory: trainer.py for `trainer` (unless
    it was typed into a notebook), model/NAME for all others.
    """
    trainer = trainer.resolve()
    files = {"trainer.py": trainer} if trainer.is_file() else {}
    for folder in (Path(__file__).resolve().parent.parent, trainer.parent):
        ours = {path.stem for path in folder.glob("*")}
        for module in sorted(sys.modules):
            path = folder / f"{module.replace('.', '/')}.py"
            # check the name first: there are thousands of modules
            if module.partition(".")[0] in ours and path.is_file() and path != trainer:
                files[f"model/{path.relative_to(folder)}"] = path
    return files


def say_changes(run, say: Callable[[str], None]):
    """Says which of project_files differ from the copies kept by the run of `run.saved`."""
    directory = Path(run.saved["path"]).parent.parent
    for name, path in project_files(run.trainer).items():
        kept = directory / name
        others = name == "trainer.py" and path.name != run.saved["settings"]["trainer"]
        if others or not kept.is_file():
            continue
        with suppress(OSError):  # it's only a note, and diff will say why
            if filecmp.cmp(kept, path, shallow=False):
                continue
        now = os.path.relpath(path)
        say(f"{now} has changed since: {shlex.join(['diff', str(kept), now])}")


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in a folder, with -dirty if files differ from it. None if git doesn't
    answer within a second.
    """
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40",
             "--exclude=*"], capture_output=True, text=True, timeout=1, check=True).stdout.strip()


def run_files(run: Run, model: nn.Module, meta: dict) -> dict[str, bytes]:
    """Returns the files, by name, that rank 0 writes into the run directory:

        copies of the code    all of them when the run begins, later only missing ones
        tokenizer.json
        config.json           `meta`, the commands and commits of all starts so far, and the numbers of
                              parameters and of training tokens
    """
    before = monitor.read_config(run.out)
    commands, commits = [], []
    with suppress(TypeError, KeyError):  # config.json is damaged
        commands, commits = [*before["commands"]], [*before["commits"]]
    if run.trainer.is_file():  # not if main() is in a notebook
        commands.append(run.command)
        commits.append(commit_of(run.trainer.resolve().parent))
    config = meta | {
        "commands": commands, "commits": commits, "given": run.given, "parameters": num_params(model),
        "training_tokens": run.dataset.train.num_tokens}
    files = {"config.json": to_json(config, indent=2).encode(),
             "tokenizer.json": run.dataset.tokenizer.to_json().encode()}
    for name, path in project_files(run.trainer).items():
        if not run.saved or not (run.out / name).exists():
            with access(path):
                files[name] = path.read_bytes()
    return files
