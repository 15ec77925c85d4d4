"""The code that a run is trained with: kept in its directory, compared, and named by its commit."""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from cli.errors import RetryableError, access
from model import num_params
from monitor import read_config

# what makes no model
OTHERS = {"train_hrm", "train_mlm", "train_gpt2", "ddp_utils", "monitor", "test_ddp", "cluster", "loggers",
          "prepare", "weights"}


def text_of(path: Path) -> str:
    with access(path):
        return path.read_text(encoding="utf-8", errors="replace")


def project_files(run) -> dict[str, Path]:
    """The files of the project that a run is trained with, by the names with which its directory keeps them:
    trainer.py, model.py and what else of the project is imported.
    """
    trainer = run.trainer.resolve()
    found = {"trainer.py": trainer} if trainer.is_file() else {}  # otherwise it was typed into a notebook
    for folder in (Path(__file__).resolve().parents[1], trainer.parent):
        ours = {path.stem for path in folder.glob("*")} - OTHERS
        for module in sorted(sys.modules):
            if module.partition(".")[0] not in ours:  # asked first: there are thousands of modules
                continue
            name = f"{module.replace('.', '/')}.py"
            path = folder / name
            if path.is_file() and path != trainer:
                found[f"model/{name}"] = path
    return found


def say_changes(run, log=lambda text: None):
    """Says on stderr, and to `log`, which of project_files differ from the copies in the directory of the
    checkpoint's run. Without a copy, nothing.
    """
    directory = Path(run.saved["path"]).parent.parent
    for name, path in project_files(run).items():
        kept = directory / name
        others = name == "trainer.py" and path.name != run.saved["settings"].get("trainer")
        if others or not kept.is_file():
            continue
        changed = True
        with suppress(RetryableError):  # it is only a note, and diff says why
            changed = text_of(kept) != text_of(path)
        if changed:
            now = os.path.relpath(path)
            text = f"{now} has changed since: {shlex.join(['diff', str(kept), now])}"
            print(text, file=sys.stderr, flush=True)
            log(text)


def files_to_keep(run) -> dict[str, str]:
    """The texts of project_files that its directory does not have yet: all, if the run begins."""
    return {name: text_of(path) for name, path in project_files(run).items()
            if not run.saved or not (run.out / name).exists()}


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in a folder, with -dirty if files differ from it; None if git does not
    say so within a second.
    """
    command = ["git", "--no-optional-locks", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40",
               "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=1, check=True).stdout.strip()


def last_commit(checkpoint: Path) -> str | None:
    """The commit of a run's last start, by its directory or one of its checkpoints, None if not recorded."""
    with suppress(TypeError, KeyError, IndexError):
        config = read_config(checkpoint) or read_config(checkpoint.parents[1])
        return config["commits"][-1]
    return None


def commits_and_counts(run, mfu) -> dict:
    """What config.json says beside a run's identity: `commits`, one for each of its commands, the numbers of
    parameters and of training tokens, and the FLOPs per token of its last steps, None if they cannot be
    counted.
    """
    before = read_config(run.out)
    commits = []
    with suppress(TypeError, KeyError):
        commits = list(before.get("commits") or [None] * len(before["commands"]))
    flops = before.get("flops_per_token") if run.saved else None
    if run.trainer.is_file():  # else there is no command either
        commits.append(commit_of(run.trainer.resolve().parent))
    return {"commits": commits, "parameters": num_params(mfu.model),
            "training_tokens": run.dataset.train.num_tokens,
            "flops_per_token": flops or mfu.of_last_steps()}
