"""The directory of a run: its name, the lock that keeps other runs out, its copy of the code, config.json."""

import filecmp
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import nn

import monitor
from cli.errors import HOST, RetryableError, oserror_as_retryable, say
from cli.files import lock_file, not_made, to_json
from data import sources_of
from ddp_utils import OWN_CHECKPOINT_NAME, Run, process
from model import num_params
from prepare.pipeline import directory_of

TRAINERS = ("train_hrm", "train_mlm", "train_gpt2")


def run_directory(args, trainer: str) -> Path:
    """The directory of a run: --out, or a name such as runs/hrm-tiny-stdlib-bpe4096. A copy of a trainer gets
    other names, such as runs/train_mine-tiny-stdlib-bpe4096 for train_mine.py.
    """
    family = trainer.removeprefix("train_") if trainer in TRAINERS else trainer
    names = [args.size if args.size.startswith(family) else f"{family}-{args.size}"]
    names += [directory_of(source, vars(args)).name for source in sources_of(args.data)]
    return args.out or Path("runs", "-".join(names))


class RunLock:
    """Keeps other runs out of a run directory. Rank 0 holds the lock, until it ends in any way."""

    def __init__(self, out: Path):
        self.out = out
        self._owner = None

    def acquire(self):
        """Creates the directory and locks it. Raises UserError if that fails or another run has the lock."""
        path = self.out / ".lock"  # O_NOFOLLOW: it must not be a link, because its content gets replaced
        try:
            (self.out / "checkpoints").mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise not_made(self.out, error, "choose another --out")
        file = self._file = os.fdopen(descriptor, "r+")

        def refuse():
            with file:
                raise RetryableError(f"{self.out} is in use by {file.read()}: wait, or choose another --out.")

        if why_not := lock_file(file, refuse):
            say(f"WARNING: {self.out} is on a file system without locks ({why_not}): make sure that no other "
                "run writes there")
        process.at_end.callback(file.close)  # by then Checkpoints has written everything
        with suppress(OSError):  # on a full disk the lock works without its owner's name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {HOST} since {time.strftime('%F %T')}".encode())
        self._owner = path.read_bytes()
        for leftover in (self.out / "checkpoints").glob(".tmp-*"):
            name = leftover.name.removeprefix(".tmp-")
            if name == "best.pt" or OWN_CHECKPOINT_NAME.fullmatch(name):
                leftover.unlink()

    def lost(self) -> bool:
        """Whether the directory was moved, removed or taken by another run after this process locked it."""
        if self._owner is None:  # only rank 0 has the lock
            return False
        try:
            return (self.out / ".lock").read_bytes() != self._owner
        except FileNotFoundError:
            return True
        except OSError:  # the disk is unreachable: the save will fail, too, and the next one tries again
            return False


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
    """Says which of project_files differ from the copies kept by the run of `run.saved`, if any, and which
    are copies of others.
    """
    begins = {}
    for name, path in project_files(run.trainer).items():
        if (other := begins.setdefault(path.read_bytes()[:200], path)) != path:
            say(f"note: {other.name} and {path.name} begin alike: if one is a copy, only what "
                f"{run.trainer.name} itself takes from it has an effect, see docs/changing.md")
        if not run.saved:
            continue
        kept = Path(run.saved["path"]).parent.parent / name
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
            with oserror_as_retryable(path):
                files[name] = path.read_bytes()
    return files
