"""Files that cannot be read are not damaged: that is a sentence, and nothing is renamed or begun anew.

A link to itself is such a file, for root and on any file system: "Too many levels of symbolic links" stands
for every other OSError.
"""

import errno
import mmap
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
from processes import fork
from runs import Trainer, assert_same_run, copy_of_the_first_half

import data
from cli.errors import RetryableError, UserError
from cli.files import fsync_directory, sha256_of
from ddp_utils import list_checkpoints, read_checkpoint
from loggers import command as monitor_command
from model import GPT2
from prepare import sources
from prepare.command import verify
from prepare.pipeline import prepare
from weights.huggingface import from_hf
from weights.use import load_run

LOOP = "cannot be accessed (Too many levels of symbolic links)"


def make_unreadable(path: Path) -> Path:
    kept = path.with_name(f"kept-{path.name}")
    path.rename(kept)
    path.symlink_to(path.name)
    return kept


def make_readable(path: Path, kept: Path):
    path.unlink()
    kept.rename(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    done = train(0, shards, out)
    assert done.code == 0, done.out
    return out


def train(ranks: int, shards: Path, out: Path, **changes):
    trainer = Trainer("train_gpt2.py", steps=8, save_every=4, eval_every=4, log_every=1, max_new_tokens=5,
                      warmup=1)
    return (trainer.fork if ranks else trainer.train)(ranks, shards, out, **changes)


@pytest.mark.parametrize("name, ranks", [
    ("checkpoints/step", 2), ("checkpoints", 2), ("metrics.jsonl", 2), ("checkpoints/step", 0),
    *((name, 0) for name in ("checkpoints", "train.log", "config.json", "metrics.jsonl"))])
def test_a_run_that_cannot_be_read_stays_as_it_is(trained, shards, tmp_path, name, ranks):
    out = tmp_path / "run"
    copy_of_the_first_half(trained, out)
    shutil.copy(trained / "config.json", out)
    path = list_checkpoints(out)[0] if name == "checkpoints/step" else out / name
    if name == "train.log":
        path.touch()
    kept = make_unreadable(path)
    before = {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    done = train(ranks, shards, out)
    assert done.code == 1 and "Traceback" not in done.out, done.out
    said = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert said and all(line.startswith(f"error: {path} {LOOP}") for line in said), done.out
    after = {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert before.items() <= after.items() and not list(out.rglob("*.damaged"))
    make_readable(path, kept)
    assert train(0, shards, out).code == 0
    assert_same_run(trained, out)


def test_a_checkpoint_that_is_a_link_to_nothing_stays_the_newest(trained, shards, tmp_path):
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    newest, older = list_checkpoints(trained)
    shutil.copy(older, out / "checkpoints")
    link = out / "checkpoints" / newest.name
    link.symlink_to("/not/mounted")
    done = train(0, shards, out)
    assert done.code == 1 and f"error: {link} is not there" in done.out, done.out
    assert link.is_symlink() and len(list_checkpoints(out)) == 2


@pytest.mark.parametrize("name, use", [
    ("manifest.json", "read"), ("manifest.json", "verify"), ("manifest.json", "prepare"),
    ("tokenizer.json", "read"), ("tokenizer.json", "verify"), ("tokenizer.json", "prepare"),
    ("train_000000.bin", "read"), ("train_000000.bin", "verify")])
def test_data_that_cannot_be_read_are_not_damaged(shards, corpus, tmp_path, name, use):
    out = shutil.copytree(shards, tmp_path / "out")
    uses = {"read": lambda: data.Dataset([out], 16), "verify": lambda: verify(out),
       "prepare": lambda: prepare(f"text:{corpus}", out, "bytes")}
    make_unreadable(out / name)
    with pytest.raises(RetryableError, match=re.escape(f"{out / name} {LOOP}")):
        uses[use]()


LONG = "x" * 300  # for root, too, nothing can be said of a path with such a name
TOO_LONG = "cannot be accessed (File name too long)"


@pytest.mark.parametrize("ranks, command", [
    (0, f"train_mlm.py --data {LONG}/data"), (0, f"train_gpt2.py --data {LONG}/data --dry-run"),
    (0, f"train_gpt2.py --data text:{LONG}/*"), (2, f"train_gpt2.py --resume {LONG}/run"),
    (0, f"train_hrm.py --init-from hf:{LONG}/model"), (0, f"test_ddp.py --data {LONG}/data"),
    (0, f"data.py prepare --dataset jsonl:{LONG}/a.jsonl"), (0, f"data.py info {LONG}/data"),
    (0, f"data.py prepare --dataset stdlib --out out --tokenizer {LONG}/tokenizer.json"),
    (0, f"monitor.py {LONG}/run")])
def test_a_path_of_which_nothing_can_be_said(corpus, tmp_path, ranks, command):
    """As of one in the home directory of somebody else, which is_file and is_dir answer with an error."""
    done = fork(ranks, *command.split(), cwd=tmp_path)
    said = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert done.code in (1, 2) and "Traceback" not in done.out, done.out
    assert len(said) == max(ranks, 1) and all(TOO_LONG in line for line in said), done.out
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        prepare(f"text:{corpus}", tmp_path / LONG / "out", "bytes")


@pytest.mark.parametrize("pattern", ["notes/**/*.txt", "notes/*/*.txt", "notes/b/*"])
def test_a_folder_of_texts_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch, pattern):
    for name in ("a", "b"):
        (tmp_path / "notes" / name).mkdir(parents=True)
        (tmp_path / "notes" / name / "x.txt").write_text(f"text {name}")
    real = os.listdir

    def list_others(path):
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", list_others)
    with pytest.raises(RetryableError, match="notes/b cannot be accessed .Permission denied"):
        sources.find_files(f"{tmp_path}/{pattern}")
    assert len(sources.find_files(f"{tmp_path}/notes/a/*")) == 1


def test_plain_shards_that_cannot_be_listed_are_not_gone(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RetryableError, match="cannot be accessed"):
        data.manifest_of_plain_shards(tmp_path / "loop", "bytes")


def test_other_files_that_cannot_be_read(trained, tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    loop = tmp_path / "config.json"
    loop.symlink_to(loop.name)
    with pytest.raises(RetryableError, match="config.json cannot be accessed"):
        from_hf(GPT2, str(tmp_path))
    (tmp_path / "metrics.jsonl").symlink_to("metrics.jsonl")
    with pytest.raises(RetryableError, match=re.escape(f"{tmp_path}/metrics.jsonl {LOOP}")):
        monitor_command.main([str(tmp_path)])
    (tmp_path / "text.txt").symlink_to("text.txt")
    with pytest.raises(RetryableError, match="text.txt cannot be accessed"):
        sha256_of(tmp_path / "text.txt")


# -----------------------------------------------------------------------------------------------------------
# File systems that lack something


def without_directory_sync(descriptor: int, sync=os.fsync):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")
    sync(descriptor)


def test_a_file_system_that_cannot_sync_directories(corpus, tmp_path, monkeypatch):
    """Such as CIFS. What was written is written."""
    monkeypatch.setattr(os, "fsync", without_directory_sync)
    out = prepare(f"text:{corpus}", tmp_path / "out", "bytes", workers=1)
    before = len(os.listdir("/proc/self/fd"))
    done = train(0, out, tmp_path / "run")
    assert done.code == 0 and "written" not in done.out, done.out
    assert [path.name[5:13] for path in list_checkpoints(tmp_path / "run")] == ["00000008", "00000004"]
    for _ in range(20):
        fsync_directory(tmp_path)
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_file_system_that_cannot_map_files(trained, shards, tmp_path, monkeypatch):
    """Such as some FUSE. Nothing is damaged, and the run and its export are what they would be."""
    def no_map(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    def no_map_in_torch(name, *_, **__):
        raise RuntimeError(f"unable to mmap 99 bytes from file <{name}>: No such device (19)")

    out = tmp_path / "run"
    copy_of_the_first_half(trained, out)
    path = list_checkpoints(out)[0]
    expected = read_checkpoint(path)["tensors"]
    monkeypatch.setattr("mmap.mmap", no_map)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", no_map_in_torch)
    monkeypatch.setattr("safetensors.torch.load_file", no_map)
    found = read_checkpoint(path)["tensors"]
    for group, named in expected.items():
        assert all(torch.equal(tensor, found[group][name]) for name, tensor in named.items())
    assert train(0, shards, out).code == 0
    assert_same_run(trained, out)
    assert train(0, shards, out, export="hf").code == 0
    theirs, ours = from_hf(GPT2, str(out / "hf")), load_run(GPT2, out)[0]
    assert torch.equal(theirs.positions.weight, ours.positions.weight)


def test_shards_are_mapped_privately_and_not_read(shards, monkeypatch):
    """Fewer file systems can map a file as shared."""
    flags = []
    real = mmap.mmap
    monkeypatch.setattr("mmap.mmap", lambda *args: flags.append(args[2:]) or real(*args))
    tokens = data.open_shard(shards / "train_000000.bin")
    assert flags == [(mmap.MAP_PRIVATE, mmap.PROT_READ)] and not tokens.flags.writeable
    assert len(tokens) == data.read_manifest(shards)["shards"][0]["tokens"]


def test_too_many_open_files_are_said(shards, monkeypatch):
    def no_descriptor(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("mmap.mmap", no_descriptor)
    with pytest.raises(RetryableError, match="cannot be accessed .Too many open files"):
        data.open_shard(shards / "train_000000.bin")


@pytest.mark.parametrize("inside", [False, True])
def test_a_link_to_what_is_not_mounted_is_named(shards, corpus, tmp_path, inside):
    link = tmp_path / "link"
    link.symlink_to("/not/mounted")
    out = link / "run" if inside else link
    sentence = f"{link} is a link to /not/mounted, which is not there"
    done = train(0, shards, out)
    assert done.code == 2 and sentence in done.out, done.out
    with pytest.raises(UserError, match=sentence):
        prepare(f"text:{corpus}", out, "bytes")
    assert link.is_symlink()
