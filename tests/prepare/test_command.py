"""prepare/command.py: info, verify and peek, and what the commands refuse."""

import argparse
import sys

import numpy as np
import pytest
from conftest import ROOT, finish, start
from shard_files import prepared, write_rows

import data
from prepare import command


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs `python data.py …` in this process, and returns what it has printed."""
    def run(*words) -> str:
        monkeypatch.setattr("sys.argv", ["data.py", *map(str, words)])
        capsys.readouterr()
        command.main()
        return capsys.readouterr().out
    return run


def test_info(corpus, shards, call):
    dataset = data.Dataset([shards], 1)
    found = call("info", shards)
    train, val = dataset.train.num_tokens, dataset.val[""].num_tokens
    assert train + val == corpus.stat().st_size + 2
    for part in (f"{corpus}: {train:,} training and {val:,} validation", " 2 documents", "val_split tail:0.1",
                 f"{data.unigram_entropy([dataset.train]):.4f} nats", "bytes, 257 ids", " 256, [MASK] is 257",
                 f": {dataset.fingerprint}"):
        assert part in found


def test_verify_names_every_shard(shards, call):
    names = sorted(path.name for path in shards.glob("*.bin"))
    *lines, last = sorted(call("verify", shards).splitlines(), key=lambda line: line.startswith("/"))
    assert [line.partition(":")[0] for line in lines] == names and last == f"{shards}: OK"


@pytest.mark.parametrize("split", ["train", "val"])
def test_peek_shows_the_same_rows_each_time(shards, call, split):
    rows = command.splits_of(data.Dataset([shards], 96))[split]
    expected = "".join(f"--- {split} row {row}\n{rows.tokenizer.decode(rows.grids[0][1][row])}\n"
                       for row in sorted(data.shuffled(np.arange(3), rows.rows, 0)))
    assert call("peek", shards, "--split", split, "--seq-len", 96) == expected


def test_a_set_of_pairs_has_its_own_length_of_rows(tmp_path, call):
    rows = [{"q": f"{n}", "a": "yes", "kind": "x"} for n in range(300)]
    out = prepared(write_rows(tmp_path / "x.jsonl", *rows), tmp_path / "out", row=40, prompt_field="q",
                   response_field="a", val_field="kind", val_split="hash:0.3")
    assert "rows of 40" in call("info", out)
    assert call("peek", out, "--split", "val_x", "--rows", 1).startswith("--- val_x row ")


def test_a_pipe_that_closes_is_no_error(shards):
    line = f"set -o pipefail; {sys.executable} {ROOT}/data.py peek {shards} --rows 2000 | head -n 1"
    result = finish(start(["bash", "-c", line]))
    assert result.code == 0 and len(result.out.splitlines()) == 1, result.out


def test_fractions_of_a_split():
    for text in "hash:0.01", "tail:0.5", "hash:1":
        assert command.parse_val_split(text) == text
    for text in "tail:1", "hash:2", "hash:.5", "hash:0.", "ahash:0.5":
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            command.parse_val_split(text)
