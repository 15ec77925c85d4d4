"""Trainers that prepare their own data: sums, the hub, text that grows."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT
from processes import fork
from runs import Trainer, log_of
from shard_files import ids_of, prepared, write_texts

import data
from cli.files import sha256_of
from prepare import pipeline, sources


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_trainer_prepares_sums_and_reports_each_level(monkeypatch):
    monkeypatch.setattr(pipeline, "TASK_TOKENS", 30000)
    for module in (sources, pipeline):
        monkeypatch.setattr(module, "UNTRAINED", 0.3)
    done = Trainer("train_gpt2.py", seq_len=None, size="tiny", batch=2).train(
        0, "task:addition", "run", steps=2, eval_every=2)
    assert done.code == 0 and "task:addition is prepared up to 30,000 tokens" in done.out, done.out
    groups = r"\| trained-1 \d+\.\d%, .*, untrained-5 \d+\.\d%, .*, untrained-8 \d+\.\d% \|"
    assert re.search("exact match .*" + groups, done.out) and "rows of 256" in done.out, done.out
    assert "bits per byte" not in done.out and "cycles" not in done.out
    used = Trainer("train_gpt2.py").here("--out", "run", "--prompt", "1+2", "--max-new-tokens", "1")
    assert used.code == 0, used.out


def test_a_hub_source_has_20_tokens_for_each_parameter():
    Path("corpus").mkdir()
    write_texts("corpus/a.jsonl", [f"{n} " + "a b c " * 150 for n in range(200)])
    trainer = Trainer("train_gpt2.py", steps=1, tokenizer="bytes", d_model=2, n_head=1)
    done = trainer.train(0, "hf:corpus", "run")
    parameters = int(re.search(r"initializing ([\d,]+) parameters", done.out)[1].replace(",", ""))
    assert f"hf:corpus is prepared up to {20 * parameters:,} tokens" in done.out


def test_a_trainer_says_what_is_wrong_with_the_splits():
    """That nothing is evaluated, and that the parts of a mixture are split unlike."""
    dataset = write_texts(Path("x.jsonl"), [f"row {n} " * 9 for n in range(400)])
    for name, split in (("none", "hash:0.001"), ("a", "hash:0.1"), ("b", "hash:0.2")):
        prepared(dataset, name, val_split=split)
    for mixture, warned in (("none", "hash:0.5"), ("a", ""), ("a,a,b", "hash:0.1, hash:0.2")):
        done = Trainer("train_gpt2.py").train(0, mixture, f"run-{mixture}", steps=1)
        assert done.code == 0 and done.out.count("--val-split") == bool(warned), done.out
        assert warned in done.out


APPENDED = re.search(r"\*\*Appended text\.\*\*.*?```bash\n(.*?)```",
                     (ROOT / "docs" / "running.md").read_text(), re.S)[1]


@pytest.mark.parametrize("name, ranks", [
    ("gpt2", 0), *[pytest.param(name, 2, marks=pytest.mark.full) for name in ("hrm", "mlm")]])
def test_text_that_was_appended_is_trained_on_as_the_guide_says(name, ranks):
    """With the tokenizer of the first run. Nothing that this has trained on is in the new validation set, and
    without --init-from the grown text is refused.
    """
    first, second = (shlex.split(line.partition(".py")[2], comments=True) for line in APPENDED.splitlines())
    trainer = Trainer(f"train_{name}.py", **({"ff": 48, "window": 16} if name == "mlm" else {}))

    def train(words, code: int = 0) -> str:
        flags = [*trainer.flags(None, None, steps=2), *words]
        done = fork(ranks, trainer.script, *flags) if ranks else trainer.here(*flags)
        assert done.code == code, done.out
        return done.out

    def lines(shards: str, split: str) -> list[bytes]:
        return bytes(id for id in ids_of(Path("shards", shards), split) if id < 256).splitlines()

    Path("diary.txt").write_text("".join(f"the {n}. day of spring\n" for n in range(900)))
    train(first)
    trained = lines("diary-bytes", "train")
    with open("diary.txt", "a") as file:
        file.writelines(f"the {n}. night of autumn\n" for n in range(90))
    assert re.search("shards/diary-bytes .*--init-from", train(first, 2))
    assert "runs/diary/checkpoints/" in train(second)
    manifest = data.read_manifest(Path("shards/diary-diary"))
    assert manifest["tokenizer"]["sha256"] == sha256_of(Path("runs/diary/tokenizer.json"))
    held_out = lines("diary-diary", "val")[1:]
    assert {b"the 89. night of autumn", b"the 899. day of spring"} <= {*held_out}
    assert not {*trained} & {*held_out} and b"the 9. day of spring" in trained
    log = log_of(Path("runs/diary-2"))
    assert log and train(second) and log_of(Path("runs/diary-2")) == log, "it was complete"
