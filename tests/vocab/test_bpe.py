"""vocab/bpe.py: long texts, and what is cut for training."""

import pytest

from vocab import bpe


@pytest.mark.parametrize("part", [" ", "a", " \n"])
def test_a_million_of_anything(corpus, part):
    trained = bpe.train_bpe([corpus.read_text(encoding="utf-8")], 700)
    text = part * (1_000_000 // len(part))
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("unit", ["a", " "])
def test_long_runs_are_cut_for_training(unit):
    long, usual = "x " + unit * 100_000 + " y", f"{unit * 500} y " * 99
    *cut, last = bpe.short_runs([long, usual])
    assert max(map(len, cut)) == bpe.LONGEST_RUN and "".join(cut) == long and last == usual
