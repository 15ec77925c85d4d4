"""A disk that fills up: a small tmpfs, for which these tests need root."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from processes import Group
from runs import Trainer, assert_same_run, steps_of
from waiting import wait_for

from ddp_utils import list_checkpoints, read_checkpoint

TRACEBACK = "[rank0]: Traceback"  # the thread of TensorBoard cannot be kept from printing one of its own
GPT2 = Trainer("train_gpt2.py", max_new_tokens=5)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Takes all the room but `leave` bytes."""
    with open(disk / "ballast", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave))
    return disk / "ballast"


def start(out, shards, **changes) -> Group:
    return Group(GPT2.script, *GPT2.flags(shards, out, **changes))


def fails(group: Group) -> str:
    """The last line of a run or command that ends with 1, because it may go well later."""
    done = group.finish()
    last = done.out.splitlines()[-1]
    assert done.code == 1 and TRACEBACK not in done.out and last.startswith("error: "), done.out[-2000:]
    return last


@pytest.mark.parametrize("leave", [0, pytest.param(150_000, marks=pytest.mark.long)])
def test_training_goes_on(disk, tmp_path, shards, leave):
    """Nothing, or half a checkpoint, fits. Each loss is said, and no half file stays. Once there is room,
    the run saves again, and it ends as if nothing had happened.
    """
    out = disk / "run"
    flags = {"steps": 300, "save_every": 5, "eval_every": 30, "batch": 6, "schedule": "constant"}
    group = start(out, shards, **flags)

    def wait(pattern):
        wait_for(lambda: re.search(pattern, group.text), 60, lambda: group.all_alive, lambda: group.text)

    wait("step 25/")
    ballast = fill(disk, leave)
    if not leave:  # a checkpoint that was half written gives its room back
        wait(r"WARNING: step_")
        fill(disk)
    full = max(map(int, re.findall(r"step (\d+)/", group.text)))
    wait(f"step {full + 35}/")
    assert not [p for p in out.glob("checkpoints/.tmp-*") if time.time() - p.stat().st_mtime > 1]
    for path in list_checkpoints(out):
        read_checkpoint(path)
    ballast.unlink()
    done = group.finish()
    assert done.code == 0 and TRACEBACK not in done.out, done.out[-2000:]
    assert len(re.findall(r"WARNING: step_\d+_loss", done.out)) >= 5, done.out
    assert leave or "WARNING: metrics.jsonl" in done.out  # with room left, its lines fit
    assert start(tmp_path / "whole", shards, **flags).finish().code == 0
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.full
def test_a_last_checkpoint_that_cannot_be_saved_is_a_failure(disk, shards):
    out, flags = disk / "run", {"steps": 200, "save_every": 20}
    group = start(out, shards, **flags)
    wait_for(lambda: list_checkpoints(out), 60, lambda: group.all_alive)
    ballast = fill(disk)
    assert "step 200" in fails(group)
    fails(start(out, shards, **flags))  # as long as the disk is full, starting again does not help
    ballast.unlink()
    assert start(out, shards, **flags).finish().code == 0
    assert [line["step"] for line in steps_of(out)] == list(range(1, 201))


def test_a_start_and_an_export_without_room_fail(disk, shards):
    assert GPT2.train(0, shards, disk / "run", steps=1).code == 0
    fill(disk)
    assert str(disk / "run") in fails(start(disk / "run", shards, steps=1, export="hf"))
    assert str(disk / "other") in fails(start(disk / "other", shards))


@pytest.mark.parametrize("leave", [50_000, pytest.param(100, marks=pytest.mark.full)])
def test_prepare_goes_on_to_the_same_bytes(disk, tmp_path, corpus, leave):
    def command(out):
        return Group("data.py", "prepare", "--dataset", f"text:{corpus}", "--tokenizer", "bytes",
                     "--shard-tokens", "10k", "--workers", 1, "--out", out)

    ballast = fill(disk, leave)
    assert str(disk / "out") in fails(command(disk / "out"))
    assert not list((disk / "out").glob(".tmp-*"))
    ballast.unlink()
    assert command(disk / "out").finish().code == command(tmp_path / "whole").finish().code == 0
    for path in (tmp_path / "whole").glob("*.*"):
        assert path.read_bytes() == (disk / "out" / path.name).read_bytes() or path.name == ".lock"
