"""How a command ends: errors of one sentence, exit codes, and what remains to be done at the end of a run."""

import contextlib
import errno
import functools
import os
import sys
from contextlib import ExitStack
from pathlib import Path

HOST = os.uname().nodename  # the name of this machine


class UserError(Exception):
    """A mistake that the user can fix: printed as one sentence without a traceback, exit code 2."""

    exit_code = 2


class RetryableError(UserError):
    """A failure that may not recur with the same command: no network, a full disk, a directory in use."""

    exit_code = 1


class RunError(Exception):
    """A failure that one sentence explains better than a traceback."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split("\n", 1)[0].split())[:300]


def listed(names: list[str]) -> str:
    """Names for a sentence: the first eight, then how many more."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextlib.contextmanager
def access(path: str | Path = ""):
    """Where files are read: an OSError becomes RetryableError, unless there is no such file. Only bytes that
    were read can show damage, so nothing is renamed, left out or begun again because of an OSError. All
    commands run in it as well, because to ask what a path is can raise one, too.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        path = error.filename or path
        # about bytes, from gzip, bz2, or a seek that they ask for; or about no file
        if not path or error.errno in (None, errno.EINVAL):
            raise
        raise RetryableError(f"{path} cannot be accessed ({error.strerror}): remove the cause, and "
                             "run the same command again; what it holds may be sound.") from None


def names_in(directory: Path) -> list[str]:
    """The sorted names in a directory, none if there is no directory. Raises RetryableError if it cannot be
    listed, of which Path.glob says nothing.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), access(directory):
        return sorted(os.listdir(directory))
    return []


def from_launcher(name: str, otherwise: int = 0) -> int:
    """A number in the environment. A text that is none is refused where several processes join."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def local_rank() -> int:
    return from_launcher("LOCAL_RANK")


def run_command(main):
    """Runs the main() of a command, and ends the process with its exit code, or with that of a UserError."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


say = functools.partial(print, flush=True)  # in a pipe, too, at once
FAULTS = (Exception, SystemExit)  # what an optional package may raise; Ctrl-C is none of them
# What remains to be done when a run ends, the newest first. Whoever begins something adds its end here;
# `launch` and `cleanup_on_exit` in ddp_utils.py close it.
at_end = ExitStack()
at_end.exit_code = 0  # of the run that ends
