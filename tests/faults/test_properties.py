"""Properties that hold for any input, with inputs that hypothesis makes up and shrinks: the shard reader, the
manifest parser, the order of samples, and masking."""

import contextlib
import itertools
import json
import shutil
from pathlib import Path

import conftest
import numpy as np
import pytest

from cli.errors import UserError

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import data
from prepare import command, packing, pipeline
from prepare.command import verify
from prepare.pipeline import prepare
from vocab.tokenizer import load_tokenizer

settings.register_profile("faults", deadline=None, max_examples=300 if conftest.LONG else 50,
                          suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("faults")
BYTES = load_tokenizer("bytes")


# -----------------------------------------------------------------------------------------------------------
# Shards


@given(st.binary(max_size=3000))
def test_any_bytes_are_a_shard_or_refused(tmp_path, content):
    check_shard(tmp_path / "any.bin", content)


@given(st.sampled_from(["uint16", "uint32"]), st.integers(0, 2000), st.integers(-(2**31), 2**31 - 1),
       st.binary(max_size=40))
def test_a_header_that_lies_is_refused(tmp_path, dtype, real, claimed, more):
    header = np.zeros(256, "<i4")
    header[:3] = *data.FORMATS[dtype], claimed
    check_shard(tmp_path / "lies.bin", header.tobytes() + bytes(real) + more)


def check_shard(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        tokens = data.open_shard(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert data.HEADER_BYTES + tokens.nbytes == len(content)
        assert tokens.tobytes() == content[data.HEADER_BYTES:]


@given(st.data(), st.sampled_from(["uint16", "uint32"]))
def test_what_is_written_is_read_in_rows(tmp_path, draw, dtype):
    """Any shards, any length of a row, any choice of rows: x is the row, y the same one token on."""
    sizes = draw.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    seq_len = draw.draw(st.integers(1, 40))
    streams = [draw.draw(arrays.arrays(dtype, size)) for size in sizes]
    paths = [tmp_path / f"train_{i:06d}.bin" for i in range(len(sizes))]
    for path, stream in zip(paths, streams):
        packing.write_shard(path, [stream], dtype)
    shards = data.Shards(paths, seq_len)
    expected = [(s[i:i + seq_len], s[i + 1:i + 1 + seq_len]) for s in streams
                for i in range(0, len(s) - seq_len, seq_len)]
    assert shards.rows == len(expected) and shards.num_tokens == sum(sizes)
    if expected:
        any_row = st.integers(0, shards.rows - 1)
        rows = np.sort(draw.draw(arrays.arrays(np.int64, st.integers(1, 8), elements=any_row)))
        x, y = np.empty((2, len(rows), seq_len), dtype)
        shards.take(rows, x, y)
        for i, row in enumerate(rows):
            assert (x[i] == expected[row][0]).all() and (y[i] == expected[row][1]).all()


# -----------------------------------------------------------------------------------------------------------
# The manifest

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda inner: (st.lists(inner, max_size=3)
                                   | st.dictionaries(st.text(max_size=8), inner, max_size=3)),
                    max_leaves=8)
SHARD = {"split": "train", "file": "train_000000.bin", "tokens": 5, "documents": 1, "sha256": "0",
         "end": [1, 0]}
MANIFEST = {"format": 1, "dataset": "text:x", "settings": {}, "complete": True, "dtype": "uint16",
            "shards": [SHARD], "tokenizer": {"name": "bytes", "sha256": "0", "vocab_size": 257, "eot": 256,
                                             "mask": 257}}


def parse(directory: Path, content: bytes) -> dict | None:
    """The manifest if it is accepted, and then nothing in it leads elsewhere."""
    (directory / "manifest.json").write_bytes(content)
    try:
        manifest = data.read_manifest(directory)
    except UserError as error:
        assert "manifest.json is damaged" in str(error) and "\n" not in str(error)
        return None
    for shard in manifest["shards"]:
        path = directory / shard["file"]
        assert path.resolve().parent == directory.resolve() and path.suffix == ".bin"
        assert shard["split"] in ("train", "val") and isinstance(shard["tokens"], int)
    return manifest


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_file_is_a_manifest_or_refused(tmp_path, content):
    assert parse(tmp_path, content) is None


@given(st.sampled_from([(), ("tokenizer",), ("settings",), ("shards", 0)]), st.data(), JSON)
def test_any_value_in_any_field(shards, tmp_path_factory, where, draw, value):
    """With a checksum that is right. It is read, or refused in one sentence, by whatever reads manifests."""
    directory = tmp_path_factory.getbasetemp() / "any-value"
    shutil.copytree(shards, directory, dirs_exist_ok=True)
    manifest = json.loads((directory / "manifest.json").read_text())
    part = manifest
    for key in where:
        part = part[key]
    key = draw.draw(st.sampled_from(sorted(part)))
    if draw.draw(st.booleans()):
        part[key] = value
    else:
        del part[key]
    content = json.dumps(manifest | {"checksum": data.manifest_digest(manifest)})
    if parse(directory, content.encode()):
        for use in (lambda: data.Dataset([directory], 8), lambda: verify(directory),
                    lambda: command.info(directory, None),
                    lambda: prepare(manifest["dataset"], directory, "bytes", workers=1),
                    lambda: pipeline.locate(manifest["dataset"], "bytes", 1000, 0)):
            with contextlib.suppress(UserError), contextlib.chdir(directory.parent):
                use()


@given(st.text(st.sampled_from("./\\~ trainvl_0123456789bi\0\n"), max_size=30)
       | st.sampled_from(["../train_000000.bin", "/train_000000.bin", "train_000000.bin/../../x",
                          "train_0000000.bin", "train_000000.bin\n", "TRAIN_000000.bin",
                          "train_00000\u0661.bin"]))
def test_no_name_of_a_shard_leads_elsewhere(tmp_path, name):
    manifest = MANIFEST | {"shards": [SHARD | {"file": name}]}
    found = parse(tmp_path, json.dumps(manifest).encode())
    assert found is None or name.isascii() and name.startswith("train_") and len(name) == 16


# -----------------------------------------------------------------------------------------------------------
# Order and masks


@given(st.integers(1, 5000), st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_permute_is_a_permutation(n, seed, epoch):
    rows = data.permute(np.arange(n), n, seed, epoch)
    assert rows.dtype == np.int64 and (np.sort(rows) == np.arange(n)).all()


@given(st.integers(1, 2**40), st.integers(0, 2**31), st.integers(0, 1000), st.data())
def test_permute_stays_inside_however_large(n, seed, epoch, draw):
    index = np.array(draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=min(n, 20), unique=True)))
    rows = data.permute(index, n, seed, epoch)
    assert ((rows >= 0) & (rows < n)).all() and len(np.unique(rows)) == len(rows)


@given(st.integers(1, 50), st.integers(0, 10**9), st.integers(1, 60), st.integers(0, 2**31),
       st.lists(st.integers(0, 60), max_size=5))
def test_any_way_to_ask_gives_the_same_order(rows, position, count, seed, cuts):
    """What a resumed run, or one on other ranks, asks for in other portions."""
    whole = data.shuffled(np.arange(position, position + count), rows, seed)
    edges = sorted({0, count, *(c for c in cuts if c < count)})
    parts = [data.shuffled(np.arange(position + a, position + b), rows, seed)
             for a, b in itertools.pairwise(edges)]
    assert (np.concatenate(parts) == whole).all()
    begin = -position % rows  # a whole epoch inside
    if begin + rows <= count:
        assert sorted(whole[begin:begin + rows]) == list(range(rows))


@given(st.data(), st.integers(1, 60), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_masks(draw, seq_len, rate, seed):
    """Each row has its own masks, whatever else is in the batch; special ids are never masked; what is not
    picked stays; labels are the old ids."""
    masker = data.Masker(BYTES, seq_len, rate, seed)
    batch = draw.draw(st.integers(1, 4))
    old = draw.draw(arrays.arrays(np.uint16, (batch, seq_len), elements=st.integers(0, 256)))
    rows = draw.draw(arrays.arrays(np.int64, batch, elements=st.integers(0, 2**40)))
    epochs = draw.draw(arrays.arrays(np.int64, batch, elements=st.integers(0, 1000)))
    x = old.copy()
    positions, labels = masker(x, rows, epochs)
    assert positions.shape == labels.shape == (batch, masker.k) and 1 <= masker.k <= seq_len
    for i in range(batch):
        picked = positions[i]
        assert (np.diff(picked) > 0).all()
        ordinary = old[i, picked] != 256
        assert (labels[i] == np.where(ordinary, old[i, picked].astype(np.int64), -1)).all()
        assert ordinary.sum() == min(masker.k, (old[i] != 256).sum())
        untouched = np.ones(seq_len, bool)
        untouched[picked[ordinary]] = False
        assert (x[i, untouched] == old[i, untouched]).all() and (x[i] <= 257).all()
        alone = old[i:i + 1].copy()
        again, _ = masker(alone, rows[i:i + 1], epochs[i:i + 1])
        assert (alone[0] == x[i]).all() and (again[0] == picked).all()
