"""The code that a run is trained with: kept in its directory, compared, and named by its commit."""

import ast
import itertools
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from data import ROOMS, NotNow, access
from model import num_params
from monitor import read_config

# what makes no model
OTHERS = {"train_hrm", "train_mlm", "train_gpt2", "ddp_utils", "monitor", "test_ddp", *ROOMS} - {"ops"}


def text_of(path: Path) -> str:
    with access(path):
        return path.read_text(encoding="utf-8", errors="replace")


def model_files(run) -> dict[str, Path]:
    """The files of the project that make the model of a run, by the names with which its directory keeps
    them: model.py and what else of the project is imported, and trainer.py if that has the class.
    """
    trainer = run.trainer.resolve()
    found = {}
    if run.model_class.__module__ in ("__main__", trainer.stem) and trainer.is_file():
        found["trainer.py"] = trainer
    for module in sorted(sys.modules):
        name = f"{module.replace('.', '/')}.py"
        for folder in (Path(__file__).resolve().parents[1], trainer.parent):
            path = folder / name
            if path.is_file() and path != trainer and module.partition(".")[0] not in OTHERS:
                found[f"model/{name}"] = path
    return found


def code_of(text: str) -> list[ast.stmt]:
    """The statements of a file, without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree.body


def first_difference(before: list[ast.stmt], now: list[ast.stmt]) -> int:
    """The line of the first statement of `now` that is another than before, 0 if there is none."""
    line = 1
    for old, new in itertools.zip_longest(before, now):
        line = new.lineno if new else line
        if not old or not new:
            return line
        if ast.dump(old) != ast.dump(new):
            inner = first_difference(vars(old).get("body", []), vars(new).get("body", []))
            return inner or line
    return 0


def say_changes(run, files: dict[str, Path]):
    """Says on stderr which of model_files have other code than when the checkpoint's run began. Without its
    record, nothing.
    """
    directory = Path(run.saved["path"]).parents[1]
    for name, path in files.items():
        kept = directory / name
        if not kept.is_file():
            continue
        line = 1
        with suppress(SyntaxError, ValueError, NotNow):  # it is only a note
            line = first_difference(code_of(text_of(kept)), code_of(text_of(path)))
        if line:
            print(f"{path} has changed since {directory} began, first in line {line} (see {kept})",
                  file=sys.stderr, flush=True)


def source_files(run) -> dict[str, str]:
    """The texts to write into the run directory: trainer.py and model/, of the start that began the run, or
    of today if they are not there yet. Says what has changed since.
    """
    files = model_files(run)
    files.pop("trainer.py", None)  # see trainer_text
    if run.saved:
        say_changes(run, files)
    if run.saved and (run.out / "model").is_dir():
        files = {}
    texts = {name: text_of(path) for name, path in files.items()}
    if run.trainer.is_file():  # otherwise it was typed into a notebook
        texts["trainer.py"] = trainer_text(run)
    return texts


def trainer_text(run) -> str:
    path = run.out / "trainer.py"
    now = text_of(run.trainer)
    if not run.saved or not path.exists():
        return now
    began = text_of(path)
    pairs = itertools.zip_longest(began.splitlines(), now.splitlines())
    for number, (before, after) in enumerate(pairs, 1):
        if before != after:
            run.say(f"{run.trainer.name} has changed since it began this run, first in line {number} (see "
                    f"{path})")
            break
    return began


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


def describe(run, mfu) -> dict:
    """What config.json says beside a run's identity: `commits`, one for each of its commands, the numbers of
    parameters and of training tokens, and the FLOPs per token of its last steps, None if they cannot be
    counted.
    """
    before = read_config(run.out)
    commands, commits = (before.get(name) for name in ("commands", "commits"))
    if not isinstance(commits, list):
        commits = [None] * len(commands if isinstance(commands, list) else [])
    flops = before.get("flops_per_token") if run.saved else None
    if run.trainer.is_file():  # else there is no command either
        commits = [*commits, commit_of(run.trainer.resolve().parent)]
    return {"commits": commits, "parameters": num_params(mfu.model),
            "training_tokens": run.dataset.train.num_tokens,
            "flops_per_token": flops or mfu.of_last_steps()}
