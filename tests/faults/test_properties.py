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

import data
from prepare import command, pipeline

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
