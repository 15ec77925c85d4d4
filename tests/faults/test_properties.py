"""Properties that hold for any input. Hypothesis makes up the inputs and shrinks the ones that fail."""

import contextlib
import json
import shutil

import numpy as np
import pytest

from cli.errors import UserError

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import data
from prepare import command, packing, pipeline

DTYPES = st.sampled_from(sorted(data.FORMATS))


def pytest_generate_tests(metafunc):
    """The tier decides on the number of examples."""
    option = metafunc.config.getoption
    examples = 300 if option("long") else 50 if option("full") else 5
    allowed = [HealthCheck.function_scoped_fixture]
    settings(deadline=None, max_examples=examples, suppress_health_check=allowed)(metafunc.function)


def lying(dtype, claimed, more) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = *data.FORMATS[dtype], claimed
    return header.tobytes() + more


@given(st.binary(max_size=3000)
       | st.builds(lying, DTYPES, st.integers(-(2**31), 2**31 - 1) | st.integers(0, 20),
                   st.binary(max_size=40)))
def test_any_bytes_are_a_shard_or_refused(tmp_path, content):
    path = tmp_path / "any.bin"
    path.write_bytes(content)
    try:
        tokens = data.open_shard(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert data.HEADER_BYTES + tokens.nbytes == len(content)
        assert tokens.tobytes() == content[data.HEADER_BYTES:]


@given(st.data(), DTYPES, st.integers(1, 40))
def test_what_is_written_is_read_in_rows(tmp_path, draw, dtype, seq_len):
    """Any shards, any length of a row, any choice of rows: x is the row, y the same one token on."""
    streams = draw.draw(st.lists(arrays.arrays(dtype, st.integers(1, 300)), min_size=1, max_size=4))
    paths = [tmp_path / f"train_{i:06d}.bin" for i in range(len(streams))]
    for path, stream in zip(paths, streams):
        packing.write_shard(path, [stream], dtype)
    shards = data.Shards(paths, seq_len)
    expected = [s[i:i + seq_len + 1] for s in streams for i in range(0, len(s) - seq_len, seq_len)]
    assert shards.rows == len(expected) and shards.num_tokens == sum(map(len, streams))
    if expected:
        any_rows = st.lists(st.integers(0, shards.rows - 1), min_size=1, max_size=8)
        rows = np.array(sorted(draw.draw(any_rows)))
        x, y = np.empty((2, len(rows), seq_len), dtype)
        shards.take(rows, x, y)
        for i, row in enumerate(rows):
            assert (x[i] == expected[row][:-1]).all() and (y[i] == expected[row][1:]).all()


TEXT = st.text("a1./\\\0\n\u0661", max_size=8)  # all of Unicode takes seconds to list
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
                    max_leaves=8)


def parse(directory, content: bytes) -> dict | None:
    """The manifest if it is accepted. Then nothing in it leads elsewhere."""
    (directory / "manifest.json").write_bytes(content)
    try:
        manifest = data.read_manifest(directory)
    except UserError as error:
        assert "manifest.json" in str(error) and "\n" not in str(error)
        return None
    for shard in manifest["shards"]:
        path = directory / shard["file"]
        assert path.resolve().parent == directory.resolve() and path.suffix == ".bin"
        assert shard["split"] in ("train", "val") and isinstance(shard["tokens"], int)
    return manifest


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_manifest_of_anything_is_refused(tmp_path, content):
    assert parse(tmp_path, content) is None


@given(st.sampled_from([(), ("tokenizer",), ("settings",), ("shards", 0)]), st.data(), JSON)
def test_any_value_in_any_field_is_read_or_refused(shards, tmp_path_factory, where, draw, value):
    """With a right checksum, by all that read manifests."""
    directory = tmp_path_factory.getbasetemp() / "any-value"
    shutil.copytree(shards, directory, dirs_exist_ok=True)
    manifest = part = json.loads((directory / "manifest.json").read_text())
    for key in where:
        part = part[key]
    key = draw.draw(st.sampled_from(sorted(part)))
    if draw.draw(st.booleans()):
        part[key] = value
    else:
        del part[key]
    manifest |= {"checksum": data.manifest_digest(manifest)}
    if parse(directory, json.dumps(manifest).encode()):
        for use, *arguments in (
                (data.Dataset, [directory], 8), (command.verify, directory), (command.info, directory, None),
                (pipeline.prepare, manifest["dataset"], directory, "bytes"),
                (pipeline.locate, manifest["dataset"], "bytes", 1000, 0)):
            with contextlib.suppress(UserError), contextlib.chdir(directory.parent):
                use(*arguments)


@given(st.integers(1, 5000), st.integers(1, 2**40), st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_permute_is_a_permutation(n, many, seed, epoch):
    rows = data.permute(np.arange(n), n, seed, epoch)
    assert rows.dtype == np.int64 and (np.sort(rows) == np.arange(n)).all()
    rows = data.permute(np.unique(np.linspace(0, many - 1, 20).astype(np.int64)), many, seed, epoch)
    assert ((rows >= 0) & (rows < many)).all() and len(np.unique(rows)) == len(rows)
