"""Files that cannot be read are not damaged: that is a sentence, and nothing is renamed or begun anew.

A link to itself is such a file, for root and on any file system: "Too many levels of symbolic links" stands
for every other OSError.
"""

import re
import shutil
from pathlib import Path

import pytest
from runs import Trainer, assert_same_run, copy_of_the_first_half

import data
import monitor
from ddp_utils import list_checkpoints
from model import GPT2, from_hf

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


def train(ranks: int, shards: Path, out: Path):
    trainer = Trainer("train_gpt2.py", steps=8, save_every=4, eval_every=4, log_every=1, max_new_tokens=5)
    return trainer.fork(ranks, shards, out) if ranks else trainer.train(0, shards, out)


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
    uses = {"read": lambda: data.Dataset([out], 16), "verify": lambda: data.verify(out),
            "prepare": lambda: data.prepare(f"text:{corpus}", out, "bytes")}
    make_unreadable(out / name)
    with pytest.raises(data.NotNow, match=re.escape(f"{out / name} {LOOP}")):
        uses[use]()


def test_plain_shards_that_cannot_be_listed_are_not_gone(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(data.NotNow, match="cannot be accessed"):
        data.manifest_of_plain_shards(tmp_path / "loop", "bytes")


def test_other_files_that_cannot_be_read(trained, tmp_path, capsys):
    (tmp_path / "tokenizer.json").mkdir()
    loop = tmp_path / "config.json"
    loop.symlink_to(loop.name)
    with pytest.raises(data.NotNow, match="config.json cannot be accessed"):
        from_hf(GPT2, str(tmp_path))
    (tmp_path / "metrics.jsonl").symlink_to("metrics.jsonl")
    assert monitor.main([str(tmp_path)]) == 1
    assert f"error: {tmp_path}/metrics.jsonl {LOOP}" in capsys.readouterr().err
    (tmp_path / "text.txt").symlink_to("text.txt")
    with pytest.raises(data.NotNow, match="text.txt cannot be accessed"):
        data.sha256_of(tmp_path / "text.txt")
