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


def become_a_mac(patch=None) -> None:
    import psutil  # noqa: F401 (which asks for the system when it is imported)
    patch = patch or pytest.MonkeyPatch()
    for module, names in LACKING.items():
        for name in names.split():
            patch.delattr(module, name, raising=False)
    for module, name in [(builtins, "open")] + [(os, name) for name in (
            "open", "stat", "lstat", "readlink", "listdir", "scandir", "access")]:
        patch.setattr(module, name, without_folders(getattr(module, name)))
    patch.setattr(ctypes, "CDLL", Library)
    patch.setattr(sys, "platform", "darwin")


FLAGS = {"steps": 4, "save_every": 2, "eval_every": 4, "max_new_tokens": 2}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **FLAGS), "hrm": Trainer("train_hrm.py", ff=64, **FLAGS),
            "mlm": Trainer("train_mlm.py", **FLAGS | {"ff": 48, "window": 16, "max_new_tokens": None})}


@pytest.mark.parametrize("name, ranks", [
    ("gpt2", 2), *(pytest.param(*case, marks=pytest.mark.full) for case in (("hrm", 0), ("mlm", 2)))])
def test_each_trainer_has_the_same_losses(name, ranks, shards, tmp_path):
    trainer = TRAINERS[name]
    loopback = {} if ranks else {"GLOO_SOCKET_IFNAME": "lo"}  # that of macOS, lo0, is not here
    done = Group(trainer.script, *trainer.flags(shards, tmp_path / "mac"), ranks=ranks, fault=become_a_mac,
                 fault_rank=mock.ANY, **loopback).finish(60)
    assert done.code == 0 and "training complete" in done.out, done.out
    here = trainer.fork(ranks, shards, tmp_path / "linux")
    assert here.code == 0 and log_of(tmp_path / "mac") == log_of(tmp_path / "linux"), here.out


def test_each_name_that_is_guarded_is_gone_and_does_without(monkeypatch):
    from ops.device import keep_freed_memory
    become_a_mac(monkeypatch)
    keep_freed_memory()
    assert cpu_count() == os.cpu_count()
    with socket.socket() as end:
        roll_call.keep_alive(end)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
    for owner, name in (os, "sched_getaffinity"), (socket, "TCP_KEEPIDLE"), (ctypes.CDLL(None), "mallopt"):
        assert not hasattr(owner, name)  # the controls
    with pytest.raises(FileNotFoundError):
        open("/proc/self/stat")
    python = "/Library/Frameworks/Python.app/Contents/MacOS/Python"
    assert [machine.is_trainer([name, "train_gpt2.py"]) for name in (python, "/bin/zsh")] == [True, False]
    assert "macOS: [untested](docs/clusters.md#a-mac)" in (ROOT / "README.md").read_text()
