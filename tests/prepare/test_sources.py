"""prepare/sources.py: each value, encoding, table and path is read as what it is, or refused by name."""

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
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from shard_files import (
    bins,
    documents_of,
    prepared,
    refused,
    stopped_after,
    texts_of,
    write_rows,
    write_table,
    write_texts,
)

import data
from cli.errors import UserError
from prepare import command, packing, pipeline, sources
from vocab.vocabulary import EOT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("set").mkdir()


def written(form: str, *rows: dict) -> str:
    """The rows in the folder `set`, as each kind of source has them."""
    if form in ("parquet", "tables"):
        write_table("set/x.parquet", **{name: [row[name] for row in rows] for name in rows[0]})
        return "parquet:set/*" if form == "parquet" else "hf:set"
    write_rows("set/x.jsonl", *rows)
    if form == "array":
        Path("set/x.jsonl").write_text(json.dumps(rows))
    return "hf:set" if form == "hub" else "jsonl:set/*"


def test_every_source_has_the_same_documents_also_when_it_is_resumed():
    texts = [f"{n} line\nünï 😀 {'x' * n}\r\n" for n in range(45)]
    for n, text in enumerate(texts):
        Path(f"{n:04}.txt").write_bytes(text.encode())
    for n, part in enumerate((texts[:22], texts[22:])):
        write_texts(f"{n}.jsonl", part)
        Path(f"{n}.json").write_text(json.dumps([{"text": text} for text in part]))
        write_table(f"{n}.parquet", n=[0] * len(part), text=part)
        with open(f"{n}.csv", "w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in part)])
    write_texts("set/x.jsonl", texts)
    found = []
    for dataset in "text:*.txt jsonl:*.jsonl jsonl:*.json parquet:*.p* csv:*.csv hf:set".split():
        for start in (0, 21, 22, 45):
            assert texts_of(dataset, start) == texts[start:], (dataset, start)
        found.append(bins(prepared(dataset, f"out{len(found)}", val_split="hash:0.2")))
    assert all(content == found[0] for content in found) and len(found[0]) == 2


# -----------------------------------------------------------------------------------------------------------
# Values and fields


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hub"])
def test_only_null_nan_and_the_empty_string_are_empty(form):
    columns = {"a": [0, 1, None], "b": [0.0, 2.5, float("nan")], "c": [True, False, None],
               "d": ["", "0", "é"]}
    dataset = written(form, *(dict(zip(columns, row)) for row in zip(*columns.values())))
    for field, texts in {"a": ["0", "1", ""], "b": ["0.0", "2.5", ""], "c": ["true", "false", ""],
                         "d": columns["d"]}.items():
        assert texts_of(dataset, text_field=field) == texts


def test_numbers_of_json_are_text_as_they_are_written():
    numbers = ["1.10", "1e400", "-0.0", "7", "9" * 5000, "-Infinity"]
    Path("x.jsonl").write_text("".join(f'{{"text": {number}}}\n' for number in numbers))
    assert texts_of("jsonl:x.jsonl") == numbers


@pytest.mark.parametrize("dataset", ["parquet:set/*", "hf:set"])
def test_values_of_a_table_are_text_as_they_were_written(dataset):
    import pyarrow
    values, texts = [4.2, 1e20, None, float("nan"), 1e-7], ["4.2", "1e+20", "", "", "1e-07"]
    inner = pyarrow.struct({"a": pyarrow.struct({"n": pyarrow.float32()})})
    write_table("set/x.parquet", wide=[4.199999809265137] * 5, raw=["né".encode()] * 5, tree=[[["b"]]] * 5,
                meta=pyarrow.array([{"a": {"n": n}} for n in values], inner),
                half=pyarrow.array(np.array([0.1, 4.2, 2, 6e-5, np.nan], np.float16)))
    for field, found in {"meta.a.n": texts, "wide": ["4.199999809265137"] * 5, "raw": ["né"] * 5,
                         "half": ["0.1", "4.2", "2.0", "6e-05", ""]}.items():
        assert texts_of(dataset, text_field=field) == found
    for field, named in {"meta": "dict", "tree": "list.*--prompt-field"}.items():
        assert re.search(f"set.*{field!r}.* {named}", refused(dataset, text_field=field))


@pytest.mark.parametrize("source", ["parquet:set/*", "hf:set"])
def test_class_labels_have_their_names(source):
    """Of the file that has them, whatever follows."""
    import datasets
    rows, names = {"kind": [1, 0, None]}, datasets.ClassLabel(names=["bad", "good"])
    datasets.Dataset.from_dict(rows, datasets.Features(kind=names)).to_parquet("set/a.parquet")
    assert texts_of(source, text_field="kind") == ["good", "bad", ""]
    write_table("set/b.parquet", **rows)
    assert texts_of("parquet:set/*", text_field="kind")[3:] == ["1", "0", ""]


@pytest.mark.parametrize("form", ["jsonl", "array", "parquet", "hub", "tables"])
def test_a_field_inside_of_another_has_a_name_with_dots(form):
    rows = [{"meta": {"text": "a", "deep": {"n": 1}}, "meta.kind": "b"}, {"meta": None, "meta.kind": "c"}]
    dataset = written(form, *rows)
    for field, texts in {"meta.text": ["a", ""], "meta.deep.n": ["1", ""], "meta.kind": ["b", "c"]}.items():
        assert texts_of(dataset, text_field=field) == texts
    pair = {"prompt_field": "meta.kind", "response_field": "meta.text", "condition_field": "meta.deep.n"}
    assert texts_of(dataset, **pair) == [("b", "a", "1"), ("c", "", "")]
    for field, named in {"meta.x": "'x' .* text, deep:", "x.text": "only meta, meta.kind:"}.items():
        assert re.search(f"'{field}'.*{named}", refused(dataset, text_field=field))


@pytest.mark.parametrize("options, row", [
    ({}, {"content": "a"}), ({"prompt_field": "q", "response_field": "a"}, {"x y": "1", "z": "2"}),
    ({"val_field": "k"}, {"kind": "b", "text": "a"})])
def test_the_command_against_a_missing_field_works(options, row, monkeypatch):
    found = refused(write_rows("my set.jsonl", *[row] * 9), **options)
    assert f"my set.jsonl, line 1, has no field {[*options.values(), 'text'][0]!r}" in found
    assert f"only {', '.join(row)}:" in found
    names = iter(row)
    words = shlex.split(re.search(r"python (data.py prepare .*) and train", found)[1])
    monkeypatch.setattr("sys.argv", [next(names) if word == "NAME" else word for word in words])
    command.main()
    assert data.read_manifest(Path("shards/my-set-bytes"))["complete"]  # with the tokenizer that was given


# -----------------------------------------------------------------------------------------------------------
# Files


def test_byte_order_marks_blank_lines_and_packed_files():
    lines = b'\n{"text": "a"}\r\n \n\n{"text": "b"}\n\n{"text": "c"}'
    text = "first line é\r\n" * 500
    for pack in (bytes, gzip.compress, bz2.compress, lzma.compress):
        for mark in (b"", codecs.BOM_UTF8):
            Path("x.jsonl").write_bytes(pack(mark + lines[bool(mark):]))
            Path("x.txt").write_bytes(pack(mark + text.encode()))
            assert texts_of("jsonl:x.jsonl") == ["a", "b", "c"] and texts_of("jsonl:x.jsonl", 2) == ["c"]
            assert texts_of("text:x.txt") == ["".join(texts_of("text:x.txt", val_split="tail:0.1"))] == [text]
    Path("x.txt").write_bytes(bz2.compress(b"") + bz2.compress(b"a"))
    assert texts_of("text:x.txt") == ["a"]


def test_texts_that_look_a_little_like_something_else_are_read():
    for text in "BZh9, he said.", "PK and", "%PDX", "x" * 257 + "ustas", "7z\n", "Rar! a bear", "%PDF\n":
        Path("x.txt").write_text(text)
        assert texts_of("text:x.txt") == [text]


def test_a_file_without_a_prefix_is_named_with_one():
    """Also one with a slash in its name, which for a trainer would be a directory."""
    for name, source in {"set/a.txt": "text", "./a.txt": "text", "a": "text", "set/a.jsonl": "jsonl",
                         "a.json.gz": "jsonl", "A.CSV": "csv", "a.tsv": "tsv"}.items():
        Path(name).write_text("text")
        with pytest.raises(UserError, match=f"'{source}:{name}'"):
            pipeline.locate(name, "bytes", 1000, 0)
    assert data.read_manifest(pipeline.prepare("text:set/a.txt", "out", "bytes", workers=1))["complete"]


@pytest.mark.parametrize("name, raw, where, command, text", [
    ("a book", b"good line\n" * 200_000 + b"\xf1\n", "byte 2000001 in line 200001, .*0xf1", "iconv -f", "ñ"),
    ("a book", b"\xef\xbb\xbfa\nb\0c\n", "byte 7 in line 2, .*0x00", "tr", "bc"),
    ("new", "é\n".encode() * 400_000 + b"x\xff\n", "byte 1200002 in line 400001, .*0xff", "iconv -c", "é"),
    ("a book", "hello\n".encode("utf-16"), "byte 1 in line 1, .*UTF-16 ", "iconv -f", "hello")])
def test_a_command_against_an_encoding_works(name, raw, where, command, text):
    """It never writes over the file that it reads."""
    path = Path(f"{name}.txt")
    path.write_bytes(raw)
    found = refused(f"text:{path}")
    assert re.search(f"{path}, {where}", found), found
    line, mended = re.search(rf"({command} [^,]*?{shlex.quote(str(path))} > (\w+.txt))", found).groups()
    # iconv -c ends with 1
    subprocess.run(line.replace("CP1252", "UTF-16" if text == "hello" else "CP1252"), shell=True, timeout=60)
    assert text in texts_of(f"text:{mended}")[0] and path.read_bytes() == raw


DEEP = "[" * 100_000 + "]" * 100_000
REFUSED = {  # the source, its content, and what the message names
    "jsonl:latin.jsonl": (b'{"text": "a"}\n{"text": "ma\xf1ana"}\n', "latin.jsonl, byte 13 .* 2, .*0xf1"),
    "jsonl:deep.jsonl": (f'{{"text": "a", "tree": {DEEP}}}\n'.encode(), "deep.jsonl, line 1, .*nested"),
    "jsonl:list.jsonl": (b'\n{"text": ["a"]}\n', "list.jsonl, line 2, .*'text'.* list.*--prompt-field NAME"),
    "jsonl:twice.json": (b'[{"text": "a", "text": "b"}]\n', "twice.json, item 1, .*twice"),
    "csv:latin.csv": (b"text,n\na,1\nma\xf1ana,2\n", "latin.csv, byte 3 of line 3, .*0xf1"),
    "csv:field.csv": (b"body,n\na,1\n", "field.csv, line 2, .*'text', only body, n:"),
    "csv:twice.csv": (b"text,text\na,b\n", "twice.csv, line 2, .*'text' more than once"),
    "text:x.zst": (b"\x28\xb5\x2f\xfd1234", "^x.zst .*zstd -d"),
    "text:x.arrow": (b"\xff\xff\xff\xff\x98\x04\0\0", "x.arrow .*load_from_disk"),
    "jsonl:x.docx": (b"PK\x03\x04\x14", "x.docx .*zip"),
    "text:x.tar.gz": (gzip.compress(b"a" * 257 + b"ustar"), "tar xf"),
    "x.pdf": (b"%PDF-1.4\nof letters alone", "^x.pdf .*pdftotext"),
    "text:x.parquet": (b"PAR1\x15\x04", "parquet:"),
    "x.npy": (b"\x93NUMPY\1\0v", "^x.npy .*uint16.*write_shard.*numpy.load"),
    "x.bin": (b"\1\0\2\0", "^x.bin .*uint16.*int32.*write_shard"),
    "text:x.bin": (b"\xa1\xd94\1\7\0\0\0", "^x.bin .*directory of a shard"),
    "text:x.rtf": (b"{\\rtf1\\ansi plain letters}", "document"),
    "jsonl:1.json": (b'["a"]', "1.json, item 1,"),
    "jsonl:3.json": (b'[{"text": "a"},]', "item 2,"),
    "jsonl:4.json": (b'[{"text": "a"}', "item 2,"),
    "jsonl:6.json": (b'[{"text": "a"}] and', "item 2,"),
    "csv:1.csv": (b"text,n\na,1\nb,c,2\n", "1.csv, line 3, .*tsv:"),
    "csv:3.csv": (b'text,n\na,1\n"open,2\nb,3\n', "line 4, "),
    "csv:4.csv": (b'text,n\n"she said \\"no\\", twice",1\n', "line 2, .*csv.writer"),
    "tsv:2.tsv": (b'text\tn\n"a\tb"\t1\n' + b"c\t2\n" * 1000 + b'\n"open\nquote"\t3\n', "line 1004, "),
    "tsv:3.tsv": (b'text\tn\n"Yes.\tNo."\t1\n"No\t2\n', "line 2, ")}


@pytest.mark.parametrize("source", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_place(source):
    content, named = REFUSED[source]
    Path(source.rpartition(":")[2]).write_bytes(content)
    found = refused(source)
    assert re.search(named, found), found


def test_more_that_cannot_be_read(monkeypatch):
    assert re.search("x.parquet.*0xff", refused(write_table("x.parquet", text=[b"a", b"\xff"])))
    monkeypatch.setattr(sources, "BLOCK", 1)
    Path("x.txt").write_text("a text that is longer than 64 letters if it is repeated " * 2)
    assert re.search("x.txt .*'<end>'.*--split-on", refused("text:x.txt", split_on="<end>"))


def test_paths_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("[EN] books").mkdir()
    for name in ("book [1984].txt", "[EN] books/a.txt", "b*.txt", "b1.txt"):
        Path(name).write_text(name)
    for path, names in {"~/b1.txt": ["b1.txt"], "book [1984].txt": ["book [1984].txt"], "b*.txt": ["b*.txt"],
                        "[EN] books/*.txt": ["[EN] books/a.txt"], "b[12].txt": ["b1.txt"],
                        "**/*.txt": ["[EN] books/a.txt", "b*.txt", "b1.txt", "book [1984].txt"]}.items():
        assert texts_of(f"text:{path}") == names, path


def test_links_give_each_file_once(capsys):
    Path("set/t.txt").write_text("text")
    os.symlink("..", "set/up")
    os.symlink("set/t.txt", "link.txt")
    assert texts_of("text:set/**/*.txt") == texts_of("text:link.txt") == ["text"]
    for name in "ac":  # two files with the same text
        Path(f"{name}.txt").write_text("text")
    os.link("a.txt", "b.txt")
    assert texts_of("text:?.txt") == ["text", "text"]
    assert "3 names that match ?.txt are 2 files" in capsys.readouterr().out


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_documents_between_separators(monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    stories = [f"Once a cat {n}.\n" for n in range(9)]
    Path("x.txt").write_text(EOT.join(stories))
    assert texts_of("text:x.txt", split_on=EOT) == stories
    Path("x.txt").write_bytes(b"a\r\nb\r\n\r\nc\n\nd")
    assert texts_of("text:x.txt", split_on="\r\n\n") == ["a\r\nb", "c", "d"]


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_separator_is_found_with_any_line_end_and_files_without_it_are_counted(monkeypatch, capsys, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    for name, end in ("unix", "\n"), ("windows", "\r\n"):
        Path(f"set/{name}").write_text(f"a{end}b{end}{end}c", newline="")
        assert texts_of(f"text:set/{name}", split_on="\n\n") == [f"a{end}b", "c"]
    Path("set/none").write_text("a\nb")
    prepared("text:set/*", "out", split_on="\n\n")
    assert "1 of 3 files" in capsys.readouterr().out


def test_stdlib_is_what_this_python_has(monkeypatch):
    Path("set/site-packages").mkdir()
    for name, raw in {"b": b"b = 2\n", "a": b"a = 3\n", "latin": b"\xe9", "site-packages/c": b"c\n"}.items():
        Path(f"set/{name}.py").write_bytes(raw)
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": "set"}.get)
    assert documents_of(prepared("stdlib", "out")) == ["a = 3\n", "b = 2\n"]


def test_pieces_end_with_a_line_or_a_word_and_lose_nothing(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 10)
    for text, expected in {"a" * 25: ["a" * 10] * 2 + ["a" * 5], "a" * 8 + "\nb": ["a" * 8 + "\n", "b"],
                           "ab cd efgh ij": ["ab cd", " efgh ij"], " abcdefghijk": [" abcdefghi", "jk"],
                           "a\nb c d e f": ["a\n", "b c d e f"], "": []}.items():
        assert [*sources.pieces([text])] == expected
        assert max(map(len, sources.pieces([text] * 9)), default=0) < 20


@pytest.mark.parametrize("alphabet", ["a", "é", "日", "aé日😀"])
def test_the_last_tenth_never_begins_inside_a_character(alphabet):
    for length in range(1, 40):
        raw = (alphabet * 40)[:length].encode()
        Path("x.txt").write_bytes(raw)
        cut = int(len(raw) * 0.9)
        while raw[cut:] and raw[cut] & 0xC0 == 0x80:
            cut += 1
        parts = [part.decode() for part in (raw[:cut], raw[cut:]) if part]
        assert texts_of("text:x.txt", val_split="tail:0.1") == parts


# -----------------------------------------------------------------------------------------------------------
# Tables and arrays

TABLES = {  # each is the same two rows; a row of tab.tsv ends with its line
    "comma.csv": b'text,n\r\n"One, ""two"";\r\nthree",007\r\n\r\n\xc3\xb1,NA\r\n',
    "marked.csv": codecs.BOM_UTF8 + b'n,text\n007,"One, ""two"";\r\nthree"\nNA,\xc3\xb1',
    "semicolon.csv": b'text;n\n"One, ""two"";\r\nthree";007\n\xc3\xb1;NA\n',
    "tab.tsv": b'text\tn\n"One, ""two"";\tthree"\t007\n\xc3\xb1\tNA\n'}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_as_it_stands(name):
    kind = name[-3:]
    rows = ['One, "two";\tthree' if kind == "tsv" else 'One, "two";\r\nthree', "ñ"]
    for file, pack in ((name, bytes), (f"{name}.gz", gzip.compress)):
        Path(file).write_bytes(pack(TABLES[name]))
        assert texts_of(f"{kind}:{file}") == rows
    assert texts_of(f"{kind}:{name}", text_field="n") == ["007", "NA"]
    Path(f"{name}.0").touch()  # a file without rows adds none
    assert texts_of(f"{kind}:{name}*") == 2 * rows


ROWS = "text\tn\n" + "".join(f"row {n} of a tsv\t{n}\n" for n in range(1200))


@pytest.mark.parametrize("text, quoted, some", [
    ('5" of rain\t""\n', False, '5" of rain'),
    ('"Yes, he said.\t1\nNo."\t2\n', False, '"Yes, he said.'),
    ('"""Yes"" he said."\t1\n', True, '"Yes" he said.'), ('"Yes.\tNo."\t1\r\n"No."\t2\n', True, "No.")])
def test_quotes_in_a_tsv_enclose_fields_only_if_they_have_to(capsys, text, quoted, some):
    Path("x.tsv").write_text(ROWS.replace("\n", f"\n{text}", 1), newline="")
    source = sources.Source("tsv:x.tsv", pipeline.settings_of("tsv:x.tsv"))
    documents = ["".join(texts) for texts, *_ in source.documents(0)]
    assert some in documents and len(documents) == 1200 + text.count("\n")
    assert source.reading == {"quoted": quoted} and ("enclose" in capsys.readouterr().out) == quoted


def test_a_tsv_of_r_has_quotes_around_all_texts():
    """Its header, too. A name with a quote in front, beside others, is text."""
    for head, texts in ('"text"\t"n"', ["a b"]), ('"text\tn', None):
        Path("x.tsv").write_text(f'{head}\n"a b"\t1\n')
        assert sources.quotes_enclose([Path("x.tsv")]) == (texts is not None)
    Path("x.tsv").write_text('"text"\t"n"\n"a b"\t1\n')
    source = sources.Source("tsv:x.tsv", pipeline.settings_of("tsv:x.tsv"))
    assert ["".join(texts) for texts, *_ in source.documents(0)] == ["a b"]


def test_how_a_tsv_is_quoted_is_kept(monkeypatch):
    """Of one that was begun when all of them were read as a csv."""
    Path("x.tsv").write_text(ROWS.replace("\n", '\n"a b"\t1\n', 1))
    make = {"val_split": "hash:0.000001", "shard_tokens": 5000}
    with monkeypatch.context() as patch:
        patch.setattr(sources, "quotes_enclose", lambda files: True)
        manifest = stopped_after(1, "tsv:x.tsv", "out", **make)
    del manifest["reading"]
    packing.write_manifest(Path("out"), manifest)
    assert documents_of(prepared("tsv:x.tsv", "out", **make))[0] == "a b"


@pytest.mark.parametrize("dataset, text, begun", [
    ("jsonl:x", json.dumps([{"text": "word " * 30_000}] * 99), '[{"text": "'),
    ("csv:x", "text\n" + ("word " * 30_000 + "\n") * 99, 'text\n"')])  # longer than csv's own limit
def test_tables_and_arrays_are_not_held_in_memory(monkeypatch, dataset, text, begun):
    """The first rows are there when little has been read, and what does not end is refused before all is."""
    Path("x").write_text(text)
    source = sources.Source(dataset, pipeline.settings_of(dataset))
    for texts, *_ in itertools.islice(source.documents(0), 2):
        assert "".join(texts) == "word " * 30_000
    assert 0 < source.progress.done < 0.1 * len(text) and source.progress.total == len(text)
    Path("x").write_text(begun + "a\n" * 5000)
    for name, size in {"LONGEST": 1000, "BLOCK": 200}.items():
        monkeypatch.setattr(sources, name, size)
    assert re.search("item 1,|1000", refused(dataset))


@pytest.mark.parametrize("block, indent", [(1, None), (7, 2), (1 << 20, None)])
def test_an_array_is_read_as_its_lines_are(monkeypatch, block, indent):
    monkeypatch.setattr(sources, "BLOCK", block)
    rows = [{"text": "]},{ é 日", "n": 1.10}, {"text": None, "tree": [[{"b": []}]]}, {"n": 2, "text": "x"}]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    for raw, texts in ((text.encode(), ["]},{ é 日", "", "x"]), (b"[ ]", []),
                       (codecs.BOM_UTF8 + f"\n {text}\n".encode(), ["]},{ é 日", "", "x"])):
        Path("x.json").write_bytes(raw)
        assert texts_of("jsonl:x.json") == texts


# -----------------------------------------------------------------------------------------------------------
# Sums and the network


def test_sums_have_a_level_and_the_harder_half_is_held_out():
    source = sources.Source("task:addition", pipeline.settings_of("task:addition", max_samples=9))
    found = [*itertools.islice(source.documents(0), 1000)]
    assert [*itertools.islice(source.documents(20), 30)] == found[20:50]
    assert found[999] == (("290471729433+770288180824", "1060759910257"), None, "trained-1")  # as it was
    for (prompt, answer), split, name in found:
        a, b = prompt.split("+")
        nines = "".join("x" if int(x) + int(y) == 9 else " " for x, y in zip(a, b, strict=True))
        level = max(map(len, nines.split()))
        assert len(prompt) == 25 and answer == f"{int(a) + int(b):013}"
        assert (name, split) == ((f"trained-{level}", None) if level <= 4 else (f"untrained-{level}", "val"))
    assert len({name for *_, name in found}) == 8 and 5 < sum(split == "val" for _, split, _ in found) < 60


@pytest.fixture
def server(monkeypatch):
    """A socket that listens, without proxies."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield server


def test_a_host_that_never_answers_counts_as_unreachable(server):
    """A full queue of connections, as behind a firewall that drops packets."""
    address = server.getsockname()
    assert sources.reachable(f"http://127.0.0.1:{address[1]}")
    full = [socket.socket() for _ in range(4)]
    for client in full:
        client.setblocking(False)
        client.connect_ex(address)
    assert not sources.reachable(f"http://127.0.0.1:{address[1]}", 0.3)


@pytest.mark.parametrize("name, form", [("https_proxy", "{}"), ("ALL_PROXY", "socks5://{}")])
def test_a_proxy_in_any_form_is_asked(server, monkeypatch, name, form):
    """Without a scheme, as curl takes it, or the one proxy for all."""
    monkeypatch.setenv(name, form.format(f"127.0.0.1:{server.getsockname()[1]}"))
    assert sources.reachable("https://host.invalid")
    monkeypatch.setenv("no_proxy", "host.invalid")
    assert not sources.reachable("https://host.invalid")
    monkeypatch.delenv("no_proxy")
    for proxy in "http://127.0.0.1:nope", "http://[::1":
        monkeypatch.setenv(name, proxy)
        assert "stanfordnlp/imdb" in refused("imdb")
