"""A disk that fills up, a real one: a small tmpfs, for which these tests need root."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from processes import Group
from runs import Trainer, assert_same_run, steps_of

from cli.files import sha256_of
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


@pytest.mark.parametrize("leave", [0, pytest.param(150_000, marks=pytest.mark.long)])
def test_training_goes_on(disk, tmp_path, shards, leave):
    """Nothing, or half a checkpoint, fits: each loss is said, no half file stays, and once there is room
    again the run saves again, and ends as if nothing had happened."""
    out = disk / "run"
    flags = {"steps": 300, "save_every": 5, "eval_every": 50, "batch": 6, "schedule": "constant"}
    group = Group(GPT2.script, *GPT2.flags(shards, out, **flags))
    deadline = time.monotonic() + 30

    def wait_for_step(step):
        while not re.search(rf"step {step}/", group.text):
            assert group.all_alive and time.monotonic() < deadline, group.text
            time.sleep(0.002)

    wait_for_step(25)
    ballast = fill(disk, leave)
    while not leave and "was not written" not in group.text:
        assert group.all_alive and time.monotonic() < deadline, group.text
        time.sleep(0.002)
    if not leave:  # a checkpoint that was half written then has given its room back
        fill(disk)
    full = max(map(int, re.findall(r"step (\d+)/", group.text)))
    wait_for_step(full + 55)
    assert not [p for p in out.glob("checkpoints/.tmp-*") if time.time() - p.stat().st_mtime > 1]
    for path in list_checkpoints(out):
        read_checkpoint(path)
    ballast.unlink()
    done = group.finish()
    assert done.code == 0, done.out[-2000:]
    lost = r"WARNING: step_\d+_loss\S+ was not written: .*; training continues, and tries again at the next"
    assert len(re.findall(lost, done.out)) >= 8, done.out
    if not leave:  # else its lines fit
        assert re.search(r"WARNING: metrics.jsonl lacks a record \(.*\); the next one tries again", done.out)
    assert TRACEBACK not in done.out
    assert [line["step"] for line in steps_of(out)] == list(range(1, 301))
    whole = Group(GPT2.script, *GPT2.flags(shards, tmp_path / "whole", **flags)).finish()
    assert whole.code == 0
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.full
def test_a_last_checkpoint_that_cannot_be_saved_is_a_failure(disk, shards):
    out, flags = disk / "run", {"steps": 200, "save_every": 20}
    group = Group(GPT2.script, *GPT2.flags(shards, out, **flags))
    while not list_checkpoints(out):
        assert group.all_alive, group.text
        time.sleep(0.005)
    ballast = fill(disk)
    done = group.finish()
    last = done.out.splitlines()[-1]
    assert done.code == 1 and TRACEBACK not in done.out, done.out[-2000:]
    assert re.fullmatch(r"error: the checkpoint of step 200 could not be written, see above: .*\.", last)
    for _ in range(2):  # as long as the disk is full, starting again does not help
        done = Group(GPT2.script, *GPT2.flags(shards, out, **flags)).finish()
        assert done.code == 1 and TRACEBACK not in done.out, done.out[-2000:]
    ballast.unlink()
    done = Group(GPT2.script, *GPT2.flags(shards, out, **flags)).finish()
    assert done.code == 0 and "training complete" in done.out
    assert [line["step"] for line in steps_of(out)] == list(range(1, 201))


def test_a_run_that_starts_on_a_full_disk(disk, shards):
    fill(disk)
    done = Group(GPT2.script, *GPT2.flags(shards, disk / "run")).finish()
    assert done.code == 1 and TRACEBACK not in done.out, done.out  # to be tried again
    assert re.fullmatch(r"error: .* cannot be written.*\.", done.out.splitlines()[-1]), done.out


@pytest.mark.parametrize("leave", [100, 50_000])
def test_prepare(disk, tmp_path, corpus, leave):
    """A clear stop; with room it goes on to the same bytes."""
    command = ("data.py", "prepare", "--dataset", f"text:{corpus}", "--tokenizer", "bytes",
               "--shard-tokens", "10k", "--workers", 1, "--out")
    ballast = fill(disk, leave)
    done = Group(*command, disk / "out").finish()
    assert done.code == 1 and TRACEBACK not in done.out, done.out
    last = done.out.splitlines()[-1]
    assert re.search(r"error: .* cannot be written: No space left on device; .*\.$", last), done.out
    assert not list((disk / "out").glob(".tmp-*"))
    ballast.unlink()
    assert Group(*command, disk / "out").finish().code == 0
    assert Group(*command, tmp_path / "whole").finish().code == 0
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.*"))
    assert [sha256_of(disk / "out" / n) for n in names] == [sha256_of(tmp_path / "whole" / n) for n in names]


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_an_export_for_which_there_is_no_room(disk, shards, form):
    pytest.importorskip("gguf")
    assert GPT2.fork(0, shards, disk / "run", steps=1).code == 0
    fill(disk)
    done = GPT2.fork(0, shards, disk / "run", steps=1, export=form)
    assert done.code == 1 and "Traceback" not in done.out, done.out
    assert re.search(rf"error: {disk}/run/\w+\S* cannot be written .*No space left", done.out), done.out
