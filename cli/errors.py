"""How a command fails: one-sentence errors, exit codes, and access to files."""

import atexit
import contextlib
import errno
import functools
import os
import re
import signal
import sys
import traceback
from pathlib import Path

HOST = os.uname().nodename  # the name of this machine
for name, value in [*os.environ.items()]:  # set to nothing, as in X=$UNSET, means not set
    if not value and re.match("(CUBLAS|GLOO|HF|NCCL|TORCH_NCCL|TRITON|WANDB)_", name):
        del os.environ[name]


class UserError(Exception):
    """A mistake that the user can fix. Printed as one sentence without a traceback; exit code 2."""

    exit_code = 2


class RetryableError(UserError):
    """A failure that may not happen again: no network, a full disk, a directory in use."""

    exit_code = 1


class RunError(Exception):
    """A failure that one sentence explains better than a traceback."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of an exception, shortened."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split("\n", 1)[0].split())[:300]


def joined(names: list[str]) -> str:
    """Names for a sentence: the first eight, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextlib.contextmanager
def oserror_as_retryable(path: str | Path = ""):
    """Turns an OSError into a RetryableError, unless the file doesn't exist. Use it wherever files are read.

    Only bytes that were read can show damage. So nothing is renamed, left out or started over because of an
    OSError. All commands run in it, too, because even path.is_dir() can raise an OSError.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        path = error.filename or path
        # it's about bytes (from gzip, bz2 or one of their seeks), or not about a file
        if not path or error.errno in (None, errno.EINVAL):
            raise
        raise RetryableError(f"{path} cannot be accessed ({error.strerror}): fix that, and run the same "
                             "command again; its contents may be fine.") from None


def names_in(directory: Path) -> list[str]:
    """The sorted names in a directory, or [] if it doesn't exist. Raises RetryableError if it can't be
    listed, which Path.glob would hide.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), oserror_as_retryable(directory):
        return sorted(os.listdir(directory))
    return []


def from_launcher(name: str, otherwise: int = 0) -> int:
    """A number from the environment. Text that isn't a number is refused later, when the processes join."""
    text = os.environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may be a list
    return int(text) if text.isdecimal() else otherwise


def local_rank() -> int:
    return from_launcher("LOCAL_RANK")


def owns_python(module: str = "__main__") -> bool:
    """Whether Python ends with the script whose __name__ is `module`: it's the file that was started, and
    neither runpy, a console, a profiler nor a debugger goes on after it.
    """
    names = [frame.name for frame in traceback.extract_stack() if frame.filename != "<frozen runpy>"]
    others = sys.flags.inspect or sys.gettrace() or sys.getprofile()
    return module == "__main__" and names[0] == "<module>" not in names[1:] and not others


def end_python(code: int):
    """Calls what is registered with atexit, and ends the process without Python's teardown, in which threads
    of torch and pyarrow can abort it.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()  # stderr is line-buffered
    os._exit(code)


def run_command(main):
    """Runs main(), and ends with exit code 0, also after a broken pipe, or that of a UserError."""
    code = 0
    try:
        with oserror_as_retryable(), contextlib.suppress(BrokenPipeError):  # from `peek … | head`
            main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    end_python(code) if owns_python(main.__module__) else sys.exit(code)


def set_handler(number: int, handler):
    """Like signal.signal, which raises ValueError if main() runs in a thread."""
    with contextlib.suppress(ValueError):
        signal.signal(number, handler)


@contextlib.contextmanager
def needed(package: str, what: str):
    """A context in which to import a package. If the package is missing or broken, raises UserError that says
    `what` needs it.
    """
    try:
        yield
    except PACKAGE_ERRORS as error:
        text = f"{what} needs the package {package}"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UserError(f"{text}: pip install {package}.")
        raise UserError(f"{text}, which is broken here ({first_line(error)}): pip install --force-reinstall "
                        f"{package}.")


say = functools.partial(print, flush=True)  # at once, even into a pipe
PACKAGE_ERRORS = (Exception, SystemExit)  # what an optional package may raise; not Ctrl-C
