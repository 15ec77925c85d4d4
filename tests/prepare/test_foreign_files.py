"""Files that are no text, and paths without a prefix. The message names a command that works."""

import bz2
import gzip
import io
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from cli.errors import UserError
from prepare.pipeline import locate, prepare
from prepare.sources import Source, find_source

TEXT = "the cat sat on the mat\n" * 50


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def archive(kind) -> bytes:
    content = io.BytesIO()
    if kind is zipfile:
        with zipfile.ZipFile(content, "w") as file:
            file.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=content, mode="w") as file:
            file.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return content.getvalue()


@pytest.mark.parametrize("name, content, named", [
    ("report.docx", archive(zipfile), "zip"), ("texts.tar", archive(tarfile), "tar xf"),
    ("texts.tar.gz", gzip.compress(archive(tarfile)), "tar xf"),
    ("texts.tar.bz2", bz2.compress(archive(tarfile)), "tar xf"), ("a.7z", b"7z\xbc\xaf\x27\x1c", "unpack"),
    ("paper.pdf", b"%PDF-1.4\nof letters alone", "pdftotext"), ("a.parquet", b"PAR1\x15\x04", "parquet:"),
    ("old.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "document"),
    ("a.zst", b"\x28\xb5\x2f\xfd\x04\x00", "zstd -d"),
    ("letter.rtf", b"{\\rtf1\\ansi plain letters}", "document")],
    ids=lambda value: value if isinstance(value, str) else "")  # archives have the time in them
def test_what_is_no_text_is_named(name, content, named):
    """And not offered iconv, nor learned where it happens to be UTF-8."""
    Path(name).write_bytes(content)
    for dataset in (f"text:{name}", f"jsonl:{name}", name):
        with pytest.raises(UserError, match=f"^{name} .*{named}"):
            prepare(dataset, "shards", "bytes", workers=1)


@pytest.mark.parametrize("content", ["PK and other names\n", "%PDX\n", "x" * 257 + "ustas", "", "7z\n",
                                     "Rar! cried a bear\n", "%PDF\n"])
def test_texts_that_look_a_little_like_those_are_read(content):
    Path("some.txt").write_text(content + TEXT)
    found = Source("text:some.txt", {"val_split": "hash:0.1", "text_field": "text"}).documents(0)
    assert ["".join(texts) for texts, _, _ in found] == [content + TEXT]


@pytest.mark.parametrize("name, source", [("sub/book.txt", "text"), ("./book.txt", "text"),
                                          ("book.txt", "text"), ("sub/rows.jsonl", "jsonl"),
                                          ("rows.json", "jsonl"), ("ROWS.CSV", "csv"), ("a.tsv", "tsv")])
def test_a_file_without_a_prefix(name, source):
    """Also one with a slash in its name, which for a trainer was a directory."""
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    content = {"text": TEXT, "jsonl": '{"text": "a"}\n' * 99}
    path.write_text(content.get(source, "text\n" + "".join(f"row {n}\n" for n in range(99))))
    for ask in (find_source, lambda data: locate(data, "bytes", 1000, 0, print, 64)):
        with pytest.raises(UserError, match=f"'{source}:{name}'") as problem:
            ask(name)
    named = re.search(r"'(.*?)'", str(problem.value))[1]
    assert prepare(named, "shards", "bytes", workers=1).is_dir()


def test_a_source_that_is_elsewhere():
    """As for a run that was copied without its data: its shards do."""
    Path("notes.txt").write_text(TEXT)
    there = locate("text:notes.txt", "bytes", 1000, 0, print, 64)
    shutil.move(there, "elsewhere")
    Path("notes.txt").unlink()
    with pytest.raises(UserError, match="'notes.txt'.* shards/"):
        locate("text:notes.txt", "bytes", 1000, 0, print, 64)
    shutil.move("elsewhere", there)
    assert locate("text:notes.txt", "bytes", 1000, 0, print, 64) == there
