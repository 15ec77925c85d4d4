"""Prompts and responses for tests: how to write, prepare and find them in the rows, and models for them."""

import functools
import random

import numpy as np
import pytest
from shard_files import prepared, write_rows
from tiny_models import gpt2, hrm

import data

START, RESPONSE = 256, 258
ROLES = {"start": START, "response": RESPONSE, "end": -1}
MESSAGES = {"prompt_field": "messages", "response_field": "messages"}

# Models that answer
T = 48
IDS = {"vocab_size": 262, "padded_vocab": 320, "seq_len": T, **ROLES}
gpt2, hrm = functools.partial(gpt2, **IDS), functools.partial(hrm, n_layer=1, **IDS)
CYCLES = {"h_cycles": 5, "least_cycles": 1, "l_cycles": 1, "inject_input": True, "init": "published"}


def samples(n: int, seed: int = 0, longest: int = 20) -> list[dict]:
    """Some of them are too long for a row of 128 tokens."""
    some = random.Random(seed)
    words = ["one", "two", "three", "yes", "no", "ñandú", "\n", "x = 1"]
    return [{"q": f"{i} " + " ".join(some.choices(words, k=some.randint(0, longest) + 40 * (i % 99 == 0))),
             "a": " ".join(some.choices(words, k=some.randint(1, longest)))} for i in range(n)]


def write(path, rows: list[dict]) -> str:
    return write_rows(path, *rows)


def prepare(source, out, tokenizer="bytes", **options):
    usual = {"prompt_field": "q", "response_field": "a", "row": 128, "val_split": "hash:0.1"}
    return prepared(source, out, tokenizer, **usual | options)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    return prepare(write(root / "some.jsonl", samples(2000)), root / "pairs")


def split_rows(out, split: str) -> list:
    dataset = data.Dataset([out], data.read_manifest(out)["row"])
    sets = [dataset.train] if split == "train" else dataset.val.values()
    return [row for shards in sets for _, x, _ in shards.grids for row in x]


def documents(out, *splits: str) -> list[list[int]]:
    """The documents in all rows, sorted, without padding."""
    found = []
    for row in (row for split in splits or ("train", "val") for row in split_rows(out, split)):
        assert row[0] == START
        found += np.split(row, np.flatnonzero(row == START)[1:])
    return sorted(document.tolist() for document in found if len(document) > 1)


def encoded(prompt: str, response: str) -> list[int]:
    return [START, *prompt.encode(), RESPONSE, *response.encode()]
