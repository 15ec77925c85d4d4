"""What a run keeps of its code (project_files, run_files and commit_of in startup/directory.py)."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finish, start
from runs import Trainer

import data
import train_gpt2
from model import GPT2
from startup.directory import commit_of, run_files
from weights.use import load_run

GPT2_TRAINER = Trainer("train_gpt2.py", save_every=4, eval_every=4, batch=3, max_new_tokens=3)


def test_a_run_knows_its_code_and_says_once_what_has_changed(shards, tmp_path, capsys):
    """The copies stay those of the beginning. A branch has its own."""
    out = tmp_path / "run"

    def said_to_change(**flags) -> list[str]:
        done = GPT2_TRAINER.train(0, shards, out, **flags)
        assert done.code == 0, done.out
        said = done.out + capsys.readouterr().err
        return re.findall(r"(\S+) has changed since: diff (\S+) \S+$", said, re.M)

    assert GPT2_TRAINER.train(0, shards, out, steps=2).code == 0
    trainer, kept = out / "trainer.py", out / "model" / "model.py"
    assert trainer.read_bytes() == (ROOT / "train_gpt2.py").read_bytes()
    copies = {path.relative_to(out / "model") for path in (out / "model").rglob("*.py")}
    assert all((out / "model" / name).read_bytes() == (ROOT / name).read_bytes() for name in copies)
    assert not said_to_change(steps=3)
    for path in (trainer, kept):
        path.write_text(path.read_text() + "# a comment\n")
    for flags in ({"steps": 4}, {"prompt": "To be", "max_new_tokens": 1}):
        assert said_to_change(**flags) == [("train_gpt2.py", f"{trainer}"), ("model.py", f"{kept}")]
    assert GPT2_TRAINER.train(0, shards, tmp_path / "branch", resume=out, steps=6).code == 0
    assert (tmp_path / "branch" / "trainer.py").read_bytes() == (ROOT / "train_gpt2.py").read_bytes()
    kept.unlink()
    assert len(said_to_change(steps=5)) == 1
    assert trainer.read_text().endswith("# a comment\n")
    config = json.loads((out / "config.json").read_text())
    assert len(config["commits"]) == len(config["commands"]) == 4
    assert config["parameters"] == sum(p.numel() for p in load_run(GPT2, out)[0].parameters())
    assert config["training_tokens"] == data.Dataset([shards], 32).train.num_tokens


@pytest.mark.full
def test_the_copies_are_a_whole_program(shards, tmp_path):
    assert GPT2_TRAINER.fork(2, shards, tmp_path / "run", steps=2).code == 0
    help_of_the_copy = [sys.executable, tmp_path / "run" / "trainer.py", "--help"]
    done = finish(start(help_of_the_copy, cwd=tmp_path, PYTHONPATH=tmp_path / "run" / "model"))
    assert done.code == 0 and str(ROOT) not in done.out, done.out


def test_another_constant_of_the_trainer_is_printed_on_a_resume(shards, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert GPT2_TRAINER.train(0, shards, out, steps=4).code == 0
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["BETAS"] == [0.9, 0.95] and settings["min_lr"] == 0.1 and "SIZES" not in settings
    assert "resuming with" not in GPT2_TRAINER.train(0, shards, out, steps=4).out
    monkeypatch.setattr(train_gpt2, "BETAS", (0.9, 0.99))
    other = GPT2_TRAINER.train(0, shards, out, steps=8)
    assert other.code == 0 and "BETAS [0.9, 0.99] (was [0.9, 0.95])" in other.out, other.out


@pytest.mark.parametrize("text, trainer, starts", [
    ("[]", "mine.py", 1), ('{"commands": null}', "mine.py", 1), ('{"commits": null}', "mine.py", 1),
    ("{", "mine.py", 1), ('{"commands": ["a"]}', "mine.py", 1),
    ('{"commands": ["a"], "commits": ["b"]}', "mine.py", 2), ("{}", "gone.py", 0)])
def test_no_shape_of_config_json_ends_a_start(text, trainer, starts, tmp_path):
    """The trainer is kept byte for byte. One without a file, as in a notebook, has no text."""
    (tmp_path / "mine.py").write_bytes(b"\xff = 1\r\n")
    (tmp_path / "config.json").write_text(text)
    dataset = SimpleNamespace(tokenizer=SimpleNamespace(to_json=str), train=SimpleNamespace(num_tokens=9))
    run = SimpleNamespace(out=tmp_path, saved=None, command="python", given={}, trainer=tmp_path / trainer,
                          dataset=dataset)
    files = run_files(run, torch.nn.Linear(2, 3), {})
    config = json.loads(files["config.json"])
    assert files.get("trainer.py") == (b"\xff = 1\r\n" if starts else None)
    assert {"tokenizer.json", "model/model.py"} <= files.keys()
    assert len(config["commands"]) == len(config["commits"]) == starts and config["parameters"] == 9


def test_the_commit_of_a_start(tmp_path, monkeypatch):
    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *author, *words], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    (tmp_path / "a.py").write_text("")
    for words in (["init"], ["add", "a.py"], ["commit", "-m", "a"]):
        git(*words)
    clean = commit_of(tmp_path)
    (tmp_path / "a.py").write_text("1")
    assert re.fullmatch("[0-9a-f]{40}", clean) and commit_of(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None
