"""The directory of a run: its name, and the lock that keeps other runs out."""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

from cli.errors import HOST, RetryableError, UserError, say
from cli.files import lock_file, why_not_made
from data import directory_of, sources_of
from ddp_utils import CHECKPOINT, process

TRAINERS = ("train_hrm", "train_mlm", "train_gpt2")


def run_directory(args, trainer: str) -> Path:
    """The directory of a run: --out, or a name such as runs/hrm-tiny-stdlib-bpe4096. A copy of a trainer gets
    other names, such as runs/train_mine-tiny-stdlib-bpe4096 for train_mine.py.
    """
    family = trainer.removeprefix("train_") if trainer in TRAINERS else trainer
    names = [args.size if args.size.startswith(family) else f"{family}-{args.size}"]
    names += [directory_of(source, args.tokenizer).name for source in sources_of(args.data)]
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
            raise (RetryableError if error.errno == errno.ENOSPC else UserError)(
                f"{self.out} cannot be written ({why_not_made(self.out, error)}): choose another --out.")
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
            if name == "best.pt" or CHECKPOINT.fullmatch(name):
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
