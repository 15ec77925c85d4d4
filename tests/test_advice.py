"""Advice that is followed as it stands: of a file, of a source that is missing, of other flags."""

import bz2
import gzip
import io
import re
import shutil
import tarfile
import zipfile

import pytest
from conftest import ROOT

import train_gpt2
from cli.errors import UserError
from prepare.pipeline import locate, prepare
from prepare.sources import Source, find_source
from startup.resume import compare_with_saved, shape_from_record
from weights.use import MODES

TEXT = "the cat sat on the mat\n" * 50


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(dataset: str) -> str:
    with pytest.raises(UserError) as problem:
        prepare(dataset, "shards", "bytes", workers=1)
    return str(problem.value)


def archive(kind) -> bytes:
    content = io.BytesIO()
    if kind is zipfile:
        with zipfile.ZipFile(content, "w") as file:
            file.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=content, mode="w") as file:
            file.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return content.getvalue()


@pytest.mark.parametrize("name, content, words", [
    ("report.docx", archive(zipfile), "is a zip archive, like .docx, .xlsx and .epub: save "),
    ("texts.tar", archive(tarfile), "is an archive: unpack it, for example with tar xf"),
    ("texts.tar.gz", gzip.compress(archive(tarfile)), "is an archive: unpack it, for example with tar xf"),
    ("texts.tar.bz2", bz2.compress(archive(tarfile)), "is an archive: unpack it, for example with tar xf"),
    ("texts.7z", b"7z\xbc\xaf\x27\x1c", "is an archive: unpack it"),
    ("paper.pdf", b"%PDF-1.4\nof letters alone", "is a PDF: convert it to text, for example with pdftotext"),
    ("table.parquet", b"PAR1\x15\x04", "is a parquet file: put parquet: before its name"),
    ("old.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is a document: save it as plain text"),
    ("letter.rtf", b"{\\rtf1\\ansi plain letters}", "is a document: save it as plain text"),
    ("packed.txt.zst", b"\x28\xb5\x2f\xfd\x04\x00", "is compressed: decompress it with zstd -d"),
], ids=lambda value: value if isinstance(value, str) else "")  # archives have the time in them
def test_what_is_no_text_is_named(name, content, words, folder):
    """And not offered iconv, nor learned where it happens to be UTF-8."""
    (folder / name).write_bytes(content)
    for dataset in (f"text:{name}", f"jsonl:{name}", name):
        assert refused(dataset).startswith(f"{name} {words}"), dataset


def texts_of(dataset: str) -> list[str]:
    found = Source(dataset, {"val_split": "hash:0.1", "text_field": "text"}).documents(0)
    return ["".join(texts) for texts, _, _ in found]


def test_texts_that_look_a_little_like_those(folder):
    likely = ("PK and other names\n", "%PDX\n", "x" * 257 + "ustas", "", "7z\n", "Rar! cried a bear\n",
              "%PDF\n")
    for content in likely:
        (folder / "some.txt").write_text(content + TEXT)
        assert texts_of("text:some.txt") == [content + TEXT]


@pytest.mark.parametrize("name, source", [("sub/book.txt", "text"), ("./book.txt", "text"),
                                          ("book.txt", "text"), ("sub/rows.jsonl", "jsonl"),
                                          ("rows.json", "jsonl"), ("ROWS.CSV", "csv"), ("a.tsv", "tsv")])
def test_a_file_without_a_prefix(name, source, folder):
    """Also one with a slash in its name, which for a trainer was a directory."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    content = {"text": TEXT, "jsonl": '{"text": "a"}\n' * 99}
    path.write_text(content.get(source, "text\n" + "".join(f"row {n}\n" for n in range(99))))
    for ask in (find_source, lambda data: locate(data, "bytes", 1000, 0, print, 64)):
        with pytest.raises(UserError, match=f"is a file: use '{source}:{name}', or ") as problem:
            ask(name)
    named = re.search(r"'(.*?)'", str(problem.value))[1]
    assert prepare(named, "shards", "bytes", workers=1).is_dir()


def test_a_source_that_is_elsewhere(folder):
    """As for a run that was copied without its data: its shards do."""
    (folder / "notes.txt").write_text(TEXT)
    there = locate("text:notes.txt", "bytes", 1000, 0, print, 64)
    shutil.move(there, folder / "elsewhere")
    (folder / "notes.txt").unlink()
    with pytest.raises(UserError, match="^no file matches 'notes.txt'; .* copy its directory in shards/"):
        locate("text:notes.txt", "bytes", 1000, 0, print, 64)
    shutil.move(folder / "elsewhere", there)
    assert locate("text:notes.txt", "bytes", 1000, 0, print, 64) == there


def record(data: str, digest: str, tokenizer: str = "bytes (e74c5e34ccc0)") -> dict:
    settings = {"data": data, "init_from": None, "trainer": "train_gpt2.py"}
    return {"path": "run/step.pt", "settings": settings, "data": digest * 64, "loss_on": "all", "seq_len": 8,
            "tokenizer": tokenizer, "torch": "2.13.0"}


def test_other_data_are_named_and_another_tokenizer_is_not_sent_in_a_circle():
    def sentence(now: dict) -> str:
        with pytest.raises(UserError) as problem:
            compare_with_saved(record("text:a.txt", "1"), now, False, print)
        return str(problem.value)

    other = record("text:b.txt", "2")
    text = sentence(other)
    assert "with the data text:a.txt (111111111111), not with text:b.txt (222222222222): leave it" in text
    assert "--init-from run/step.pt starts it from these weights" in text
    text = sentence(record("text:a.txt", "2", "gpt2 (ce2c7b368254)"))
    assert text.endswith("leave it as it was, or start a new run with another --out."), text


@pytest.mark.parametrize("given, values", [({"modern": False}, "modern True, not False"),
                                           ({"n_layer": 3}, "n_layer 2, not 3")])
def test_the_flag_that_was_given_is_the_one_to_leave_out(given, values):
    command = train_gpt2.parse_args([])
    command.given |= given
    config = {"vocab_size": 257, "padded_vocab": 320, "seq_len": 64, "n_layer": 2, "n_head": 2, "d_model": 32,
              "modern": True}
    run = {"path": "run", "model_config": config, "settings": {}}
    with pytest.raises(UserError, match=f"{values}: leave that flag out, "):
        shape_from_record(command, run, True)


def test_modes_are_flags_of_a_trainer():
    known = {flag for module in ("gpt2", "mlm") for flag in re.findall(
        r'"(--[\w-]+)"', (ROOT / f"train_{module}.py").read_text() + (ROOT / "cli" / "flags.py").read_text())}
    assert {*MODES} <= known
