"""A Mac, as far as Linux can pretend to be one: what Linux alone has is gone, and all trains as before. No
Mac has seen this; docs/clusters.md says so.
"""

import builtins
import ctypes
import os
import signal
import socket
import sys
from unittest import mock

import pytest
from conftest import ROOT
from processes import Group
from runs import Trainer, log_of

from cli.files import cpu_count
from cluster import roll_call
from loggers import machine

# names that Python on macOS lacks
LACKING = {
    os: "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create pidfd_open "
        "copy_file_range splice eventfd getrandom setns unshare O_DIRECT O_TMPFILE O_PATH",
    socket: "TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_QUICKACK SO_BINDTODEVICE AF_NETLINK AF_PACKET AF_VSOCK",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL sigwaitinfo sigtimedwait"}
FOLDERS = ("/proc", "/sys", "/dev/shm")  # that Linux alone has


def without_folders(function):
    """The function of a path, for which these folders are not there."""
    def call(path, *args, **kwargs):
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if name.startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", name)
        return function(path, *args, **kwargs)
    return call


class Library(ctypes.CDLL):
    """The C library of macOS."""

    def __getattr__(self, name):
        if name == "mallopt":
            raise AttributeError(name)
        return super().__getattr__(name)


def become_a_mac(patch) -> None:
    import psutil  # noqa: F401 (which asks for the system when it is imported)
    for module, names in LACKING.items():
        for name in names.split():
            patch.delattr(module, name, raising=False)
    for module, name in [(builtins, "open")] + [(os, name) for name in (
            "open", "stat", "lstat", "readlink", "listdir", "scandir", "access")]:
        patch.setattr(module, name, without_folders(getattr(module, name)))
    patch.setattr(ctypes, "CDLL", Library)
    patch.setattr(sys, "platform", "darwin")


def in_a_process() -> None:
    become_a_mac(pytest.MonkeyPatch())


def in_a_process_with_the_calls_of_linux() -> None:
    """The control: what the program would do without its guards."""
    import ddp_utils
    from ops import device
    ddp_utils.cpu_count = lambda: len(os.sched_getaffinity(0))
    device.keep_freed_memory = lambda: ctypes.CDLL(None).mallopt(-1, -1)
    in_a_process()


@pytest.fixture
def mac(monkeypatch):
    become_a_mac(monkeypatch)


FLAGS = {"steps": 4, "save_every": 2, "eval_every": 4, "max_new_tokens": 2}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **FLAGS), "hrm": Trainer("train_hrm.py", ff=64, **FLAGS),
            "mlm": Trainer("train_mlm.py", **FLAGS | {"ff": 48, "window": 16, "max_new_tokens": None})}


def train(trainer, ranks: int, shards, out, fault=in_a_process, **env):
    return Group(trainer.script, *trainer.flags(shards, out), ranks=ranks, fault=fault, fault_rank=mock.ANY,
                 **env).finish(60)


@pytest.mark.parametrize("name, ranks", [
    pytest.param(name, ranks, marks=[] if (name, ranks) == ("gpt2", 2) else pytest.mark.full)
    for name in TRAINERS for ranks in (0, 2)])
def test_each_trainer_has_the_same_losses(name, ranks, shards, tmp_path):
    trainer = TRAINERS[name]
    loopback = {} if ranks else {"GLOO_SOCKET_IFNAME": "lo"}  # that of macOS, lo0, is not here
    done = train(trainer, ranks, shards, tmp_path / "mac", **loopback)
    assert done.code == 0 and "Device cpu" in done.out and "training complete" in done.out, done.out
    here = trainer.fork(ranks, shards, tmp_path / "linux")
    assert here.code == 0 and log_of(tmp_path / "mac") == log_of(tmp_path / "linux"), here.out


@pytest.mark.full
def test_a_trainer_with_calls_of_linux_alone_does_not_train(shards, tmp_path):
    """The controls. And on Linux there is no interface lo0, which one process takes by itself there."""
    trainer = TRAINERS["gpt2"]
    done = train(trainer, 2, shards, tmp_path / "a", in_a_process_with_the_calls_of_linux)
    assert done.code and "AttributeError" in done.out, done.out
    done = train(trainer, 0, shards, tmp_path / "b")
    assert done.code and "lo0" in done.out, done.out


def test_each_name_that_is_guarded_is_gone_and_does_without(mac, tmp_path):
    from ops.device import keep_freed_memory
    keep_freed_memory()
    assert cpu_count() == os.cpu_count()
    with socket.socket() as end:
        roll_call.keep_alive(end)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
    library = ctypes.CDLL(None)
    for owner, name in (os, "sched_getaffinity"), (socket, "TCP_KEEPIDLE"), (library, "mallopt"):
        with pytest.raises(AttributeError):  # the controls
            getattr(owner, name)
    with pytest.raises(FileNotFoundError):
        open("/proc/self/stat")
    assert machine.is_trainer(["/Library/Frameworks/Python.app/Contents/MacOS/Python", "train_gpt2.py"])
    assert not machine.is_trainer(["/bin/zsh", "train_gpt2.py"])


def test_what_the_readme_says_of_systems():
    text = (ROOT / "README.md").read_text()
    assert "macOS: [untested](docs/clusters.md#a-mac)" in text
    assert "\n## A Mac\n" in (ROOT / "docs" / "clusters.md").read_text()
