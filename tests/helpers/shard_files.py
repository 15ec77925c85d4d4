"""Directories of shards, and the files that they are made from: written, read back and compared."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import data
from cli.errors import UserError
from prepare import packing, pipeline, sources
from vocab.tokenizer import parse_tokenizer_json


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory with its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*")
            if path.is_file()}


def bins(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.bin")}


def ids_of(directory: Path, split: str) -> list[int]:
    """Read as llm.c does."""
    ids = []
    for path in sorted(directory.glob(f"{split}_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        magic, version, count = header[:3].tolist()
        width = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[magic, version]
        tokens = np.fromfile(path, width, offset=1024).tolist()
        assert len(tokens) == count and not header[3:].any()
        ids += tokens
    return ids


def documents_of(directory: Path, split: str = "train") -> list[str]:
    """The documents of a split as text; each begins with end-of-text."""
    tokenizer = parse_tokenizer_json("recorded", (directory / "tokenizer.json").read_text())
    ids = ids_of(directory, split)
    begins = [n for n, i in enumerate(ids) if i == tokenizer.eot]
    return [tokenizer.decode(ids[a + 1:b]) for a, b in itertools.pairwise([*begins, len(ids)])]


def write_rows(path, *rows: dict) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def write_texts(path, texts) -> str:
    return write_rows(path, *({"text": text} for text in texts))


def write_table(path, **columns) -> str:
    import pyarrow
    from pyarrow import parquet
    parquet.write_table(pyarrow.table(columns), path)
    return f"parquet:{path}"


def texts_of(dataset: str, start: int = 0, **options) -> list:
    """The documents of a source, by default not held out: texts, or tuples of the fields of pairs."""
    source = sources.Source(dataset, pipeline.settings_of(dataset, **{"val_split": "hash:0.1"} | options))
    return [document if isinstance(document, tuple) else "".join(document)
            for document, _, _ in source.documents(start)]


def prepared(dataset: str, out, tokenizer: str = "bytes", **options) -> Path:
    return pipeline.prepare(dataset, Path(out), tokenizer, **{"workers": 1} | options)


def refused(dataset: str, out="out", **options) -> str:
    with pytest.raises(UserError) as error:
        prepared(dataset, out, **options)
    return str(error.value)


def stopped_after(writes: int, *arguments, **options) -> dict:
    """A prepare that is stopped after so many writes of shards. Returns its manifest."""
    write, left = packing.ShardWriter._write, iter(range(writes))

    def counted(*given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(*given)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing.ShardWriter, "_write", counted)
        prepared(*arguments, **options)
    manifest = data.read_manifest(Path(arguments[1]))
    assert manifest["shards"] and not manifest["complete"]
    return manifest
