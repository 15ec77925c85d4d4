"""Files that cannot be read are not damaged: that is a sentence, and nothing is renamed or started over.

A link to itself is such a file, for root and on any file system: "Too many levels of symbolic links" stands
for every other OSError.
"""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from processes import fork
from runs import Trainer, assert_same_run, copy_of_the_first_half

import data
from cli.errors import RetryableError, UserError
from cli.files import sha256_of
from ddp_utils import list_checkpoints
from loggers import command as monitor_command
from model import GPT2
from prepare import sources
from prepare.command import verify
from prepare.pipeline import prepare
from weights.huggingface import from_hf
from weights.use import load_run

TRAINER = Trainer("train_gpt2.py", steps=8, eval_every=4, max_new_tokens=5, warmup=1)
LONG = "x" * 300  # for root, too, nothing can be said of a path with such a name


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    done = TRAINER.train(0, shards, out)
    assert done.code == 0, done.out
    return out


def make_unreadable(path: Path) -> Path:
    if path.exists():
        path.rename(path.with_name(f"kept-{path.name}"))
    path.symlink_to(path.name)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def errors_of(done, code: int) -> list[str]:
    assert done.code == code and "Traceback" not in done.out, done.out
    return [line for line in done.out.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("name, ranks", [
    ("checkpoints/step", 2), *(pytest.param(name, 2, marks=pytest.mark.full)
                               for name in ("checkpoints", "metrics.jsonl")),
    *((name, 0) for name in ("checkpoints/step", "checkpoints", "train.log", "config.json",
                             "metrics.jsonl"))])
def test_a_run_that_cannot_be_read_stays_as_it_is(trained, shards, tmp_path, name, ranks):
    out, train = tmp_path / "run", TRAINER.fork if ranks else TRAINER.train
    copy_of_the_first_half(trained, out)
    shutil.copy(trained / "config.json", out)
    if name == "train.log":
        (out / name).touch()
    path = make_unreadable(list_checkpoints(out)[0] if name == "checkpoints/step" else out / name)
    before = contents(out)
    said = errors_of(train(ranks, shards, out), 1)
    assert said and all(str(path) in line and os.strerror(errno.ELOOP) in line for line in said), said
    assert before.items() <= contents(out).items() and not list(out.rglob("*.damaged"))
    path.unlink()
    path.with_name(f"kept-{path.name}").rename(path)
    assert TRAINER.train(0, shards, out).code == 0
    assert_same_run(trained, out)


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train_000000.bin"])
def test_data_that_cannot_be_read_are_not_damaged(shards, corpus, tmp_path, name):
    out = shutil.copytree(shards, tmp_path / "out")
    path = make_unreadable(out / name)
    uses = [lambda: data.Dataset([out], 16), lambda: verify(out)]
    if name.endswith(".json"):
        uses.append(lambda: prepare(f"text:{corpus}", out, "bytes"))
    for use in uses:
        with pytest.raises(RetryableError, match=f"{path} .*{os.strerror(errno.ELOOP)}"):
            use()


@pytest.mark.parametrize("ranks, command", [
    (2, f"train_gpt2.py --resume {LONG}/run"), (0, f"data.py info {LONG}/data"),
    *(pytest.param(0, command, marks=pytest.mark.full) for command in (
        f"train_mlm.py --data {LONG}/data", f"train_gpt2.py --data {LONG}/data --dry-run",
        f"train_gpt2.py --data text:{LONG}/*", f"train_hrm.py --init-from hf:{LONG}/model",
        f"test_ddp.py --data {LONG}/data", f"data.py prepare --dataset jsonl:{LONG}/a.jsonl",
        f"data.py prepare --dataset stdlib --out out --tokenizer {LONG}/tokenizer.json",
        f"monitor.py {LONG}/run"))])
def test_a_path_of_which_nothing_can_be_said(tmp_path, ranks, command):
    """As of one in the home directory of somebody else, which is_file and is_dir answer with an error."""
    done = fork(ranks, *command.split(), cwd=tmp_path)
    said = errors_of(done, done.code)
    assert done.code in (1, 2) and len(said) == max(ranks, 1), done.out
    assert all(os.strerror(errno.ENAMETOOLONG) in line for line in said), done.out


def test_other_files_that_cannot_be_read(tmp_path, corpus):
    (tmp_path / "tokenizer.json").mkdir()
    for name, use, *arguments in (
            ("config.json", from_hf, GPT2, str(tmp_path)),
            ("metrics.jsonl", monitor_command.main, [str(tmp_path)]),
            ("text.txt", sha256_of, tmp_path / "text.txt"),
            ("loop", data.manifest_of_plain_shards, tmp_path / "loop", "bytes")):
        make_unreadable(tmp_path / name)
        with pytest.raises(RetryableError, match=name):
            use(*arguments)
    with pytest.raises(UserError, match=os.strerror(errno.ENAMETOOLONG)):
        prepare(f"text:{corpus}", tmp_path / LONG / "out", "bytes")


@pytest.mark.parametrize("pattern", ["notes/**/*.txt", "notes/*/*.txt", "notes/b/*"])
def test_a_folder_of_texts_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch, pattern):
    for name in ("a", "b"):
        (tmp_path / "notes" / name).mkdir(parents=True)
        (tmp_path / "notes" / name / "x.txt").write_text("text")

    def list_others(path, real=os.listdir):
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", list_others)
    with pytest.raises(RetryableError, match="notes/b .*Permission denied"):
        sources.find_files(f"{tmp_path}/{pattern}")
    assert len(sources.find_files(f"{tmp_path}/notes/a/*")) == 1


def test_a_file_system_that_cannot_sync_directories(corpus, tmp_path, monkeypatch):
    """Such as CIFS. What was written is written."""
    def fsync(descriptor: int, real=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = prepare(f"text:{corpus}", tmp_path / "out", "bytes", workers=1)
    done = TRAINER.train(0, out, tmp_path / "run")
    assert done.code == 0 and "written" not in done.out, done.out
    assert [path.name[5:13] for path in list_checkpoints(tmp_path / "run")] == ["00000008", "00000004"]


def test_a_file_system_that_cannot_map_files(trained, shards, tmp_path, monkeypatch):
    """Such as some FUSE. Nothing is damaged, and the run and its export are what they would be."""
    def no_map(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    def no_map_in_torch(name, *_, **__):
        raise RuntimeError(f"unable to mmap 99 bytes from file <{name}>: No such device (19)")

    out = tmp_path / "run"
    copy_of_the_first_half(trained, out)
    monkeypatch.setattr("mmap.mmap", no_map)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", no_map_in_torch)
    monkeypatch.setattr("safetensors.torch.load_file", no_map)
    assert TRAINER.train(0, shards, out).code == 0
    assert_same_run(trained, out)
    assert TRAINER.train(0, shards, out, export="hf").code == 0
    theirs, ours = from_hf(GPT2, str(out / "hf")), load_run(GPT2, out)[0]
    assert torch.equal(theirs.positions.weight, ours.positions.weight)


@pytest.mark.parametrize("inside", [False, True])
def test_a_link_to_what_is_not_mounted_is_named(shards, corpus, tmp_path, inside):
    link = tmp_path / "link"
    link.symlink_to("/not/mounted")
    out = link / "run" if inside else link
    said, = errors_of(TRAINER.train(0, shards, out), 2)
    assert str(link) in said and "/not/mounted" in said
    with pytest.raises(UserError, match=f"{link} .*/not/mounted"):
        prepare(f"text:{corpus}", out, "bytes")
    assert link.is_symlink()
