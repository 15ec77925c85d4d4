"""Files that survive a crash, locks, JSON and digests."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path

from cli.errors import RetryableError, UserError, oserror_as_retryable


def fsync_directory(path: Path):
    """Makes a rename in this directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # CIFS, VirtualBox and SMB in WSL cannot sync a directory
        os.fsync(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path):
    """A context with a file to write. It replaces `path` when the context ends, so readers see the old file
    or the whole new one, even after a crash.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.unlink(missing_ok=True)  # otherwise a link there could make us write elsewhere
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except Exception:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def lock_file(file, when_held) -> str:
    """Locks an open file for this process until the file is closed. If another process holds the lock, calls
    when_held(), which may raise, and then waits. Returns "", or if the file system has no locks its error.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        pass
    except OSError as error:
        return error.strerror
    when_held()
    fcntl.flock(file, fcntl.LOCK_EX)
    return ""


def not_made(directory: Path, error: OSError, way_out: str) -> UserError:
    """The error for a directory that cannot be made or written. A full disk, a quota, or a broken connection
    may be repaired while the same command is tried again.
    """
    reason = error.strerror
    for path in (directory, *directory.parents):
        if os.path.islink(path) and not os.path.exists(path):  # Path's methods would raise here
            reason = f"{path} is a link to {os.readlink(path)}, which is not there"
    passing = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
    kind = RetryableError if passing else UserError
    return kind(f"{directory} cannot be written ({reason}): {way_out}.")


def write_atomically(path: Path, *chunks):
    """Writes a whole file (see `replacing`), or raises RetryableError."""
    try:
        with replacing(path) as file:
            file.writelines(chunks)
    except OSError as error:
        raise RetryableError(f"{path} cannot be written: {error.strerror}; free some space or choose another "
                             "directory, and run the same command again.")


def read_json(path: Path):
    """The content of a JSON file. Raises ValueError if it is not JSON, and see `oserror_as_retryable`."""
    with oserror_as_retryable(path):
        return json.loads(path.read_text(encoding="utf-8"))


def sha256_of(path: Path) -> str:
    with oserror_as_retryable(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_digest(path: Path) -> str:
    """A digest of a file's length, front, middle and end: enough to tell two corpora apart."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with oserror_as_retryable(path), open(path, "rb") as file:
        for offset in (0, size // 2, max(size - 65536, 0)):
            file.seek(offset)
            digest.update(file.read(65536))
    return digest.hexdigest()


def digest_json(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def cpu_count() -> int:
    """Number of cores that this process may use (on macOS, which doesn't say, all cores)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def without_surrogates(text: str) -> str:
    """The text with "?" in place of lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def to_json(record: dict, **layout) -> str:
    """A record as JSON that UTF-8 can hold. What JSON doesn't know becomes text."""
    return without_surrogates(json.dumps(record, default=str, ensure_ascii=False, **layout))
