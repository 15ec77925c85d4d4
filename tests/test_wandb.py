"""--wandb: what a run directory's starts leave in the offline files of Weights & Biases, read back."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Finished, finish, start
from processes import fork
from runs import Trainer

import monitor

TIMES = ("_runtime", "_timestamp", "_step", "System")
FLAGS = {"steps": 12, "save_every": 4, "eval_every": 6, "max_new_tokens": 2}
TRAINER = Trainer("train_gpt2.py", **FLAGS)


def forked(trainer: Trainer, shards, out, ranks: int = 0, **changes) -> Finished:
    """A run in processes of its own, forked from one that may be older than WANDB_MODE here."""
    return fork(ranks, trainer.script, *trainer.flags(shards, out, **changes), WANDB_MODE="offline")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture
def wandb():
    return pytest.importorskip("wandb")


def pieces_of(content: bytes):
    """The records of a file in the form of LevelDB's log, after its own 7 bytes: blocks of 32 KiB of parts
    with a checksum, a length and a kind: whole (1), first (2), middle (3) or last (4). A kill may cut it.
    """
    at, piece = 7, b""
    while at + 7 <= len(content):
        room = -at % 32768 or 32768
        length, kind = int.from_bytes(content[at + 4:at + 6], "little"), content[at + 6]
        if room < 7 or not kind:  # the rest of a block is empty
            at += room
            continue
        piece += content[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(content):
            yield piece
            piece = b""


def sent(out: Path) -> list[tuple[str, dict, dict[int, dict], bool]]:
    """Of each start: the id of its run, its settings, the values by step, and whether it has ended."""
    from wandb.proto.wandb_internal_pb2 import Record
    found = []
    # by the time of their start, because wandb's own process outlives a start that was killed
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        name, settings, rows, ended = "", {}, {}, False
        for piece in pieces_of(path.read_bytes()):
            record = Record()
            record.ParseFromString(piece)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name = record.run.run_id
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if kind == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                       for item in record.history.item}
                assert row["_step"] not in rows
                rows[row["_step"]] = {k: v for k, v in row.items() if not k.startswith(TIMES)}
            ended = ended or kind == "exit"
        found.append((name, settings, rows, ended))
    return found


def logged(out: Path) -> dict[int, dict]:
    """The values in metrics.jsonl by step, those of an evaluation with those of its step."""
    rows = {}
    for record in monitor.read_metrics(out):
        rows[record["step"]] = rows.get(record["step"], {}) | {
            k: v for k, v in record.items() if not k.startswith(TIMES)}
    return rows


def test_each_record_arrives_once_with_its_step_and_the_settings(wandb, shards, tmp_path):
    done = forked(TRAINER, shards, tmp_path / "run", wandb=True)
    assert done.code == 0, done.out
    (name, settings, rows, ended), = sent(tmp_path / "run")
    assert rows == logged(tmp_path / "run") and rows.keys() == {*range(1, 13)} and ended
    assert name.startswith("run-") and settings["lr"] == 1e-3 and settings["trainer"] == "train_gpt2.py"
    assert {step for step, row in rows.items() if "val_loss" in row} == {6, 12}


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_under_its_id_and_sends_all_again(ranks, wandb, shards, tmp_path):
    out = tmp_path / "run"
    TRAINER.kill_after(6, ranks, shards, out, wandb=True)
    done = TRAINER.train(ranks, shards, out)  # --wandb is a flag of the run
    assert done.code == 0, done.out
    *killed, (name, _, rows, ended) = sent(out)
    assert ended and rows == logged(out) and rows.keys() == {*range(1, 13)}
    more = forked(TRAINER, shards, out, steps=14)
    assert more.code == 0, more.out
    *_, (same, _, longer, ended) = sent(out)
    assert ended and same == name and longer == logged(out) and longer.keys() == {*range(1, 15)}
    assert {step: longer[step] for step in rows if step < 12} == {k: v for k, v in rows.items() if k < 12}
    timed = ("time", "tokens_per_sec", "mfu", "mem_gb")
    for given, _, before, _ in killed:  # what it had flushed; steps after the checkpoint were done again
        assert given in ("", name)
        for step, row in before.items():
            ours = {k: v for k, v in rows[step].items() if k not in timed}
            assert {k: v for k, v in row.items() if k not in timed}.items() <= ours.items(), step
    off = forked(TRAINER, shards, out, no_wandb=True, steps=16)
    assert off.code == 0 and len(sent(out)) == len(killed) + 2, off.out


def test_ctrl_c_leaves_a_run_that_has_ended(wandb, shards, tmp_path):
    out = tmp_path / "stopped"
    flags = TRAINER.flags(shards, out, steps=4000, save_every=1000, eval_every=1000)
    living = start([sys.executable, "train_gpt2.py", *flags, "--wandb"], cwd=ROOT)
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert living.poll() is None
        time.sleep(0.05)
    os.kill(living.pid, signal.SIGINT)
    assert finish(living, 120).code == 0
    (_, _, rows, ended), = sent(out)
    assert ended and rows == logged(out)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_an_error_leaves_a_run_that_has_ended(ranks, wandb, shards, tmp_path):
    path = tmp_path / "train_broken.py"
    text = (ROOT / "train_gpt2.py").read_text()
    path.write_text(text.replace("        lr = learning", "        assert step < 7\n        lr = learning"))
    broken = forked(Trainer(str(path), **FLAGS), shards, tmp_path / "broken", ranks, wandb=True)
    assert broken.code == 1 and "AssertionError" in broken.out, broken.out
    (_, _, rows, ended), = sent(tmp_path / "broken")
    assert ended and rows == logged(tmp_path / "broken") and rows.keys() == {*range(1, 8)}


def test_two_runs_of_one_process_are_two(wandb, shards, tmp_path):
    path = tmp_path / "two.py"
    both = [TRAINER.flags(shards, tmp_path / name, seed=seed, wandb=True) for seed, name in enumerate("ab")]
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt2\n"
                    f"for flags in {both!r}:\n    train_gpt2.main(flags)\n")
    done = finish(start([sys.executable, path], cwd=tmp_path), 120)
    assert done.code == 0, done.out
    names = set()
    for name in "ab":
        (given, settings, rows, ended), = sent(tmp_path / name)
        assert ended and rows == logged(tmp_path / name) and settings["seed"] == "ab".index(name)
        names.add(given)
    assert len(names) == 2


FAKE = {"import": "raise TypeError('Descriptors cannot be created directly')",
        "init": "Settings = dict\ndef init(**_):\n    raise OSError('no network')",
        "log": "from types import SimpleNamespace\nSettings = dict\n"
               "def log(*_, **__):\n    raise ValueError('odd')\n"
               "def init(**_):\n    return SimpleNamespace(log=log, finish=log)"}


@pytest.mark.parametrize("when, said", [
    ("import", "nothing is sent to Weights & Biases: TypeError: Descriptors"),
    ("init", "nothing is sent to Weights & Biases: OSError: no network"),
    ("log", "WandbRun fails (ValueError: odd)")])
def test_nothing_that_wandb_raises_ends_a_run(when, said, shards, tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "wandb.py").write_text(FAKE[when])
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setitem(sys.modules, "wandb", None)  # afterwards it is as before
    del sys.modules["wandb"]
    done = TRAINER.train(0, shards, tmp_path / "run", wandb=True)
    assert done.code == 0 and said in done.out and "training complete" in done.out, done.out


def test_without_the_package_it_is_refused_in_one_sentence(shards, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = TRAINER.train(0, shards, tmp_path / "run", wandb=True)
    said = "error: --wandb needs the package wandb: pip install wandb, or give --no-wandb."
    assert done.code == 2 and said in done.out and not (tmp_path / "run").exists(), done.out
