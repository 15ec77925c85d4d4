"""People's files: each value, encoding, packing and path is read as what it is, or refused in one sentence
that names file, line and field and a command that works.
"""

import argparse
import bz2
import codecs
import csv
import gzip
import itertools
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from processes import fork
from runs import Trainer, log_of
from test_data import bins, read_documents, read_split

import data
from cli.errors import UserError
from cli.files import sha256_of
from prepare import command as data_py
from prepare import packing, pipeline, sources
from prepare.pipeline import prepare
from vocab import bpe
from vocab.vocabulary import EOT

TEXT = "first line é\r\n" * 500


def prepared(dataset: str, out, **options):
    return prepare(dataset, out, "bytes", workers=1, **options)


def refused(dataset: str, out, **options) -> str:
    with pytest.raises(UserError) as error:
        prepared(dataset, out, **options)
    return str(error.value)


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def write_table(path, **columns):
    import pyarrow
    from pyarrow import parquet
    parquet.write_table(pyarrow.table(columns), path)
    return f"parquet:{path}"


def texts_of(dataset: str, **options) -> list:
    source = sources.Source(dataset, pipeline.settings_of(dataset, **options))
    return [document if isinstance(document, tuple) else "".join(document)
            for document, _, _ in source.documents(0)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hf"])
@pytest.mark.parametrize("values, texts", [
    ([0, 1, None], ["0", "1", ""]), ([0.0, 2.5], ["0.0", "2.5"]),
    ([True, False, None], ["true", "false", ""]),
    (["", "0", "é"], ["", "0", "é"])], ids=["int", "float", "bool", "str"])
def test_only_null_and_the_empty_string_are_empty(here, form, values, texts):
    if form == "parquet":
        dataset = write_table(here / "x.parquet", text=values)
    else:
        (here / "set").mkdir()
        dataset = write_rows(here / "set" / "x.jsonl", *({"text": value} for value in values))
    assert texts_of("hf:set" if form == "hf" else dataset) == texts


def test_zeros_are_responses_and_names_of_sets(here):
    rows = [{"q": f"film {n}", "a": n % 2, "kind": [0, None, True][n % 3]} for n in range(300)]
    dataset = write_rows(here / "x.jsonl", *rows)
    out = prepared(dataset, "out", prompt_field="q", response_field="a", val_field="kind",
                   val_split="hash:0.3")
    manifest = data.read_manifest(out)
    assert manifest["pairs"]["samples"] == 300 and "empty responses" not in manifest["pairs"]
    assert {shard["split"] for shard in manifest["shards"]} == {"train", "val_0", "val_none", "val_true"}


def test_two_values_never_share_a_validation_set(here):
    rows = [{"text": f"a {n}", "k": ["C", "C++"][n % 2]} for n in range(50)]
    dataset = write_rows(here / "x.jsonl", *rows)
    assert re.search(r"'C'.*'C\+\+'.*val_C", refused(dataset, "out", val_field="k", val_split="hash:0.5"))


@pytest.mark.parametrize("value", [["a"], {"a": "b"}, [{"role": "user", "content": "x"}]])
@pytest.mark.parametrize("form", ["jsonl", "parquet", "hf"])
def test_lists_and_objects_are_no_text(here, form, value):
    (here / "set").mkdir()
    if form == "parquet":
        dataset = write_table(here / "set" / "x.parquet", text=[value])
    else:
        dataset = write_rows(here / "set" / "x.jsonl", {"text": value})
    where = {"jsonl": "x.jsonl, line 1,", "parquet": "x.parquet", "hf": "set"}[form]
    found = refused("hf:set" if form == "hf" else dataset, "out")
    assert where in found and "field 'text'" in found and "--prompt-field NAME and --response-field" in found


def test_bytes_are_utf8(here):
    assert texts_of(write_table(here / "x.parquet", text=["né".encode(), None])) == ["né", ""]
    found = refused(write_table(here / "y.parquet", text=[b"a", b"\xff"]), "out")
    assert "y.parquet cannot be read" in found and "can't decode byte 0xff" in found


@pytest.mark.parametrize("options, row", [
    ({}, {"content": "a"}), ({"prompt_field": "q", "response_field": "a"}, {"x y": "1", "z": "2"}),
    ({"val_field": "k"}, {"text": "a", "kind": "b"})])
def test_the_command_of_a_missing_field_works(here, options, row):
    write_rows(here / "my set.jsonl", *[row] * 9)
    found = refused("jsonl:my set.jsonl", "out", **options)
    command = re.search(r"(python data.py prepare .*) and train", found)[1]
    names = iter(row)
    command = re.sub("NAME", lambda _: shlex.quote(next(names)), command) + " --tokenizer bytes"
    root = os.path.dirname(data.__file__)
    if options.get("val_field"):
        command = command.replace("--val-field text", "--val-field kind")
    subprocess.run(command.replace("data.py", f"{root}/data.py"), shell=True, check=True, timeout=120)


def test_other_fields_do_not_matter(here):
    import pyarrow
    spark = pyarrow.array([[("a", "b")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    assert texts_of(write_table(here / "x.parquet", text=["a"], meta=spark)) == ["a"]
    deep = "[" * 100_000 + "]" * 100_000
    (here / "x.jsonl").write_text(f'{{"text": "a", "tree": {deep}}}\n')
    assert "line 1, is not JSON, is nested too deeply" in refused("jsonl:x.jsonl", "out")
    (here / "x.jsonl").write_text('{"text": "a", "tree": [[["b"]]], "z": {"b": 1}}\n')
    assert texts_of("jsonl:x.jsonl") == ["a"]


def test_a_set_without_validation_is_told_so(here, capsys):
    dataset = write_rows(here / "x.jsonl", *({"text": f"row {n}"} for n in range(40)))
    prepared(dataset, "none", val_split="hash:0.001")
    assert "--val-split hash:0.5" in capsys.readouterr().out
    prepared(dataset, "some", val_split="hash:0.2")
    assert "--val-split" not in capsys.readouterr().out


def test_paths_as_they_are_written(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "[EN] books").mkdir()
    for name in ("book [1984].txt", "[EN] books/a.txt", "b*.txt", "b1.txt"):
        (here / name).write_text(name)
    for path, names in {"~/b1.txt": ["b1.txt"], "book [1984].txt": ["book [1984].txt"], "b*.txt": ["b*.txt"],
                        "[EN] books/*.txt": ["[EN] books/a.txt"], "b[12].txt": ["b1.txt"],
                        "**/*.txt": ["[EN] books/a.txt", "b*.txt", "b1.txt", "book [1984].txt"]}.items():
        assert texts_of(f"text:{path}", val_split="hash:0.1") == names, path


def test_blank_lines_byte_order_marks_and_packed_files(here):
    lines = b'\n{"text": "a"}\r\n \n\n{"text": "b"}'
    for name, pack in {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.items():
        (here / "x.jsonl").write_bytes(pack(codecs.BOM_UTF8 + lines[1:]))
        assert texts_of("jsonl:x.jsonl") == ["a", "b"], name
        (here / "x.jsonl").write_bytes(pack(lines))
        assert texts_of("jsonl:x.jsonl") == ["a", "b"], name
        (here / "x.txt").write_bytes(pack(TEXT.encode()))
        assert bins(prepared("text:x.txt", f"tail {name}")) == bins(here / "tail plain")
        (here / "x.txt").write_bytes(pack(codecs.BOM_UTF8 + TEXT.encode()))
        assert texts_of("text:x.txt", val_split="hash:0.1") == [TEXT]
    (here / "x.txt").write_bytes(b"\x28\xb5\x2f\xfd1234")
    assert "zstd -d" in refused("text:x.txt", "out")


@pytest.mark.parametrize("raw, where, command, text", [
    (b"good line\n" * 200_000 + b"ma\xf1ana\n", "byte 2000003 in line 200001, is not UTF-8 text (it is 0xf1)",
     0, "mañana"),
    ("é\n".encode() * 400_000 + b"x\xff\n",
     "byte 1200002 in line 400001, is not UTF-8 text (it is 0xff)", 1, "é"),
    (b"good line\n" * 200_000 + b"a\0b\n",
     "byte 2000002 in line 200001, is not UTF-8 text (it is 0x00)", 2, "ab"),
    (b"\xef\xbb\xbfa\n\xff\n", "byte 6 in line 2, is not UTF-8 text (it is 0xff)", 1, "a"),
    ("hello\n".encode("utf-16-le"), "byte 2 in line 1", "UTF-16LE", "hello"),
    ("hello\n".encode("utf-16"), "byte 1 in line 1", "UTF-16LE", "hello")])
def test_a_command_against_an_encoding_works(here, raw, where, command, text):
    (here / "a book.txt").write_bytes(raw)
    found = refused("text:a book.txt", "out")
    assert where in found and "a book.txt" in found
    commands = re.findall(r"(?:iconv|tr) .*?'a book.txt' > new.txt", found)
    assert len(commands) == 3, found
    run = commands[0].replace("CP1252", command) if isinstance(command, str) else commands[command]
    subprocess.run(run, shell=True, timeout=60)  # iconv -c ends with 1
    assert text in texts_of("text:new.txt", val_split="hash:0.1")[0]


def test_lines_of_another_encoding_are_named(here):
    (here / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": "ma\xf1ana"}\n')
    assert "byte 13 of line 2, is not UTF-8 text (it is 0xf1)" in refused("jsonl:x.jsonl", "out")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_json_lines_in_utf_16_are_named_so(here, encoding):
    (here / "x.jsonl").write_bytes('{"text": "a"}\n{"text": "b"}\n'.encode(encoding))
    found = refused("jsonl:x.jsonl", "out")
    assert "of line 1, is not UTF-8 text" in found and "UTF-16" in found
    (here / "x.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\n')
    assert texts_of("jsonl:x.jsonl") == ["a"]


def test_a_text_that_begins_as_a_packed_file_does_is_read(here):
    (here / "x.txt").write_text("BZh9, he said.")
    assert texts_of("text:x.txt", val_split="hash:0.1") == ["BZh9, he said."]
    (here / "x.txt").write_bytes(bz2.compress(b"") + bz2.compress(b"packed"))
    assert texts_of("text:x.txt", val_split="hash:0.1") == ["packed"]


def test_another_content_of_the_same_length_is_refused(here, monkeypatch):
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "n.txt").write_text(f"{folder} cat sat on the mat\n" * 50)
    out = prepared("text:a/n.txt", "out")
    assert "source" in refused("text:b/n.txt", "out") and "--out" in refused("text:b/n.txt", "out")
    assert prepared("text:a/n.txt", "out") == out
    (here / "a" / "n.txt").write_text("longer\n" * 500)
    with pytest.raises(UserError, match="another text"):
        pipeline.check_source("text:a/n.txt", out, data.read_manifest(out)["settings"])


def test_a_local_folder_of_hf_that_has_changed_is_refused(here):
    (here / "set").mkdir()
    write_rows(here / "set" / "a.jsonl", *({"text": f"row {n}"} for n in range(50)))
    out = prepared("hf:set", "out")
    assert prepared("hf:set", "out") == out
    write_rows(here / "set" / "a.jsonl", *({"text": f"now {n}"} for n in range(50)))
    assert "another source" in refused("hf:set", "out")


def test_links_give_each_file_once(here, capsys):
    (here / "loop" / "sub").mkdir(parents=True)
    (here / "loop" / "sub" / "t.txt").write_text("text")
    assert texts_of("text:loop/**/*.txt", val_split="hash:0.1") == ["text"]
    assert "note" not in capsys.readouterr().out
    os.symlink("..", here / "loop" / "sub" / "up")
    assert texts_of("text:loop/**/*.txt", val_split="hash:0.1") == ["text"]
    capsys.readouterr()
    prepared("text:loop/**/*.txt", "out")
    assert capsys.readouterr().out.count("read once") == 1
    os.symlink("loop/sub/t.txt", here / "link.txt")
    assert texts_of("text:link.txt", val_split="hash:0.1") == ["text"]


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_documents_between_separators(here, capsys, monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    stories = [f"Once a cat {n}.\n" for n in range(9)]
    (here / "x.txt").write_text(EOT.join(stories))
    assert texts_of("text:x.txt", val_split="hash:0.1", split_on=EOT) == stories
    assert texts_of("text:x.txt", val_split="hash:0.1") == [EOT.join(stories)]


def test_markers_in_text_are_counted(here, capsys):
    (here / "x.txt").write_text(EOT.join(f"Once a cat {n}.\n" for n in range(9)))
    prepared("text:x.txt", "plain", val_split="hash:0.01")
    assert "8 times" in capsys.readouterr().out
    out = prepared("text:x.txt", "split", split_on=EOT, val_split="hash:0.01")
    assert "note" not in capsys.readouterr().out and len(read_documents(out, "train")) == 9
    assert read_split(out, "train").count(data.read_manifest(out)["tokenizer"]["eot"]) == 9


@pytest.mark.parametrize("unit", ["a", "-", " ", "é"])
def test_long_runs_are_cut_for_training(unit):
    assert max(map(len, bpe.short_runs([unit * 100_000]))) == bpe.LONGEST_RUN
    assert "".join(bpe.short_runs(["x " + unit * 100_000 + " y"])) == "x " + unit * 100_000 + " y"
    assert list(bpe.short_runs([f"{unit * 500} y " * 99])) == [f"{unit * 500} y " * 99]


@pytest.mark.parametrize("name, split", [
    ("retrieval_000000.bin", "train"), ("interval_1.bin", "train"), ("x_val_000000.bin", "val"),
    ("val.bin", "val"), ("fineweb-val1.bin", "val"), ("validation_0.bin", "val"), ("eval_0.bin", "val")])
def test_val_is_a_whole_part_of_a_name(here, name, split):
    packing.write_shard(here / name, [data.np.arange(9)], "uint16")
    manifest, _ = data.manifest_of_plain_shards(here, "bytes")
    assert manifest["shards"][0]["split"] == split


def test_a_trainer_says_that_nothing_is_evaluated(here):
    dataset = write_rows(here / "x.jsonl", *({"text": f"row {n} " * 9} for n in range(200)))
    for name, val_split in (("none", "hash:0.001"), ("some", "hash:0.2")):
        prepared(dataset, name, val_split=val_split)
        done = Trainer("train_gpt2.py").fork(2, name, here / f"run-{name}", steps=2)
        assert done.code == 0, done.out
        assert done.out.count("WARNING: the data have no validation set") == (name == "none")
        assert (name == "none") == ("--val-split hash:0.5" in done.out)


def test_a_mixture_whose_parts_are_split_unlike_is_told_so(here):
    """Of a set and a part of it, each prepared as by default; the way that is named works."""
    rows = [{"text": f"row {n} of many"} for n in range(400)]
    large, small = write_rows(here / "x.jsonl", *rows), write_rows(here / "y.jsonl", *rows[::4])

    def in_both(split: str, *splits: str) -> int:
        """How many documents are in a validation set and in a training set."""
        for name, dataset, val_split in zip(("a", "b", "c"), (large, small, large), splits):
            prepared(dataset, here / split / name, val_split=val_split)
        sets = {f"{name} {part}": {*read_documents(here / split / name, part)}
                for name in ("a", "b") for part in ("train", "val")}
        mixture = f"{split}/a,{split}/b,{split}/b"
        done = Trainer("train_gpt2.py").train(0, mixture, here / f"{split}-run", steps=1)
        assert done.code == 0, done.out
        named = done.out.count("prepare all with the same --val-split, such as hash:0.1")
        assert named == (split == "unlike"), done.out
        return len(sets["a train"] & sets["b val"]) + len(sets["b train"] & sets["a val"])

    assert in_both("unlike", "hash:0.01", "hash:0.1") > 0
    assert in_both("alike", "hash:0.1", "hash:0.1") == 0


@pytest.mark.parametrize("options", [{}, {"prompt_field": "q", "response_field": "r"}])
def test_blank_lines_are_no_documents_of_a_resumed_source(here, options):
    (here / "x.jsonl").write_text("\n\n".join(json.dumps({"text": str(n), "q": n, "r": 0}) for n in range(9)))
    source = sources.Source("jsonl:x.jsonl", pipeline.settings_of("jsonl:x.jsonl", **options))
    whole = [list(document) for document, _, _ in source.documents(0)]
    assert [list(document) for document, _, _ in source.documents(4)] == whole[4:] and len(whole) == 9


def test_documents_without_text_are_counted(here, capsys):
    dataset = write_rows(here / "x.jsonl", *({"text": text} for text in ("a", None, " \n", "", "b c", "d")))
    prepared(dataset, "out")
    assert "note: 3 documents have no text" in capsys.readouterr().out
    prepared(dataset, "words", min_words=2, val_split="hash:0.000001")
    assert "note: 5 documents have no text or fewer words" in capsys.readouterr().out
    prepared(dataset, "limited", max_tokens=1, val_split="hash:0.000001")
    assert "note" not in capsys.readouterr().out
    prepared(write_rows(here / "y.jsonl", {"text": "a"}, {"text": "b"}), "full")
    assert "note" not in capsys.readouterr().out
    prepared(write_rows(here / "z.jsonl", {"text": "a"}, {"text": None}, {"text": ""}), "end")
    assert "note: 2 documents have no text" in capsys.readouterr().out
    prepared(write_rows(here / "s.jsonl", {"text": "a"}, {"text": "b"}, {"text": ""}), "some", max_samples=1)
    assert "note" not in capsys.readouterr().out


def test_numbers_are_text_as_they_are_written(here):
    numbers = ["1.10", "1e400", "-0.0", "7", "9" * 5000, "-Infinity"]
    (here / "x.jsonl").write_text("".join(f'{{"text": {number}}}\n' for number in numbers))
    assert texts_of("jsonl:x.jsonl") == numbers


def test_a_missing_value_among_numbers_is_no_text(here, capsys):
    """NaN, as pandas has it, in a table and as Python writes it in JSON."""
    nan = float("nan")
    (here / "x.jsonl").write_text('{"text": NaN}\n{"text": 2.5}\n')
    for dataset in (write_table(here / "x.parquet", text=[1.5, nan, None, 2.5]), "jsonl:x.jsonl"):
        assert texts_of(dataset)[-1] == "2.5" and "nan" not in str(texts_of(dataset)).lower()
    dataset = write_table(here / "y.parquet", q=["a", "b", "c"], a=[1.5, nan, 2.5])
    prepared(dataset, "out", prompt_field="q", response_field="a", val_split="hash:0.01")
    assert "1 empty responses" in capsys.readouterr().out


def test_a_source_that_cannot_be_read_any_more_is_not_needed(here, capsys, monkeypatch):
    (here / "x.txt").write_text(TEXT)
    settings = data.read_manifest(prepared("text:x.txt", here / "out"))["settings"]

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(sources, "sha256_of", forbidden)
    pipeline.check_source("text:x.txt", here / "out", settings)
    assert "Permission denied" in (said := capsys.readouterr().out) and "prepared before, is used" in said


def test_empty_prompts_are_counted_and_kept(here, capsys):
    rows = [{"q": "" if n % 3 else f"film {n}", "a": "good"} for n in range(30)]
    dataset = write_rows(here / "x.jsonl", *rows)
    out = prepared(dataset, "out", prompt_field="q", response_field="a", val_split="hash:0.01")
    assert "20 empty prompts, 30 samples" in capsys.readouterr().out
    assert data.read_manifest(out)["pairs"]["empty prompts"] == 20
    dataset = write_rows(here / "y.jsonl", {"q": "film", "a": "good"})
    prepared(dataset, "none", prompt_field="q", response_field="a", val_split="hash:0.01")
    assert "empty" not in capsys.readouterr().out


def test_a_text_field_that_would_not_be_read_is_refused(here):
    (here / "x.txt").write_text(TEXT)
    dataset = write_rows(here / "x.jsonl", {"q": "film", "a": "good", "body": "x"})
    for name, options in {"text:x.txt": {}, dataset: {"prompt_field": "q", "response_field": "a"}}.items():
        assert "--text-field body would be ignored" in refused(name, "out", text_field="body", **options)
    assert texts_of(dataset, text_field="body") == ["x"]


TABLES = {  # each is the same two rows; a row of tab.tsv ends with its line
    "comma.csv": b'text,n\r\n"One, ""two"";\r\nthree",007\r\n\r\n\xc3\xb1,NA\r\n',
    "marked.csv": codecs.BOM_UTF8 + b'n,text\n007,"One, ""two"";\r\nthree"\nNA,\xc3\xb1',
    "semicolon.csv": b'text;n\n"One, ""two"";\r\nthree";007\n\xc3\xb1;NA\n',
    "tab.tsv": b'text\tn\n"One, ""two"";\tthree"\t007\n\xc3\xb1\tNA\n'}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_as_it_stands(here, name):
    kind = name[-3:]
    rows = ['One, "two";\tthree' if kind == "tsv" else 'One, "two";\r\nthree', "ñ"]
    for file, pack in ((name, bytes), (f"{name}.gz", gzip.compress)):
        (here / file).write_bytes(pack(TABLES[name]))
        assert texts_of(f"{kind}:{file}") == rows
        assert texts_of(f"{kind}:{file}", text_field="n") == ["007", "NA"]
        assert f"is a file: use '{kind}:{file}', or " in refused(file, "out")
    (here / f"{name}.0").write_text("")  # the control: a file without rows adds none
    assert texts_of(f"{kind}:{name}*") == 2 * rows


@pytest.mark.parametrize("kind, text, line", [
    ("csv", 'text,n\na,1\nb,c,2\n', 3), ("csv", 'text,n\na,1\nb\n', 3),
    ("csv", 'text,n\na,1\n"an open quote,2\nb,3\n', 4), ("csv", 'text,n\n"she said \\"no\\", twice",1\n', 2),
    ("csv", 'text\tn\nno, never\t1\n', 2), ("tsv", 'text\tn\r\n"no\nis what she said"\t1\r\n', 2),
    ("tsv", 'text\tn\n"a\tb"\t1\n' + "c\t2\n" * 1000 + '\n"open\nquote"\t3\n', 1004),
    ("csv", 'text,n\r"no",1\ryes,2\r', 1)])
def test_a_damaged_table_is_refused_and_csv_writes_one_that_is_read(here, kind, text, line):
    (here / f"my rows.{kind}").write_bytes(text.encode())
    found = refused(f"{kind}:my rows.{kind}", "out")
    assert found.startswith(f"my rows.{kind}, line {line}, does not end a row like the first (")
    assert "use tsv: for a table with tabs" in found and "Python's csv.writer" in found
    with open(here / "mended.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], ['she said "no",\ntwice', 1]])
    assert texts_of("csv:mended.csv") == ['she said "no",\ntwice']


ROWS = "text\tn\n" + "".join(f"row {n} of a tsv\t{n}\n" for n in range(1200))


@pytest.mark.parametrize("text, quoted, some", [
    ('"Yes," he said.\t1\n', False, '"Yes," he said.'), ('"Yes."\t1\n', False, '"Yes."'),
    ('"Yes, he said.\t1\nNo."\t2\n', False, '"Yes, he said.'), ('5" of rain\t""\n', False, '5" of rain'),
    ('"Yes.\tNo."\t1\n', True, "Yes.\tNo."), ('"""Yes"" he said."\t1\n', True, '"Yes" he said.'),
    ('"Yes.\tNo."\t1\r\n"No."\t2\n', True, "No."), ('"Yes.\tNo."\t1\n"No\t2\n', False, None)])
def test_quotes_in_a_tsv_enclose_fields_only_if_they_have_to(here, capsys, text, quoted, some):
    (here / "x.tsv").write_text(ROWS.replace("\n", f"\n{text}", 1), newline="")
    if some is None:  # as text, its first row has too many fields
        assert "x.tsv, line 2, does not end a row" in refused("tsv:x.tsv", "out")
        return
    out = prepared("tsv:x.tsv", "out", val_split="hash:0.000001")
    documents = read_documents(out, "train")
    assert some in documents and len(documents) == 1200 + text.count("\n")
    assert data.read_manifest(out)["reading"] == {"quoted": quoted}
    assert capsys.readouterr().out.count("quotes in tsv:x.tsv " + ("enclose" if quoted else "are text")) == 1


def test_how_a_tsv_is_quoted_is_kept(here, capsys):
    """Also of one that was begun when all of them were read as a csv."""
    options = {"val_split": "hash:0.000001", "shard_tokens": 5000}
    (here / "x.tsv").write_text(ROWS.replace("\n", '\n"a b"\t1\n', 1))
    for out, reading, first in (("now", {"quoted": False}, '"a b"'), ("then", None, "a b")):
        with pytest.MonkeyPatch.context() as patch:
            if not reading:
                patch.setattr(sources, "quotes_enclose", lambda files: True)
            prepared_until(1, "tsv:x.tsv", out, **options)
            manifest = data.read_manifest(here / out)
            assert manifest["reading"] == (reading or {"quoted": True})
            if not reading:
                del manifest["reading"]
                packing.write_manifest(here / out, manifest)
        capsys.readouterr()
        assert read_documents(prepared("tsv:x.tsv", here / out, **options), "train")[0] == first
        assert "quotes in" not in capsys.readouterr().out


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "jsonl", "array"])
def test_a_field_that_is_there_twice_is_refused(here, form):
    import pyarrow
    from pyarrow import parquet
    rows = [["a", "b", "c"], ["d", "e", "f"]]

    def written(*names):
        if form == "parquet":
            columns = [*map(pyarrow.array, zip(*rows))]
            parquet.write_table(pyarrow.Table.from_arrays(columns, names), "x.parquet")
            return "parquet:x.parquet"
        if form in ("csv", "tsv"):
            with open(f"x.{form}", "w", newline="") as file:
                csv.writer(file, delimiter=",\t"[form == "tsv"]).writerows([names, *rows])
            return f"{form}:x.{form}"
        lines = ["{" + ", ".join(f'"{k}": "{v}"' for k, v in zip(names, row)) + "}" for row in rows]
        (here / "x.json").write_text(f"[{','.join(lines)}]" if form == "array" else "\n".join(lines))
        return "jsonl:x.json"

    found = refused(written("text", "text", "n"), "out")
    assert "the field 'text' more than once" in found or "or has a name twice" in found
    assert texts_of(written("text", "n", "m")) == ["a", "d"]
    if "json" not in form and form != "array":  # as spreadsheets leave empty columns at the end
        assert texts_of(written("text", "n", "n")) == ["a", "d"]


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_numbers_of_a_table_are_text_as_they_were_written(here, form):
    import decimal

    import pyarrow
    (here / "set").mkdir()
    values = [4.2, 1234567.0, 1e20, None, float("nan"), 1e-7]
    texts = ["4.2", "1234567.0", "1e+20", "", "", "1e-07"]
    floats = pyarrow.array(values, pyarrow.float32())
    columns = {"narrow": floats, "wide": pyarrow.array([float(value or 0) for value in floats.to_pylist()]),
               "meta": pyarrow.array([{"a": {"n": n}, "b": "x"} for n in values[:5]] + [None], pyarrow.struct(
                   {"a": pyarrow.struct({"n": pyarrow.float32()}), "b": pyarrow.string()})),
               "exact": pyarrow.array([decimal.Decimal(n) for n in ("0", "4.2", "-1e-8", "7", "1e3", "0.10")],
                                      pyarrow.decimal128(18, 8)),
               "whole": pyarrow.array([2**63, 1, None, 2**53 + 1, 0, 5], pyarrow.uint64())}
    columns["half"] = pyarrow.array(data.np.array([0.1, 4.2, 2, 6e-5, 3e4, data.np.nan], data.np.float16))
    dataset = write_table(here / "set" / "x.parquet", **columns)

    def read(field):
        return texts_of("hf:set" if form == "hf" else dataset, text_field=field)

    assert read("narrow") == texts
    assert read("wide")[:2] == ["4.199999809265137", "1234567.0"]  # the control: these are what was written
    assert read("meta.a.n") == [*texts[:5], ""] and read("meta.b") == [*"xxxxx", ""]
    assert read("exact")[1] == "4.20000000"
    assert read("whole") == [str(2**63), "1", "", str(2**53 + 1), "0", "5"]
    assert read("half") == ["0.1", "4.2", "2.0", "6e-05", "30000.0", ""]


@pytest.mark.parametrize("name", ["book", "new"])
def test_no_command_writes_over_the_file_that_it_reads(here, name):
    (here / f"{name}.txt").write_bytes(b"caf\xe9\n")
    found = refused(f"text:{name}.txt", "out")
    command = re.search(rf"iconv -f CP1252 .*? {name}.txt > \w+.txt", found)[0]
    subprocess.run(command, shell=True, check=True, timeout=60)
    mended = command.rpartition(" ")[2]
    assert texts_of(f"text:{mended}", val_split="hash:0.1")[0] == "café\n"
    assert (here / f"{name}.txt").read_bytes() == b"caf\xe9\n"


def test_a_table_of_another_encoding_or_without_the_field_is_named(here):
    (here / "x.csv").write_bytes('text,n\na,1\nmañana,2\n'.encode("latin-1"))
    assert "x.csv, byte 3 of line 3, is not UTF-8 text (it is 0xf1)" in refused("csv:x.csv", "out")
    (here / "x.tsv").write_bytes("text\tn\na\t1\n".encode("utf-16-le"))
    assert "of line 1, is not UTF-8 text" in refused("tsv:x.tsv", "out")
    (here / "y.csv").write_text("body,n\na,1\n")
    assert "has no field 'text', only body, n:" in refused("csv:y.csv", "out")
    assert texts_of("csv:y.csv", text_field="body") == ["a"]


def test_tables_and_arrays_are_not_held_in_memory(here, monkeypatch):
    """The first row is there when little has been read, and what does not end is refused before all is."""
    row = {"text": "word " * 30_000, "n": 1}  # longer than csv's own limit
    (here / "x.json").write_text(json.dumps([row] * 99))
    (here / "x.csv").write_text("text,n\n" + f"{row['text']},1\n" * 99)
    for dataset in ("jsonl:x.json", "csv:x.csv"):
        source = sources.Source(dataset, pipeline.settings_of(dataset))
        found = ["".join(texts) for texts, _, _ in itertools.islice(source.documents(0), 2)]
        assert found == [row["text"]] * 2 and source.progress.done < 0.1 * source.progress.total
    (here / "open.json").write_text('[{"text": "' + "a" * 5000)
    (here / "open.csv").write_text('text,n\n"' + "a\n" * 5000)
    monkeypatch.setattr(sources, "LONGEST", 1000)
    monkeypatch.setattr(sources, "BLOCK", 200)
    assert "open.json, item 1, is not JSON" in refused("jsonl:open.json", "out")
    assert "(field larger than field limit (1000))" in refused("csv:open.csv", "out")


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_as_its_lines_are(here, monkeypatch, block, indent):
    rows = [{"text": "]},{ é 日", "n": 1.10}, {"text": None, "tree": [[{"b": []}]]}, {"n": 2, "text": "x"}]
    lines = texts_of(write_rows(here / "x.jsonl", *rows))
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    for name, raw in {"x.json": text.encode(), "marked.json": codecs.BOM_UTF8 + f"\n {text}\n".encode(),
                      "x.json.gz": gzip.compress(text.encode())}.items():
        (here / name).write_bytes(raw)
        assert f"is a file: use 'jsonl:{name}', or " in refused(name, "out")
        monkeypatch.setattr(sources, "BLOCK", block)
        assert texts_of(f"jsonl:{name}") == lines == ["]},{ é 日", "", "x"]
        monkeypatch.undo()
        os.chdir(here)
    (here / "x.json").write_text("[ ]")
    assert texts_of("jsonl:x.json") == []


@pytest.mark.parametrize("text, item", [
    ('["a"]', 1), ('[{"text": "a"}, 5]', 2), ('[{"text": "a"},]', 2), ('[{"text": "a"}', 2), ("[", 1),
    ('[{"text": "a"}] and', 2), ('[{"text": "a"}, {"text": "b', 2), ('[{"text": "a"}, {"text": b}]', 2)])
def test_a_damaged_array_is_refused(here, text, item):
    (here / "x.json").write_text(text)
    found = refused("jsonl:x.json", "out")
    assert f"x.json, item {item}, is not JSON, is nested too deeply, is not an object" in found


@pytest.mark.parametrize("form", ["jsonl", "array", "parquet", "hf", "hf of tables"])
def test_a_field_inside_of_another_has_a_name_with_dots(here, form):
    (here / "set").mkdir()
    rows = [{"meta": {"text": "a", "deep": {"n": 1}}, "meta.kind": "b"}, {"meta": None, "meta.kind": "c"}]
    if form in ("parquet", "hf of tables"):
        write_table(here / "set" / "x.parquet", **{name: [row[name] for row in rows] for name in rows[0]})
    elif form == "array":
        (here / "set" / "x.json").write_text(json.dumps(rows))
    else:
        write_rows(here / "set" / "x.jsonl", *rows)
    dataset = {"parquet": "parquet:set/*", "array": "jsonl:set/*", "jsonl": "jsonl:set/*"}.get(form, "hf:set")
    assert texts_of(dataset, text_field="meta.text") == ["a", ""]
    assert texts_of(dataset, text_field="meta.deep.n") == ["1", ""]
    assert texts_of(dataset, text_field="meta.kind") == ["b", "c"]  # a name as it is comes first
    pair = {"prompt_field": "meta.kind", "response_field": "meta.text", "condition_field": "meta.deep.n"}
    assert texts_of(dataset, **pair) == [("b", "a", "1"), ("c", "", "")]
    for name, words in {"meta.x": "has no field 'meta.x', because 'x' is not in text, deep: name another, or",
                        "meta": "holds a dict, not text",
                        "x.text": "has no field 'x.text', only meta, meta.kind:"}.items():
        assert words in refused(dataset, "out", text_field=name)


@pytest.mark.parametrize("kind", ["csv", "array"])
def test_a_prepare_of_a_table_or_an_array_resumes_and_notices_an_edit(here, kind):
    rows = [{"text": f"row {n}, of many"} for n in range(900)]
    name = "x.csv" if kind == "csv" else "x.json"
    text = "text\n" + "".join(f'"{row["text"]}"\n' for row in rows) if kind == "csv" else json.dumps(rows)
    (here / name).write_text(text)
    dataset = f"csv:{name}" if kind == "csv" else f"jsonl:{name}"
    options = {"shard_tokens": 4000, "val_split": "hash:0.1"}
    whole = prepared(dataset, here / "whole", **options)
    prepared_until(2, dataset, here / "killed", **options)
    assert bins(prepared(dataset, here / "killed", **options)) == bins(whole) and len(bins(whole)) > 3
    assert bins(whole) == bins(prepared(write_rows(here / "same.jsonl", *rows), here / "lines", **options))
    (here / name).write_text(text.replace("row 7,", "row 8,"))
    assert "another source" in refused(dataset, whole, **options)


APPENDED = re.search(r"\*\*Appended text\.\*\*.*?```bash\n(.*?)```",
                     (ROOT / "docs" / "running.md").read_text(), re.S)[1]


@pytest.mark.parametrize("name, ranks", [
    ("gpt2", 0), *[pytest.param(name, 2, marks=pytest.mark.full) for name in ("gpt2", "hrm", "mlm")]])
def test_text_that_was_appended_is_trained_on_as_the_guide_says(here, name, ranks):
    """With the tokenizer of the first run. Nothing that this has trained on is in the new validation set, and
    without --init-from the grown text is refused.
    """
    first, second = (shlex.split(line.partition(".py")[2], comments=True) for line in APPENDED.splitlines())
    trainer = Trainer(f"train_{name}.py", **({"ff": 48, "window": 16} if name == "mlm" else {}))

    def train(words):
        flags = [*trainer.flags(None, None, steps=2), *words]
        return fork(ranks, trainer.script, *flags) if ranks else trainer.here(*flags)

    def text(shards, split):
        return bytes(token for token in read_split(here / "shards" / shards, split) if token < 256)

    old = [f"the {n}. day of spring\n" for n in range(900)]
    (here / "diary.txt").write_text("".join(old))
    done = train(first)
    assert done.code == 0, done.out
    trained = text("diary-bytes", "train")
    with open(here / "diary.txt", "a") as file:
        file.writelines(f"the {n}. night of autumn\n" for n in range(90))
    again = train(first)
    assert again.code == 2 and "shards/diary-bytes was prepared from another text" in again.out, again.out
    done = train(second)
    assert done.code == 0 and "starting from runs/diary/checkpoints/" in done.out, done.out
    manifest = data.read_manifest(here / "shards" / "diary-diary")
    assert manifest["tokenizer"]["sha256"] == sha256_of(here / "runs" / "diary" / "tokenizer.json")
    held_out = text("diary-diary", "val").splitlines()[1:]
    assert b"the 89. night of autumn" in held_out and b"the 899. day of spring" in held_out
    assert not any(line in trained for line in held_out)
    assert b"the 9. day of spring" in trained  # the control
    log = log_of(here / "runs" / "diary-2")
    assert log and train(second).code == 0 and log_of(here / "runs" / "diary-2") == log, "it was complete"


def test_a_separator_that_divides_nothing_is_said(here, capsys, monkeypatch):
    (here / "x.txt").write_text("a story\n" * 99)
    prepared("text:x.txt", "none", split_on="<end>", val_split="hash:0.000001")
    assert "WARNING: --split-on '<end>' does not occur" in capsys.readouterr().out
    prepared("text:x.txt", "lines", split_on="\n", val_split="hash:0.000001")
    assert "WARNING" not in capsys.readouterr().out
    prepared("text:x.txt", "first", split_on="\n", val_split="hash:0.000001", max_samples=1)
    assert "WARNING" not in capsys.readouterr().out
    monkeypatch.setattr(sources, "BLOCK", 8)
    assert "characters without a '<end>': leave --split-on out" in refused(
        "text:x.txt", "long", split_on="<end>", val_split="hash:0.000001")


def test_hard_links_are_one_file(here, capsys):
    (here / "a.txt").write_text("text")
    os.link(here / "a.txt", here / "b.txt")
    (here / "c.txt").write_text("text")  # another file with the same text stays
    assert texts_of("text:*.txt", val_split="hash:0.1") == ["text", "text"]
    prepared("text:*.txt", "out", val_split="hash:0.000001")
    assert "3 names that match *.txt are 2 files" in capsys.readouterr().out


def test_a_file_system_without_numbers_of_files(here, monkeypatch):
    """Such as some FUSE: all files are number 0, and yet no links to one."""
    for name in "ab":
        (here / f"{name}.txt").write_text(f"text {name}")
    real = Path.stat

    def without_number(path, **options):
        values = [*real(path, **options)]
        return os.stat_result([values[0], 0, *values[2:]])

    monkeypatch.setattr(Path, "stat", without_number)
    assert texts_of("text:*.txt", val_split="hash:0.1") == ["text a", "text b"]


def test_a_file_without_permission_is_one_sentence(here, monkeypatch):
    (here / "x.txt").write_text(TEXT)

    def forbidden(path, *_):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr("builtins.open", forbidden)
    assert refused("text:x.txt", "out").startswith("x.txt cannot be accessed (Permission denied)")


def test_folders_of_save_to_disk_are_read_or_named(here):
    """As a repository datasets reads those of several sets itself, and refuses one alone."""
    import datasets
    rows = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(40)]})
    rows.save_to_disk(here / "saved")
    datasets.DatasetDict({"test": rows, "train": rows}).save_to_disk(here / "several")
    assert texts_of("hf:several") == rows["text"]
    assert "load_from_disk" in refused("hf:saved", "out")
    found = refused("text:saved/*.arrow", "out")
    assert "is an Arrow file" in found and "datasets.load_from_disk(FOLDER).to_parquet('x.parquet')" in found
    datasets.load_from_disk("saved").to_parquet("x.parquet")  # as it says
    assert texts_of("parquet:x.parquet") == rows["text"]


def test_a_home_directory_is_found_in_the_name_of_a_hub(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "mine").mkdir()
    write_table(here / "mine" / "x.parquet", text=["a", "b"])
    assert texts_of("hf:~/mine") == ["a", "b"]


def test_advice_names_what_was_given_and_what_a_trainer_has(here, monkeypatch):
    """--out and --dataset mean something else in a trainer, or nothing; each command keeps the tokenizer."""
    write_rows(here / "x.jsonl", {"body": "a", "more": "b"})
    dataset = "jsonl:x.jsonl"
    with pytest.raises(UserError) as error:
        prepare(dataset, here / "out", "bytes")
    command = re.search("python (data.py prepare .*?) and train on", str(error.value))[1]
    assert command == "data.py prepare --dataset jsonl:x.jsonl --tokenizer bytes --text-field NAME"
    monkeypatch.setattr(sources, "reachable", lambda url: False)
    assert "or the source stdlib" in refused("hf:nobody/nothing", "out2")
    prepared(dataset, "out3", text_field="body")
    assert "give data.py prepare another --out" in refused(dataset, "out3", text_field="more")
    (here / "full").mkdir()
    (here / "full" / "a").touch()
    sentence = refused(dataset, "full", text_field="more")
    assert "empty that directory, or give data.py prepare another --out" in sentence


def test_a_file_of_nanogpt_is_named_with_the_way_out(here):
    import numpy as np
    np.arange(500, dtype=np.uint16).tofile("train.bin")
    with pytest.raises(UserError) as error:
        data.open_shard(here / "train.bin")
    command = re.search(r'python -c ".*?"', str(error.value))[0]
    (here / "x").mkdir()
    subprocess.run(command, shell=True, check=True, timeout=60,
                   env=os.environ | {"PYTHONPATH": os.path.dirname(data.__file__)})
    assert data.open_shard(here / "x" / "train_000000.bin").tolist() == list(range(500))


@pytest.fixture
def large(here):
    """A text of which a start reads only samples."""
    (here / "large.txt").write_text("the cat sat on the mat and looked at ships\n" * 1_700_000)
    return "text:large.txt"


OF_LARGE = {"val_split": "hash:0.000001", "max_tokens": 30_000}


def edit(path):
    """Corrects a word without changing the length, between what is sampled."""
    with open(path, "r+b") as file:
        file.seek(43 * 100_000 + 4)
        file.write(b"dog")


def later(path, seconds: float = 10):
    os.utime(path, (time.time() + seconds,) * 2)


def test_an_edit_in_a_large_text_is_noticed(here, large, capsys, monkeypatch):
    out = prepared(large, "out", **OF_LARGE)
    settings = data.read_manifest(out)["settings"]
    later("large.txt")
    assert prepared(large, "out", **OF_LARGE) == out, "a time alone refuses nothing"
    pipeline.check_source(large, out, settings)
    edit("large.txt")
    assert sources.Source(large, settings).identity == settings["source"], "or this test shows nothing"
    later("large.txt", -1000)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "sha256_of", None)  # all is read only if a file is newer
        assert prepared(large, "out", **OF_LARGE) == out
    later("large.txt")
    assert "another source" in refused(large, "out", **OF_LARGE)
    with pytest.raises(UserError, match="another text"):
        pipeline.check_source(large, out, settings)
    assert "note" not in capsys.readouterr().out
    monkeypatch.setattr(pipeline, "LARGEST_READ", 70_000_000)
    pipeline.check_source(large, out, settings)
    assert capsys.readouterr().out.count("too large to be compared") == 1


def test_shards_of_a_large_text_without_a_digest_go_on(here, large, capsys):
    """As they were written until 2026-11-27."""
    out = prepared(large, "out", **OF_LARGE)
    manifest = data.read_manifest(out)
    manifest.pop("whole", None)
    packing.write_manifest(out, manifest)
    later("large.txt")
    assert prepared(large, "out", **OF_LARGE) == out
    pipeline.check_source(large, out, manifest["settings"])
    assert "note" not in capsys.readouterr().out


def test_an_edit_while_a_large_text_is_prepared_is_noticed(here, large):
    """Each shard makes the manifest newer, and not what is compared with."""
    out = prepared(large, "out", **OF_LARGE)
    later(out / "tokenizer.json", -20)
    edit("large.txt")
    later("large.txt", -10)
    assert "another source" in refused(large, "out", **OF_LARGE)


def test_a_split_that_was_asked_for_is_not_an_older_default(here):
    dataset = write_rows(here / "rows.jsonl", *({"text": f"row {n} of many"} for n in range(99)))
    prepared(dataset, "out", val_split="hash:0.5")
    assert "another val_split (hash:0.5, now hash:0.1)" in refused(dataset, "out")


def stopped_after(writes: int):
    """A substitute for ShardWriter._write that raises KeyboardInterrupt after so many writes."""
    write = packing.ShardWriter._write
    count = iter(range(writes))

    def written(*arguments):
        if next(count, None) is None:
            raise KeyboardInterrupt
        write(*arguments)

    return written


def prepared_until(writes: int, dataset: str, out, **options):
    """A prepare that is stopped after so many writes."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing.ShardWriter, "_write", stopped_after(writes))
        prepared(dataset, out, **options)
    manifest = data.read_manifest(Path(out))
    assert manifest["shards"] and not manifest["complete"]


def test_an_edit_in_a_large_text_is_noticed_before_prepare_resumes(here, large):
    options = OF_LARGE | {"split_on": "ships", "shard_tokens": 9000}
    prepared_until(2, large, "out", **options)
    edit("large.txt")
    later("large.txt")
    assert "another source" in refused(large, "out", **options)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "text", "lines"])
@pytest.mark.parametrize("megabytes", [0, 50])
def test_a_small_set_holds_out_one_document_in_ten(here, monkeypatch, form, megabytes):
    """Files of less than 40 MB in all; more hold out one in 100."""
    texts = [f"{n} some words" for n in range(600)]
    options = {"split_on": "\n"} if form == "lines" else {}
    if form == "jsonl":
        dataset = write_rows(here / "x.jsonl", *({"text": text} for text in texts))
    elif form == "parquet":
        dataset = write_table(here / "x.parquet", text=texts)
    elif form == "csv":
        (here / "x.csv").write_text("\n".join(["text", *texts]))
        dataset = "csv:x.csv"
    elif form == "lines":
        (here / "x.txt").write_text("\n".join(texts))
        dataset = "text:x.txt"
    else:
        for n, text in enumerate(texts):
            (here / f"{n}.txt").write_text(text)
        dataset = "text:*.txt"
    real = os.stat
    if megabytes:
        size = megabytes * 10**6
        monkeypatch.setattr(sources.Path, "stat", lambda path, **flags: grown(real(path, **flags), size))
    assert pipeline.settings_of(dataset, **options)["val_split"] == ("hash:0.01" if megabytes else "hash:0.1")
    if not megabytes:
        manifest = data.read_manifest(prepared(dataset, "out", **options))
        held_out = sum(s["documents"] for s in manifest["shards"] if s["split"] == "val")
        assert 40 < held_out < 80


def grown(found, size: int):
    return os.stat_result([size if at == 6 else number for at, number in enumerate(found)])


@pytest.mark.parametrize("dataset", ["stdlib", "hf:some/repo", "imdb", "hf:folder"])
def test_other_sources_hold_out_as_before(here, dataset):
    (here / "folder").mkdir()
    write_rows(here / "folder" / "a.jsonl", {"text": "row"})
    assert pipeline.settings_of(dataset)["val_split"] == "hash:0.01"


def test_a_prepare_that_was_killed_goes_on_with_its_split(here):
    """With the split that was named; another one is refused, also the default."""
    dataset = write_rows(here / "x.jsonl", *({"text": f"row {n} of many"} for n in range(900)))
    whole = prepared(dataset, here / "whole", val_split="hash:0.01", shard_tokens=5000)
    for split in None, "hash:0.1":
        assert "another val_split" in refused(dataset, whole, val_split=split, shard_tokens=5000)
    (here / "x.txt").write_text("|".join(f"document {n}" for n in range(900)))
    options = {"split_on": "|", "shard_tokens": 5000, "val_split": "tail:0.3"}
    whole = prepared("text:x.txt", here / "tail", **options)
    prepared_until(1, "text:x.txt", here / "killed-tail", **options)
    assert bins(prepared("text:x.txt", here / "killed-tail", **options)) == bins(whole)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_val_split_that_is_named_for_a_text_works(here, capsys, count):
    """It is given literally, and always leaves something to train on."""
    for attempt in range(4):
        (here / "x.txt").write_text("|".join(f"document {attempt}-{n} of a few" for n in range(count)))
        out = prepared("text:x.txt", f"none-{attempt}", val_split="hash:0.000001", split_on="|")
        named = re.search(r"for a text: source (\S+)\)", capsys.readouterr().out)[1]
        again = prepared("text:x.txt", f"some-{attempt}", val_split=named, split_on="|")
        splits = {shard["split"] for shard in data.read_manifest(again)["shards"]}
        assert splits == {"train", "val"} and out.exists()


def test_a_set_that_is_held_out_altogether_is_told_what_to_give(here):
    text = next(t for t in map(str, range(999)) if pipeline.hash64(t) < 2**64 / 10)
    dataset = write_rows(here / "x.jsonl", {"text": text})
    named = re.search(r"--val-split (\S+) avoids", refused(dataset, "out"))[1]
    assert data.read_manifest(prepared(dataset, "out", val_split=named))["complete"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that is read as a repository of the hub is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    rows = [json.dumps({"text": f"{n} " + "a b c " * 150}) for n in range(200)]
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(rows))


def test_a_repository_that_changes_after_a_kill_is_read_as_it_was(hub, monkeypatch, tmp_path):
    """Also where an earlier pass has trained the tokenizer."""
    import datasets
    import huggingface_hub
    load = datasets.load_dataset
    shutil.copytree("corpus", "one")
    (tmp_path / "two").mkdir()
    text = (tmp_path / "one" / "a.jsonl").read_text()
    (tmp_path / "two" / "a.jsonl").write_text(text.replace("a b c", "d e f"))
    newest = ["one"]

    def load_dataset(name, configuration, split, streaming, revision):
        return load(revision or newest[0], configuration, split=split, streaming=streaming)

    monkeypatch.setattr(sources, "reachable", lambda url: True)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: argparse.Namespace(sha=newest[0]))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = {"workers": 1, "shard_tokens": 30_000}
    for tokenizer in ("bytes", "bpe:300"):
        newest[0] = "one"
        whole = prepare("hf:some/corpus", tmp_path / f"whole {tokenizer}", tokenizer, **options)
        killed = tmp_path / f"killed {tokenizer}"
        with monkeypatch.context() as patch:
            patch.setattr(pipeline.ShardWriter, "_write", stopped_after(1))
            with pytest.raises(KeyboardInterrupt):
                prepare("hf:some/corpus", killed, tokenizer, **options)
        newest[0] = "two"
        assert data.read_manifest(killed)["reading"]["revision"] == "one"
        assert bins(prepare("hf:some/corpus", killed, tokenizer, **options)) == bins(whole)
        assert len(bins(whole)) > 2
    later = prepare("hf:some/corpus", tmp_path / "later", "bytes", **options)
    assert bins(later) != bins(tmp_path / "whole bytes"), "the control"


def in_files(form: str, rows: list[dict], files: int = 8) -> list[Path]:
    """The rows in so many files of the folder `many`."""
    Path("many").mkdir()
    size = -(-len(rows) // files)
    for number in range(files):
        part = rows[number * size:number * size + size]
        if form == "jsonl":
            write_rows(Path("many", f"{number}.jsonl"), *part)
        else:
            write_table(f"many/{number}.parquet", **{name: [row[name] for row in part] for name in part[0]})
    return sorted(Path("many").iterdir())


TEXT_ROWS = [{"text": f"{n} " + "a b c " * (n % 7) * (n % 1000 > 0), "kind": str(n % 2)}
             for n in range(12_000)]  # those that begin a batch have no text
PAIR_ROWS = [{"q": f"{n} " + "?" * (n % 9), "a": "yes " * (n % 5 + 1)} for n in range(12_000)]
OF_PAIRS = {"prompt_field": "q", "response_field": "a", "row": 64}


@pytest.mark.parametrize("form, rows, workers, options", [
    ("jsonl", TEXT_ROWS, 1, {"val_field": "kind", "min_words": 2}),
    pytest.param("parquet", TEXT_ROWS, 2, {"max_samples": 9000}, marks=pytest.mark.full),
    pytest.param("parquet", PAIR_ROWS, 1, OF_PAIRS, marks=pytest.mark.full),
    pytest.param("jsonl", PAIR_ROWS, 2, OF_PAIRS | {"max_tokens": 100_000}, marks=pytest.mark.full)])
def test_a_resumed_prepare_of_the_hub_reads_what_is_left(here, form, rows, workers, options):
    """After any kills it writes the same bytes, without the files that it has read. The first file names the
    fields.
    """
    files = in_files(form, rows)
    options = options | {"val_split": "hash:0.1", "shard_tokens": 20_000, "workers": workers}
    whole = prepare("hf:many", "whole", "bytes", **options)
    writes = len({tuple(shard["end"]) for shard in data.read_manifest(whole)["shards"]})
    assert writes > 4
    for kills in ([1], [writes - 1], [1, 2, max(writes - 5, 1)]):
        shutil.rmtree("killed", ignore_errors=True)
        for kill in kills:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(packing.ShardWriter, "_write", stopped_after(kill))
                prepare("hf:many", "killed", "bytes", **options)
        document = data.read_manifest(Path("killed"))["reading"].get("document", 0)
        read = files[1:max(document - 4000, 0) // (len(rows) // len(files))]  # it reads the last two again
        kept = {path: path.read_bytes() for path in read}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "current_identity",
                          lambda source, out: data.read_manifest(out)["settings"]["source"])
            for path in read:
                path.write_bytes(b"damaged")
            assert read or kills != [writes - 1] or "max_tokens" in options
            if read and kills == [writes - 1]:  # the control: as a manifest from before it was kept
                shutil.copytree("killed", "old")
                forget(Path("old"))
                with pytest.raises(UserError, match="cannot be read"):
                    prepare("hf:many", "old", "bytes", **options)
            assert bins(prepare("hf:many", "killed", "bytes", **options)) == bins(whole), kills
        for path, content in kept.items():
            path.write_bytes(content)
    assert bins(prepare("hf:many", "old", "bytes", **options)) == bins(whole)


def forget(out: Path):
    """Leaves out of a manifest where datasets was."""
    manifest = data.read_manifest(out)
    del manifest["reading"]["state"], manifest["reading"]["document"]
    packing.write_manifest(out, manifest)


def test_torch_is_not_imported_to_read_the_hub(hub):
    """Nor hidden from what is imported later."""
    code = ("import os, sys; from prepare.pipeline import prepare; prepare('hf:corpus', 'out', 'bytes'); "
            "assert 'torch' not in sys.modules and 'USE_TORCH' not in os.environ")
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("name", ["gpt2", pytest.param("hrm", marks=pytest.mark.full),
                                  pytest.param("mlm", marks=pytest.mark.full)])
def test_a_hub_source_has_20_tokens_for_each_parameter_that_is_trained(name, hub):
    trainer = Trainer(f"train_{name}.py", steps=1, tokenizer="bytes")
    done = trainer.train(0, "hf:corpus", "run", d_model=2, n_head=1)
    parameters = int(re.search(r"initializing ([\d,]+) parameters", done.out)[1].replace(",", ""))
    assert f"hf:corpus is prepared up to {20 * parameters:,} tokens, 20 for each parameter" in done.out


def test_a_larger_model_on_the_same_hub_source(hub, monkeypatch, capsys):
    """It takes what was prepared for a smaller one, and both numbers and the way to more are said; not if the
    source has no more, or so many were asked for.
    """
    def note(useful: int, source: str = "hf:corpus", **limits) -> str:
        pipeline.locate(source, "bytes", useful, 0, **limits)
        return "".join(line for line in capsys.readouterr().out.splitlines(True) if line.startswith("note"))

    assert not note(2000)
    text = note(30_000)
    assert "is prepared up to 2,000 tokens, and this model would take 30,000, 20 for each parameter" in text
    command, directory = re.search(r"run python (data.py .*), and give --data (\S+)", text).groups()
    monkeypatch.setattr("sys.argv", command.split())
    data_py.main()
    shards = data.read_manifest(Path(directory))["shards"]
    assert sum(shard["tokens"] for shard in shards if shard["split"] == "train") == 30_000
    assert not any((note(30_000, directory), note(30_000, max_tokens=2000), note(2000), note(1999)))
    shutil.rmtree("shards")
    assert not note(10**6) and not note(10**7)  # there is no more


def test_a_hub_source_that_was_begun_without_max_tokens_is_resumed(hub, monkeypatch):
    """As the shell's `prepare` was killed, and a trainer goes on with it."""
    def killed(self, arrays, documents, position, complete):
        if position[0] > 8:
            raise KeyboardInterrupt
        return write(self, arrays, documents, position, complete)

    write = packing.ShardWriter._write
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing.ShardWriter, "_write", killed)
        pipeline.prepare("hf:corpus", None, "bytes", shard_tokens=1000, workers=1, max_samples=20)
    settings = data.read_manifest(pipeline.locate("hf:corpus", "bytes", 1000, 0))["settings"]
    assert settings["max_samples"] == 20 and settings["max_tokens"] is None
