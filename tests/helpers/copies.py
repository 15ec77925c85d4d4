"""Copies of a trainer with changes, as a user makes them, and what --eval-only prints."""

import functools
import json
import re

import pytest
from conftest import ROOT, Finished
from runs import Trainer, evaluations_of

FLAGS = {"steps": 8, "save_every": 4, "eval_every": 4, "max_new_tokens": 2, "batch": 3, "eval_batches": 1}
USE = "if uses_model(run.args):"  # places in a trainer
MARK = "if log.evaluation("


def changed(path, *changes: tuple[str, str], script: str = "train_gpt2.py") -> Trainer:
    """A copy of a trainer. Of each change, the first text is put before the line that begins with the second.
    A first text that begins with "=" replaces that line.
    """
    text = (ROOT / script).read_text()
    for new, anchor in changes:
        at, = re.finditer(rf"^( *){re.escape(anchor)}.*\n", text, re.M)
        lines = "".join(f"{at[1]}{line}\n".replace(f"{at[1]}\n", "\n")
                        for line in new.removeprefix("=").splitlines())
        text = text[:at.start()] + lines + ("" if new.startswith("=") else at[0]) + text[at.end():]
    path.write_text(text)
    return Trainer(str(path), **FLAGS)


def ranks_of(trainer: Trainer, ranks: int):
    """A function that trains: in this process, or in forked ones."""
    return functools.partial(trainer.fork if ranks else trainer.train, ranks)


def guide_blocks(item: str) -> list[str]:
    """The pieces of code of a section of docs/changing.md."""
    guide = (ROOT / "docs" / "changing.md").read_text()
    text = re.search(rf"^##+ {item}.*?(?=^##)", guide, re.M | re.S)[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def result(done: Finished) -> dict:
    """What --eval-only has found."""
    assert done.code == 0, done.out
    return json.loads([line for line in done.out.splitlines() if line.startswith('{"step"')][-1])


def assert_as_logged(found: dict, out) -> None:
    logged = evaluations_of(out)[-1]
    for key in (key for key in logged if key.startswith("val_")):
        assert found[key] == pytest.approx(logged[key], abs=1e-5), key
