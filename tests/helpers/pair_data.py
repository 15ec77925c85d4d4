"""Prompts and responses for tests: how to write them, prepare them and find them in the rows."""

import random

import numpy as np
import pytest
from shard_files import prepared, write_rows

import data

START, RESPONSE = 256, 258
ROLES = {"start": START, "response": RESPONSE, "end": -1}
MESSAGES = {"prompt_field": "messages", "response_field": "messages"}


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
