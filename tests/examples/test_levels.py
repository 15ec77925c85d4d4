"""examples/levels.py: the share of exact matches by level and number of cycles."""

import argparse
import re

import levels
import pytest
import torch
from processes import fork
from runs import Trainer, evaluations_of
from shard_files import prepared, write_rows

import data


def test_the_table_has_the_exact_matches_of_the_evaluation(tmp_path):
    """In the column of the cycles of the evaluation."""
    rows = ({"q": f"{n}", "a": "13"[n % 3 == 0 and n % 2], "of": f"{'un' * (n % 2)}trained-{n % 2}"}
            for n in range(300))
    shards = prepared(write_rows(tmp_path / "x.jsonl", *rows), tmp_path / "shards", prompt_field="q",
                      response_field="a", val_field="of", row=32, val_split="hash:0.3")
    hrm = Trainer("train_hrm.py", steps=20, ff=64, lr=1e-2, eval_batches=0, l_cycles=1, bp_cycles=1,
                  inject_input=True, max_new_tokens=1)
    assert hrm.train(0, shards, tmp_path / "run", h_cycles="1:2").code == 0
    done = fork(2, "examples/levels.py", tmp_path / "run")
    assert done.code == 0 and done.out.count("by cycles (at most 2") == 1, done.out
    assert ("pip install matplotlib" in done.out) != (tmp_path / "run" / "levels.png").exists()
    for name in ("trained-0", "untrained-1"):
        row, = re.findall(rf"^{name} +(.*)$", done.out, re.M)
        *shares, last = map(float, row.split())  # after 1, 2, 3 and 4 cycles
        expected = evaluations_of(tmp_path / "run")[-1][f"val_exact/{name}"]
        assert len(shares) == 3 and 10 < last == pytest.approx(100 * expected, abs=0.051)


def test_levels_are_counted_after_each_cycle(monkeypatch):
    """A model that answers a sample once it has run as many cycles as the sample says."""
    model = argparse.Namespace(
        high_level_states=lambda x, most: (torch.full_like(x, n) for n in range(1, most + 1)),
        loss=lambda z, x, y: (None, {"exact": (z >= x).sum(), "samples": torch.tensor(x.numel())}))
    batches = [(torch.tensor([[n], [m]]), None) for n, m in ((1, 3), (2, 9))]
    monkeypatch.setattr(data, "validation_batches", lambda *_: batches)
    monkeypatch.setattr(levels.ddp, "reduce_sum", lambda values, world: [2 * v.item() for v in values])
    found = levels.by_cycles(model, None, 4, argparse.Namespace(device="cpu"))
    assert found == [0.25, 0.5, 0.75, 0.75]
    found = {"trained-1": [0.5, 1.0], "trained-2": [0.25, 0.5], "untrained-3": [0.0, 0.125]}
    assert [*levels.means(found).values()] == [[0.375, 0.75], [0.0, 0.125]]
