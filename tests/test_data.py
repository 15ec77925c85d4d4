"""data.py: text becomes shards, shards become batches, and mistakes become one sentence.

What is tested: prepare gives the same bytes with any number of workers and after any number of kills; the
shards are those of llm.c; every tokenizer agrees with the `tokenizers` package about its own tokenizer.json;
the order of samples depends on nothing but seed and position; validation counts each row once. (Bad input
has a table of its own in tests/faults.) Where things must be equal, a second check shows that a
broken version is not.
"""

import argparse
import contextlib
import copy
import functools
import gzip
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, finish, place, run, start, torchrun

import data
import model
from cli.errors import RetryableError, UserError
from cli.files import write_atomically
from cli.parser import ArgumentParser, parse_count
from prepare import command as data_py
from prepare import packing, pipeline, sources
from startup.plan import plan_batch
from vocab import bpe, tokenizer_json
from vocab.tokenizer import PATTERNS, Tokenizer, load_tokenizer, parse_tokenizer_json
from vocab.vocabulary import EOT, MASK
from weights import huggingface, sampling

EOT = EOT


def tree(directory: Path, without: str = "-") -> dict[str, bytes]:
    """Every file below a directory with its content, but for the subdirectory `without`."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*"))
            if p.is_file() and p.relative_to(directory).parts[0] != without}


def bins(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.bin")}


def read_like_llmc(path: Path) -> np.ndarray:
    header = np.fromfile(path, "<i4", 256)
    magic, version, count = header[:3].tolist()
    width = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[magic, version]
    tokens = np.fromfile(path, width, offset=1024)
    assert len(tokens) == count and not header[3:].any()
    return tokens


def read_split(directory: Path, split: str) -> list[int]:
    return [i for path in sorted(directory.glob(f"{split}_*.bin")) for i in read_like_llmc(path).tolist()]


def read_documents(directory: Path, split: str) -> list[str]:
    """The documents of a split as text; each begins with end-of-text."""
    manifest = json.loads((directory / "manifest.json").read_text())
    tokenizer = parse_tokenizer_json("recorded", (directory / "tokenizer.json").read_text())
    ids = read_split(directory, split)
    begins = [n for n, i in enumerate(ids) if i == manifest["tokenizer"]["eot"]]
    assert begins[:1] == [0][:len(ids)], "the first document has no end-of-text in front"
    return [tokenizer.decode(ids[a + 1:b]) for a, b in itertools.pairwise([*begins, len(ids)])]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="session", autouse=True)
def vocabularies():
    """tiktoken reads from the machine's cache of vocabularies and not from the network."""
    with pytest.MonkeyPatch.context() as patch:
        if (SHARED / "tiktoken").is_dir():
            patch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
        yield


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Texts of all lengths, no two alike, and a long one, which prepare cuts into pieces of a million."""
    code = "".join(p.read_text(encoding="utf-8") for p in sorted(Path(os.__file__).parent.glob("*.py")))
    chance, at, texts = random.Random(0), 0, []
    while at < 1_500_000:
        size = chance.choice([1, 30, 1_000, 20_000, 60_000])
        texts.append(f"{len(texts)} ünï 😀 {code[at:at + size]}")
        at += size
    return [*texts[:40], "long " + code[:1_500_000], *texts[40:]]


@pytest.fixture(scope="session")
def many(documents, tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("many") / "many.jsonl", documents)


def prepare_command(source: Path, out: Path, *more):
    """The command line of the tests that compare whole directories: about 40 shards."""
    return torchrun(0, "data.py", "prepare", "--dataset", f"jsonl:{source}", "--out", out,
                    "--tokenizer", "bpe:600", "--shard-tokens", "20k", "--val-split", "hash:0.1", *more)


@pytest.fixture(scope="session")
def undisturbed(many, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    result = finish(start(prepare_command(many, out, "--workers", "1")))
    assert result.code == 0, result.out
    return out


@pytest.fixture(scope="session")
def dataset(shards) -> data.Dataset:
    return data.Dataset([shards], 64)


def source_of(dataset: str, **options) -> sources.Source:
    return sources.Source(dataset, pipeline.settings_of(dataset, **options))


# -----------------------------------------------------------------------------------------------------------
# prepare: the same bytes, whatever happens


def test_workers_change_nothing(many, undisturbed, tmp_path):
    result = finish(start(prepare_command(many, tmp_path / "out", "--workers", "3")))
    assert result.code == 0, result.out
    assert tree(tmp_path / "out") == tree(undisturbed)
    assert len(list(undisturbed.glob("train_*.bin"))) > 20, "too few shards to be a test of their order"


def test_batches_come_back_in_order():
    """More batches than wait at one time, of very different sizes, so that workers overtake each other."""
    chance = random.Random(1)
    batches = [[(n, 0, "train", chance.choice("ab") * chance.choice([10, 100, 500_000]))] for n in range(60)]
    ended = []

    def encode(batch, *arguments):
        time.sleep(len(batch[0][-1]) / 1e7)
        found = pipeline.encode(batch, *arguments)
        ended.append(batch)
        return found

    tokenizer, source = load_tokenizer("bytes"), argparse.Namespace(pairs=False)
    one, three = ([(batch, [a.tolist() for a in arrays]) for batch, (arrays, _) in
                   data.in_order(batches, workers, encode, source, tokenizer)] for workers in (1, 3))
    assert [batch for batch, _ in three] == batches and three == one
    assert ended[:60] == batches and ended[60:] != batches, "no worker has overtaken another"


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_of_a_worker_names_the_document(tmp_path, workers, monkeypatch):
    """The first of two, by its number, which in a file of JSON lines is that of the line."""
    spec = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {"known": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    plain = tokenizer_json.HuggingFaceTokenizer.encode

    def fragile(self, text):
        if text == "other" or text == "more":
            raise ValueError("no token")
        return plain(self, text)

    monkeypatch.setattr(tokenizer_json.HuggingFaceTokenizer, "encode", fragile)
    monkeypatch.setattr(tokenizer_json.HuggingFaceTokenizer, "lost_in", lambda *_: Counter())
    source = write_jsonl(tmp_path / "a.jsonl", ["known"] * 40 + ["other"] + ["known"] * 40 + ["more"] * 40)
    monkeypatch.setattr(pipeline.in_batches, "__defaults__", (60,))  # a batch has twelve lines

    def prepare(name: str, tokenizer: str) -> None:
        pipeline.prepare(f"jsonl:{source}", tmp_path / name, tokenizer, workers=workers)

    message = r"a.jsonl, document 41, cannot be encoded: ValueError\(.*no token"
    with pytest.raises(UserError, match=message):
        prepare("out", str(tmp_path / "tokenizer.json"))

    class Panic(BaseException):
        """What a panic of Rust becomes."""

    def encode(self, text):
        if text == "more":
            raise Panic("not a boundary")
        return np.zeros(1, np.uint8)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(UserError, match=r"document 82, cannot be encoded: Panic\('not a boundary'\)\.$"):
        prepare("panic", "bytes")


def test_a_bpe_is_trained_in_a_thread(corpus, tmp_path, monkeypatch):
    """So Ctrl-C need not wait for `tokenizers`, which looks for signals only when it has finished."""
    threads, train = [], bpe.train_bpe

    def recorded(*arguments):
        threads.append(threading.current_thread())
        return train(*arguments)

    monkeypatch.setattr(pipeline, "train_bpe", recorded)
    pipeline.prepare(f"text:{corpus}", tmp_path / "out", "bpe:300", workers=1)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_another_val_split_gives_other_bytes(many, undisturbed, tmp_path):
    """Shows that the comparison above can fail."""
    finish(start(prepare_command(many, tmp_path / "out", "--workers", "1", "--val-split", "hash:0.11")))
    assert tree(tmp_path / "out") != tree(undisturbed)


def kill_after(shards: int, command, out: Path) -> None:
    """Kills the process group as soon as so many shards exist."""
    process = start(command)
    while len(list(out.glob("train_*.bin"))) < shards:
        assert process.poll() is None, f"ended before it had {shards} shards: {process.communicate()[0]}"
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process).code == -signal.SIGKILL, "it was faster than the kill"
    assert not json.loads((out / "manifest.json").read_text())["complete"]


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("moments", [(1, 12), pytest.param((5, 6), marks=pytest.mark.long),
                                     pytest.param((20, 21), marks=pytest.mark.long)])
def test_killed_twice(many, undisturbed, tmp_path, workers, moments):
    out = tmp_path / "out"
    command = prepare_command(many, out, "--workers", workers)
    for shards in moments:
        kill_after(shards, command, out)
    result = finish(start(command))
    assert result.code == 0 and "resumes after" in result.out, result.out
    assert tree(out) == tree(undisturbed)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in data.py may catch it."""


@pytest.fixture
def few(tmp_path, monkeypatch) -> Path:
    """Documents of two or three pieces, so that shards end inside of some."""
    monkeypatch.setattr(sources, "BLOCK", 100)
    return write_jsonl(tmp_path / "few.jsonl", [f"{n} " * 80 for n in range(16)])


def prepare_few(few: Path, out: Path, **limits) -> None:
    settings = {"val_split": "hash:0.3", "shard_tokens": 500, "workers": 1} | limits
    pipeline.prepare(f"jsonl:{few}", out, "bytes", **settings)


def stopped_at_rename(number: int, after: bool, few: Path, out: Path, **limits) -> bool:
    """Runs prepare and kills it before or after its rename `number`. False if it has fewer."""
    count, rename = itertools.count(), os.replace

    def replace(source, target):
        reached = next(count) == number
        if reached and not after:
            raise Killed
        rename(source, target)
        if reached:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            prepare_few(few, out, **limits)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("limits", [
    {"max_samples": 15}, {"max_tokens": 1700}, {"val_split": "hash:0.000001"}])
def test_killed_at_every_rename(few, tmp_path, after, limits):
    """Every file appears by a rename, so these are all the states that a kill can leave behind."""
    prepare_few(few, tmp_path / "undisturbed", **limits)
    expected = tree(tmp_path / "undisturbed")
    for number in itertools.count():
        out = tmp_path / f"killed-{number}"
        if not stopped_at_rename(number, after, few, out, **limits):
            break
        prepare_few(few, out, **limits)
        assert tree(out) == expected, f"killed at rename {number}"
    assert number >= 10


def counts_of(out: Path) -> dict[str, int]:
    tokens = Counter()
    for shard in data.read_manifest(out)["shards"]:
        tokens[shard["split"]] += shard["tokens"]
    return dict(tokens)


def test_a_limited_text_is_cut_and_its_end_is_held_out(tmp_path):
    """Also in the middle of a piece, with several workers, and killed at every rename."""
    for i in range(2):
        words = random.Random(i).choices(["the", "sea", "ships", "whales"], k=300_000)
        (tmp_path / f"{i}.txt").write_text(" ".join(words))
    source = f"text:{tmp_path}/?.txt"
    ends = [(tmp_path / f"{i}.txt").stat().st_size for i in range(2)]
    for limit in (1000, sources.BLOCK + 1000, ends[0] + 1000):
        out = pipeline.prepare(source, tmp_path / f"{limit}", "bytes", workers=1, max_tokens=limit)
        assert counts_of(out) == {"train": limit, "val": sum(ends) - int(sum(ends) * 0.9) + 1}
        tokens = np.concatenate([data.open_shard(path) for path in sorted(out.glob("train_*.bin"))])
        whole = pipeline.prepare(source, tmp_path / "whole", "bytes", workers=1)
        assert (tokens == data.open_shard(whole / "train_000000.bin")[:limit]).all()
        assert (out / "val_000000.bin").read_bytes() == (whole / "val_000000.bin").read_bytes()
    small = {"max_tokens": 700_000, "shard_tokens": 200_000, "workers": 1}
    pipeline.prepare(source, tmp_path / "undisturbed", "bytes", **small)
    pipeline.prepare(source, tmp_path / "workers", "bytes", **small | {"workers": 3})
    expected = tree(tmp_path / "undisturbed")
    assert tree(tmp_path / "workers") == expected
    for number in itertools.count():
        out = tmp_path / f"killed-{number}"
        rename, count = os.replace, itertools.count()

        def replace(source, target, number=number, rename=rename, count=count):
            rename(source, target)
            if next(count) == number:
                raise Killed

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(os, "replace", replace)
            pipeline.prepare(source, out, "bytes", **small)
            break
        pipeline.prepare(source, out, "bytes", **small)
        assert tree(out) == expected, f"killed at rename {number}"
    assert number >= 4


@pytest.mark.parametrize("limits", [{"max_tokens": 3000}, {"max_samples": 12}, {}])
def test_a_limited_set_has_a_validation_split_or_names_one(tmp_path, limits):
    """The --val-split that is named is given literally. For so many documents it works."""
    without = set()
    for i in range(12):
        path = tmp_path / f"{i}.jsonl"
        texts = (random.Random(i * 1000 + j).choices("abcdefgh ", k=400) for j in range(12))
        path.write_text("\n".join(json.dumps({"text": "".join(text)}) for text in texts))
        out = pipeline.prepare(f"jsonl:{path}", tmp_path / f"{i}", "bytes", workers=1, **limits)
        assert data.read_manifest(out)["settings"]["val_split"] == "hash:0.1"
        tokens = counts_of(out)
        assert tokens["train"] <= limits.get("max_tokens", 10_000)
        if "val" not in tokens:
            without.add(i)
            named = re.search(r"--val-split (\S+) ", pipeline.describe(data.read_manifest(out)))[1]
            again = pipeline.prepare(f"jsonl:{path}", tmp_path / f"{i}-again", "bytes", workers=1,
                                     val_split=data_py.parse_val_split(named), **limits)
            assert counts_of(again).keys() == {"train", "val"}, named
    assert without and len(without) < 12


def test_a_limit_leaves_out_the_pair_that_exceeds_it(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"q": str(i), "a": "x" * 20}) for i in range(40)))
    each = 3 + 20  # tokens of each of the first ten: the start, a digit, the marker and the response
    for limit, samples in ((4 * each + 5, 4), (5 * each - 1, 4), (5 * each, 5), (10_000, 40)):
        out = pipeline.prepare(f"jsonl:{path}", tmp_path / f"{limit}", "bytes", workers=1, prompt_field="q",
                               response_field="a", max_tokens=limit, val_split="hash:0.000001")
        counts = data.read_manifest(out)["pairs"]
        assert counts["samples"] == samples and counts["read"] <= limit


def test_a_wrong_position_in_the_manifest_gives_other_bytes(few, tmp_path):
    """Shows that the comparison above depends on where a prepare resumes."""
    prepare_few(few, tmp_path / "undisturbed")
    assert stopped_at_rename(8, True, few, tmp_path / "killed")
    path = tmp_path / "killed" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][-1]["end"][0] += 1
    packing.write_manifest(path.parent, manifest)
    prepare_few(few, tmp_path / "killed")
    assert tree(tmp_path / "killed") != tree(tmp_path / "undisturbed")


def test_a_mistake_before_the_first_shard_can_be_fixed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nnonsense\n')
    with pytest.raises(UserError, match="line 2"):
        pipeline.prepare(f"jsonl:{path}", tmp_path / "out", "bytes", workers=1, val_split="hash:0.01")
    write_jsonl(path, ["one", "two"])
    pipeline.prepare(f"jsonl:{path}", tmp_path / "out", "bytes", workers=1, val_split="hash:0.01")
    assert read_documents(tmp_path / "out", "train") == ["one", "two"]


def test_two_processes_prepare_the_same_directory(many, undisturbed, tmp_path):
    """As several trainers that start at once on one machine: one prepares, the other waits for it."""
    both = [start(prepare_command(many, tmp_path / "out", "--workers", "1")) for _ in range(2)]
    results = [finish(process) for process in both]
    assert [result.code for result in results] == [0, 0], results
    assert sorted("waiting for another process" in result.out for result in results) == [False, True]
    assert tree(tmp_path / "out") == tree(undisturbed)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_atomically(path, b"new")
    assert tree(tmp_path) == {"file": b"old"}


# -----------------------------------------------------------------------------------------------------------
# Shards


def test_the_reader_of_llmc_gives_the_text_back(corpus, shards):
    train, val = read_split(shards, "train"), read_split(shards, "val")
    assert train[0] == val[0] == 256, "a document starts with end-of-text"
    assert bytes(train[1:] + val[1:]) == corpus.read_bytes()


def test_documents_come_back_in_order(documents, undisturbed):
    train, val = read_documents(undisturbed, "train"), read_documents(undisturbed, "val")
    assert sorted(train + val) == sorted(documents)
    place = {text: n for n, text in enumerate(documents)}
    assert sorted(train, key=place.get) == train and sorted(val, key=place.get) == val
    assert len(train) > 2 * len(val) > 0  # a tenth of some eighty, which differ with the version of Python


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """A directory of uint32 shards: its tokenizer knows 70,000 words and is not a byte-level BPE."""
    folder = tmp_path_factory.mktemp("words")
    vocab = {f"w{i}": i for i in range(70_000)} | {"[UNK]": 70_000}
    spec = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "text.txt").write_text(" ".join(f"w{i * 7 % 70_000}" for i in range(20_000)))
    tokenizer = str(folder / "tokenizer.json")
    return pipeline.prepare(f"text:{folder}/text.txt", folder / "out", tokenizer, workers=1)


def test_a_large_vocabulary_makes_shards_of_32_bits(words):
    tokens = read_like_llmc(words / "train_000000.bin")
    assert tokens.dtype == np.uint32 and tokens[0] == 70_001 and tokens.max() > 65_535
    dataset = data.Dataset([words], 50)
    (x, _), *_ = data.validation_batches(dataset.train, 32, place(0, 1))
    assert x.flatten().tolist() == [70_001, *(i * 7 % 70_000 for i in range(32 * 50 - 1))]
    assert dataset.tokenizer.decode(x[1]) == " ".join(f"w{i * 7 % 70_000}" for i in range(49, 99))


@pytest.mark.parametrize("vocab_size, dtype", [(258, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_shard_dtype_has_room_for_mask(vocab_size, dtype):
    assert packing.shard_dtype(vocab_size) == dtype
    assert vocab_size <= np.iinfo(dtype).max  # [MASK] is the id `vocab_size`


def test_shards_without_a_manifest_need_a_tokenizer(shards, dataset, tmp_path):
    for path in shards.glob("*.bin"):
        shutil.copy(path, tmp_path)
    with pytest.raises(UserError, match="--tokenizer"):
        data.Dataset([tmp_path], 64)
    bare = data.Dataset([tmp_path], 64, "bytes")
    for mine, theirs in (bare.train, dataset.train), (bare.val[""], dataset.val[""]):
        assert [a.tolist() for a in mine.tokens] == [a.tolist() for a in theirs.tokens]
    again = data.Dataset([tmp_path], 64, "bytes")
    assert bare.fingerprint == again.fingerprint
    flip(tmp_path / "train_000000.bin", 5000)
    changed = data.Dataset([tmp_path], 64, "bytes")
    assert bare.fingerprint != changed.fingerprint


def test_shards_of_two_widths_do_not_mix(shards, words, tmp_path):
    shutil.copy(shards / "train_000000.bin", tmp_path)
    shutil.copy(words / "train_000000.bin", tmp_path / "train_000001.bin")
    with pytest.raises(UserError, match="mixes"):
        data.Dataset([tmp_path], 64, "bytes")


# -----------------------------------------------------------------------------------------------------------
# The split


@pytest.fixture(scope="session")
def splits(documents, undisturbed) -> dict[str, str]:
    return {text: split for split in ("train", "val") for text in read_documents(undisturbed, split)}


def split_of(source: Path, out: Path, fraction="0.1", **limits) -> dict[str, str]:
    pipeline.prepare(f"jsonl:{source}", out, "bytes", val_split=f"hash:{fraction}", workers=1, **limits)
    return {text: split for split in ("train", "val") for text in read_documents(out, split)}


def test_hash_split_knows_neither_order_nor_limits(documents, many, splits, tmp_path):
    shuffled = random.Random(1).sample(documents, len(documents))
    assert split_of(write_jsonl(tmp_path / "a.jsonl", shuffled), tmp_path / "a") == splits
    first = split_of(many, tmp_path / "b", max_samples=45)
    assert first == {text: splits[text] for text in documents[:45]} and "val" in first.values()
    assert split_of(many, tmp_path / "c", "0.5", max_samples=45) != first


def test_tail_split_is_the_last_tenth(corpus, shards):
    text = corpus.read_bytes()
    cut = len(text) * 9 // 10
    while text[cut] & 0xC0 == 0x80:
        cut += 1
    assert bytes(read_split(shards, "val")[1:]) == text[cut:]


@pytest.mark.parametrize("alphabet", ["a", "é", "日", "😀", "aé日😀"])
def test_tail_split_never_cuts_a_character(alphabet, tmp_path):
    """Very short texts too, where the last tenth begins inside the last character."""
    cuts_inside = 0
    for length in range(1, 40):
        text = "".join(itertools.islice(itertools.cycle(alphabet), length))
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        source = source_of(f"text:{tmp_path}/text.txt", val_split="tail:0.1")
        parts = [("".join(blocks), split) for blocks, split, _ in source.documents(0)]
        assert "".join(part for part, _ in parts) == text
        val = "".join(part for part, split in parts if split == "val").encode()
        assert 0 <= len(text.encode()) * 0.1 - len(val) + 1 < 5  # at most 3 bytes moved to the training side
        raw = text.encode()
        cuts_inside += raw[int(len(raw) * 0.9)] & 0xC0 == 0x80
    assert cuts_inside or alphabet == "a", "no cut that would have to be moved"


def test_tail_split_over_several_files(tmp_path):
    for n, text in enumerate(["a" * 40, "b" * 40, "c" * 20]):
        (tmp_path / f"{n}.txt").write_text(text)
    pipeline.prepare(f"text:{tmp_path}/*.txt", tmp_path / "out", "bytes", val_split="tail:0.3", workers=1)
    assert read_documents(tmp_path / "out", "train") == ["a" * 40, "b" * 30]
    assert read_documents(tmp_path / "out", "val") == ["b" * 10, "c" * 20]


# -----------------------------------------------------------------------------------------------------------
# Sources


def every_form(texts: list[str], folder: Path) -> dict[str, str]:
    """The same documents as every kind of source."""
    import pyarrow
    import pyarrow.parquet
    half = len(texts) // 2
    for name in ("text", "jsonl", "gz", "parquet", "hub"):
        (folder / name).mkdir()
    for n, text in enumerate(texts):
        (folder / "text" / f"{n:04}.txt").write_bytes(text.encode())
    for n, part in enumerate([texts[:half], texts[half:]]):
        lines = write_jsonl(folder / "jsonl" / f"{n}.jsonl", part).read_bytes()
        (folder / "gz" / f"{n}.jsonl.gz").write_bytes(gzip.compress(lines))
        pyarrow.parquet.write_table(pyarrow.table({"text": part, "n": [0] * len(part)}),
                                    folder / "parquet" / f"{n}.parquet", row_group_size=7)
    write_jsonl(folder / "hub" / "train.jsonl", texts)
    return {"text": f"text:{folder}/text/*", "jsonl": f"jsonl:{folder}/jsonl/*", "gz": f"jsonl:{folder}/gz/*",
            "parquet": f"parquet:{folder}/parquet/*", "hub": f"hf:{folder}/hub"}


def test_every_source_gives_the_same_documents(tmp_path):
    texts = [f"{n} line\nünï 😀 {'x' * n}\r\n" for n in range(45)]
    shards = {}
    for form, source in every_form(texts, tmp_path).items():
        out = pipeline.prepare(source, tmp_path / "out" / form, "bytes", val_split="hash:0.2", workers=1)
        shards[form] = bins(out)
        found = source_of(source, val_split="hash:0.2")
        everything = [("".join(blocks), split) for blocks, split, _ in found.documents(0)]
        assert [text for text, _ in everything] == texts
        for skip in (1, 22, 23, 44, 45):  # as a resumed prepare does
            rest = source_of(source, val_split="hash:0.2").documents(skip)
            assert [("".join(blocks), split) for blocks, split, _ in rest] == everything[skip:], (form, skip)
    assert read_documents(out, "train") == [t for t in texts if t in read_documents(out, "train")]
    assert all(content == shards["text"] for content in shards.values())
    assert len(shards["text"]) == 2


@pytest.mark.parametrize("files, held_out", [(999, "hash:0.1"), (1000, "hash:0.01")])
def test_a_python_without_its_tests_holds_out_more(tmp_path, monkeypatch, files, held_out):
    """As Ubuntu's has 668 files: of these 1 % can be a single file of 230 tokens, which fills no row."""
    for number in range(files):
        (tmp_path / f"{number}.py").write_text(f"number = {number}")
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": tmp_path}.get)
    assert pipeline.settings_of("stdlib")["val_split"] == held_out
    out = tmp_path / "out"
    pipeline.prepare("stdlib", out, "bytes", workers=1)
    with pytest.raises(UserError, match=f"another val_split .{held_out}, now hash:0.2"):
        pipeline.prepare("stdlib", out, "bytes", workers=1, val_split="hash:0.2")


def test_stdlib_is_what_this_python_has(tmp_path, monkeypatch):
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    files = {"b.py": b"b = 2\n", "a.py": b"a = 3\n", "latin.py": b"\xe9", "site-packages/c.py": b"c = 3\n"}
    for name, raw in files.items():
        (tmp_path / "lib" / name).write_bytes(raw)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    pipeline.prepare("stdlib", tmp_path / "out", "bytes", workers=1)
    assert read_documents(tmp_path / "out", "train") == ["a = 3\n", "b = 2\n"]


def test_pieces_cut_at_lines_or_words_and_lose_nothing():
    chance = random.Random(2)
    for separator in ("\n", " ", ""):
        blocks = [separator.join("x" * chance.randrange(1, 400_000) for _ in range(9)) for _ in range(5)]
        cut = list(sources.pieces(blocks))
        assert "".join(cut) == "".join(blocks) and len(cut) > 5
        assert max(map(len, cut)) < 2 * sources.BLOCK
        if separator:
            assert all(a.endswith("\n") or b.startswith(" ") for a, b in itertools.pairwise(cut))


def test_limits(documents, many, tmp_path):
    out = pipeline.prepare(f"jsonl:{many}", tmp_path / "a", "bytes", max_tokens=100_000, workers=1)
    longest = max(len(text.encode()) for text in documents[:40])
    assert 100_000 <= len(read_split(out, "train")) < 100_000 + longest
    out = pipeline.prepare(f"jsonl:{many}", tmp_path / "b", "bytes", min_words=20, max_samples=40, workers=1)
    kept = [text for text in documents if len(text.split()) >= 20][:40]
    assert sorted(read_documents(out, "train") + read_documents(out, "val")) == sorted(kept)


def test_locate(corpus, shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pipeline.locate(str(shards), None, 0, 0) == shards
    with pytest.raises(UserError, match="with another --max-samples .None, now 7.: leave it out"):
        pipeline.locate(str(shards), None, 0, 0, max_samples=7)
    found = []

    def second():  # another process of the node, which must wait for the first
        found.append(pipeline.locate(f"text:{corpus}", "bytes", 0, 1))

    waiting = threading.Thread(target=second, daemon=True)
    waiting.start()
    first = pipeline.locate(f"text:{corpus}", "bytes", 0, 0)
    waiting.join(10)
    assert found == [first] and first == Path("shards/corpus-bytes")
    assert bins(first) == bins(shards)


LIMITS = {"max_tokens": None, "max_samples": None, "min_words": None}  # as a trainer has them by default


@pytest.mark.parametrize("flag, limit", [("max_tokens", 900), ("max_samples", 12), ("min_words", 3)])
@pytest.mark.parametrize("complete", [True, False])
def test_a_smoke_test_does_not_limit_the_data_of_a_real_run(tmp_path, monkeypatch, flag, limit, complete):
    """The same source without the flag is refused, on each process, and each way that is named works."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "x.jsonl", [f"{n} of many rows" for n in range(200)])
    locate = functools.partial(pipeline.locate, "jsonl:x.jsonl", "bytes", 0)
    smoke = LIMITS | {flag: limit}
    out = locate(0, **smoke)
    if not complete:
        manifest = data.read_manifest(out)
        packing.write_manifest(out, manifest | {"complete": False})
    for rank in (0, 1):
        with pytest.raises(UserError, match=f"give --{flag.replace('_', '-')} {limit} to use it as it is"):
            locate(rank, **LIMITS)
        with pytest.raises(UserError, match="with another"):
            locate(rank, **smoke | {flag: limit + 1})
    assert locate(0, **smoke) == out == pipeline.locate(str(out), None, 0, 0, **LIMITS)
    shutil.rmtree(out)
    whole = bins(locate(0, **LIMITS))
    assert whole == bins(locate(0, **LIMITS)), "and again"
    with pytest.raises(UserError, match=f"None, now {limit}|0, now {limit}.*leave it out to use it as it is"):
        locate(0, **smoke)


def test_fewer_sums_than_the_default_are_said(tmp_path, monkeypatch, capsys):
    """An endless source has a number of tokens by default, so fewer are not refused without the flag."""
    monkeypatch.chdir(tmp_path)
    locate = functools.partial(pipeline.locate, "task:addition", "bytes", 10**9, 0, row=256)
    out = locate(**LIMITS | {"max_samples": 20})
    with pytest.raises(UserError, match="give --max-samples 20"):
        locate(**LIMITS)
    manifest = data.read_manifest(out)
    limits = {"max_samples": None, "max_tokens": 900}
    packing.write_manifest(out, manifest | {"settings": manifest["settings"] | limits})
    capsys.readouterr()
    assert locate(**LIMITS) == out
    said = capsys.readouterr().out
    assert "prepared up to 900 tokens, and this model would take 3,500,000" in said
    monkeypatch.setattr(pipeline, "TASK_TOKENS", 900)
    assert locate(**LIMITS) == out and "note" not in capsys.readouterr().out


def test_locate_begins_anew_what_never_got_a_shard(tmp_path, monkeypatch):
    """As without a network: a manifest is there, and says nothing about limits."""
    monkeypatch.chdir(tmp_path)

    def no_network(self, start):
        raise RetryableError("no network.")

    with monkeypatch.context() as offline:
        offline.setattr(sources.Source, "documents", no_network)
        with pytest.raises(RetryableError, match="no network"):
            pipeline.prepare("task:addition", None, "bytes", workers=1, max_samples=9)
    begun = data.default_directory("task:addition", "bytes")
    assert data.read_manifest(begun)["shards"] == []
    found = pipeline.locate("task:addition", "bytes", 0, 0, max_tokens=2000)
    assert data.read_manifest(found)["settings"]["max_tokens"] == 2000


@pytest.mark.parametrize("text, count", [("5000", 5000), ("500k", 500_000), ("32.3k", 32_300),
                                         ("2.01k", 2010), ("20M", 20_000_000), (" 1.5b ", 1_500_000_000)])
def test_parse_count(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "-5", "5kk", "1e6", "5 k", "0x10"])
def test_parse_count_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a count"):
        parse_count(text)


@pytest.mark.parametrize("dataset, tokenizer, expected", [
    ("stdlib", "bpe:4096", "stdlib-bpe4096"), ("text:books/quijote.txt", "gpt2", "quijote-gpt2"),
    ("text:books/*.txt", "gpt2", "books-gpt2"), ("text:/data/es/**/*.txt", "bytes", "es-bytes"),
    ("text:*.txt", "bytes", "text-bytes"), ("hf:allenai/c4:es", "gpt2", "allenai-c4-es-gpt2")])
def test_default_directory(dataset, tokenizer, expected):
    assert data.default_directory(dataset, tokenizer) == Path("shards", expected)


# -----------------------------------------------------------------------------------------------------------
# Tokenizers

TRICKY = [
    "", " ", "\n", "Hello world", "  two  spaces   three\t\ttabs \n \n\n x  ",
    "line\r\nline\r\n\r\n  end\r", "  def f(x):\n\t\treturn x  # done\n",
    "I'm you're he'll we've it's they'd I'M YOU'RE HE'LL IT'\u017f 'tis o'clock 's 'S", "don\u2019t",
    "1 12 123 1234 12345 1,234.56 ½ ² \u0661\u0662\u0663 Ⅷ", "!!! ... ?!?! --- #### _snake_case_ $x^{2}$",
    "mañana façade naïve Ångström e\u0301 straße", "日本語 한국어 русский עברית",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1ea\U0001f1f8 \u2764\ufe0f",
    "a\u00a0b\u3000c\u2003d\u2028e\u0085f\u200bg\ufeffh\x1ci\x0bj\x00k",
    f"a {EOT} b{EOT}{EOT}[MASK] [MASK]", "x" * 5000, "\n" * 300 + " " * 300 + "a",
]
ATOMS = [*" \n\r\t'!.7aZñ中한½²", "  ", "\r\n", "'s", "'LL", "2024", "e\u0301", "<|", "|>", EOT, "[MASK]",
         *"\u00a0\u3000\u2028\u0085\x1c\x00\u200b\ufeff\u017f\u212a\u2019\u05d0\u0661\u200d\ufffd",
         "\U0001f600", "\U00010fff"]


@pytest.fixture(scope="module", params=["gpt2", "bpe:700", "bytes"])
def tokenizer(request, corpus) -> Tokenizer:
    if request.param == "gpt2" and not (SHARED / "tiktoken").is_dir():
        pytest.skip("the vocabulary of gpt2 is not in the cache")
    if request.param == "bpe:700":
        return bpe.train_bpe([corpus.read_text(encoding="utf-8"), *TRICKY], 700)
    return load_tokenizer(request.param)


@pytest.fixture(scope="module")
def exported(tokenizer) -> str:
    return tokenizer.to_json()


@pytest.fixture(scope="module")
def package(exported):
    """The same tokenizer, run by Hugging Face's `tokenizers`."""
    return run_by_the_package(exported)


def run_by_the_package(text: str):
    import tokenizers
    package = tokenizers.Tokenizer.from_str(text)
    package.encode_special_tokens = True  # <|endoftext|> inside a text is text like any other
    return package


def ids(package, text: str) -> list[int]:
    return package.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TRICKY, ids=[repr(text[:12]) for text in TRICKY])
def test_our_encoding_is_that_of_the_package(tokenizer, package, text):
    ours = tokenizer.encode(text).tolist()
    assert ours == ids(package, text)
    assert tokenizer.decode(ours) == text == package.decode(ours, skip_special_tokens=False)
    assert max(ours, default=0) < min(tokenizer.specials.values()), "text became a special id"


def test_our_encoding_of_random_texts_is_that_of_the_package(tokenizer, package):
    chance = random.Random(3)
    for _ in range(2000):
        text = "".join(chance.choices(ATOMS, k=chance.randrange(1, 25)))
        assert tokenizer.encode(text).tolist() == ids(package, text), repr(text)


def test_our_encoding_of_real_texts_is_that_of_the_package(tokenizer, package, corpus):
    for path in (corpus, SHARED / "quijote.txt", SHARED / "shakespeare.txt"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")[:300_000]
            assert tokenizer.encode(text).tolist() == ids(package, text)


def test_another_pattern_or_special_tokens_give_another_encoding(tokenizer, exported):
    """Shows that the texts above tell such differences."""
    spec = json.loads(exported)
    if tokenizer.pattern:
        other = PATTERNS["cl100k_base" if tokenizer.name == "gpt2" else "gpt2"]
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = other
        wrong = run_by_the_package(json.dumps(spec))
        assert any(tokenizer.encode(text).tolist() != ids(wrong, text) for text in TRICKY)
    wrong = run_by_the_package(exported)
    wrong.encode_special_tokens = False
    assert any(tokenizer.encode(text).tolist() != ids(wrong, text) for text in TRICKY)


def test_tokenizer_json_round_trip(tokenizer, exported):
    again = parse_tokenizer_json(tokenizer.name, exported)
    assert type(again) is Tokenizer and again.to_json() == exported
    for field in ("ranks", "pattern", "specials", "eot", "mask", "vocab_size", "num_ids"):
        assert getattr(again, field) == getattr(tokenizer, field)
    assert all(again.encode(t).tolist() == tokenizer.encode(t).tolist() for t in TRICKY)
    assert tokenizer.vocab_size == tokenizer.mask == tokenizer.eot + 1 == tokenizer.num_ids - 1
    spec = json.loads(exported)
    spec["added_tokens"].pop()  # [MASK], the last id
    bare = parse_tokenizer_json("without mask", json.dumps(spec))
    assert (bare.vocab_size, bare.mask) == (tokenizer.vocab_size, tokenizer.mask)


def test_a_changed_tokenizer_json_does_not_pass_for_ours(exported):
    """With a normalizer or a space in front the package must run it."""
    spec = json.loads(exported)
    for change in ({"normalizer": {"type": "Lowercase"}},
                   {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}):
        other = parse_tokenizer_json("other", json.dumps(spec | change))
        assert type(other) is tokenizer_json.HuggingFaceTokenizer
        wrong = run_by_the_package(json.dumps(spec | change))
        assert all(other.encode(text).tolist() == ids(wrong, text) for text in TRICKY)
    empty = json.dumps(spec | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}})
    assert type(parse_tokenizer_json("empty", empty)) is tokenizer_json.HuggingFaceTokenizer


def test_the_older_form_of_gpt2s_tokenizer_json(tokenizer, exported):
    """The file on the hub leaves the pattern to ByteLevel and writes merges as strings. It is the same."""
    if tokenizer.name != "gpt2":
        pytest.skip("only gpt2 has it")
    spec = json.loads(exported)
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    older = parse_tokenizer_json("older", json.dumps(spec))
    assert type(older) is Tokenizer and older.to_json() == tokenizer.to_json()
    theirs = run_by_the_package(json.dumps(spec))
    assert all(older.encode(text).tolist() == ids(theirs, text) for text in TRICKY)
    assert (older.eot, older.mask, older.num_ids) == (tokenizer.eot, tokenizer.mask, tokenizer.num_ids)


def test_merges_that_do_not_follow_the_ids_are_run_by_the_package(exported, tokenizer):
    """tiktoken encodes by the ids, so it would not be what the file says."""
    spec = json.loads(exported)
    if len(merges := spec["model"]["merges"]) > 1:
        merges[0], merges[1] = merges[1], merges[0]
        odd = parse_tokenizer_json("odd", json.dumps(spec))
        assert type(odd) is tokenizer_json.HuggingFaceTokenizer
        package = run_by_the_package(json.dumps(spec))
        assert all(odd.encode(text).tolist() == ids(package, text) for text in TRICKY)


@pytest.mark.parametrize("change", [
    {"vocab": []}, {"vocab": {"a": "b"}}, {"merges": [1]}, {"merges": None}, {"vocab": None}], ids=str)
def test_a_malformed_model_in_a_tokenizer_json_is_one_sentence(exported, change):
    spec = json.loads(exported)
    spec["model"] |= change
    with pytest.raises(UserError, match="broken (is not a Hugging Face|cannot be read)"):
        parse_tokenizer_json("broken", json.dumps(spec))


def test_an_id_without_a_token_is_empty_text():
    """cl100k_base has such gaps, and an untrained model samples them."""
    specials = {EOT: 256, MASK: 300}
    tokenizer = Tokenizer("gaps", {bytes([i]): i for i in range(256)}, r"\s+|\S+", specials)
    assert tokenizer.num_ids == 301 and tokenizer.decode([97, 280, 98]) == "ab"


@pytest.mark.parametrize("part", [
    " ", "a", *(pytest.param(part, marks=pytest.mark.full) for part in ("\n", " \n", "7", "!"))])
def test_a_million_of_anything(tokenizer, part):
    text = part * (1_000_000 // len(part))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_lone_surrogate_becomes_a_question_mark(tokenizer):
    for text in ("a\ud800b", "\udc00", "\ud800" + " " * 100_000 + "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == re.sub("[\ud800-\udfff]", "?", text)


def test_bpe_learns_from_texts_with_lone_surrogates(tmp_path):
    """JSON can spell them; such lines exist in web crawls."""
    path = write_jsonl(tmp_path / "a.jsonl", ["\ud83d half an emoji", "more text"])
    pipeline.prepare(f"jsonl:{path}", tmp_path / "out", "bpe:300", workers=1)
    assert read_documents(tmp_path / "out", "train") == ["? half an emoji", "more text"]


def test_a_text_too_short_for_its_ids_is_told_so(corpus, tmp_path, capsys):
    for ids, short in ((300, False), (100_000, True)):
        pipeline.prepare(f"text:{corpus}", tmp_path / str(ids), f"bpe:{ids}", workers=1)
        assert (f"note: bpe:{ids} has only" in capsys.readouterr().out) == short


def test_stream_text_gives_whole_characters(tokenizer):
    for text in TRICKY:
        tokens = tokenizer.encode(text)
        chunks = list(sampling.stream_text(tokenizer, tokens[:600]))
        assert "".join(chunks) == tokenizer.decode(tokens[:600])
        assert not any("\ufffd" in chunk for chunk in chunks)
    tokens = tokenizer.encode("\U0001f9ff")
    assert len(tokens) > 1, "one token: nothing to hold back"
    assert any("\ufffd" in tokenizer.decode([i]) for i in tokens), "a naive stream would show halves"
    assert "".join(sampling.stream_text(tokenizer, tokens[:-1])) == tokenizer.decode(tokens[:-1])
    special = [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")]
    assert "".join(sampling.stream_text(tokenizer, special)) == f"a{EOT}b"


# -----------------------------------------------------------------------------------------------------------
# The order of samples


def global_batches(shards, world_size, batch, grad_accum, steps, samples=0, seed=7, ranks=None) -> list[list]:
    """For each step the sorted rows of all ranks and micro-batches, with their targets."""
    loaders = [data.Loader(shards, batch, place(rank, world_size), seed, samples)
               for rank in ranks or range(world_size)]
    try:
        return [sorted(row for loader in loaders for micro_batch in loader.step(grad_accum)[1]
                       for row in torch.stack(micro_batch, 1).tolist()) for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()


SPLITS = [(1, 4), (2, None), (2, 2), (4, None), (4, 1), (8, None), (8, 1)]


@pytest.fixture(scope="module")
def one_rank(shards) -> tuple[data.Shards, list]:
    """Rows of 256 tokens, and their global batches of 16 as one rank sees them, into the second epoch."""
    rows = data.Dataset([shards], 256).train
    return rows, global_batches(rows, 1, 16, 1, rows.rows // 16 + 3)


@pytest.mark.parametrize("world_size, batch", SPLITS)
def test_the_global_batch_is_the_same_on_any_number_of_ranks(one_rank, world_size, batch):
    shards, expected = one_rank
    _, batch, grad_accum = plan_batch(world_size, 16, batch, None, 16, 16)
    assert world_size * batch * grad_accum == 16
    assert global_batches(shards, world_size, batch, grad_accum, len(expected)) == expected
    assert global_batches(shards, world_size, batch, grad_accum, 3, samples=5 * 16) == expected[5:8]
    broken = [{"seed": 8}, {"samples": 1}] + [{"ranks": [0] * world_size}] * (world_size > 1)
    for change in broken:
        assert global_batches(shards, world_size, batch, grad_accum, 3, **change) != expected[:3]


def test_batches_are_the_rows_of_the_order(dataset):
    """Each row is 64 tokens as they lie in the shard, its targets the same one token on."""
    shards = dataset.train
    (tokens,) = [mapped.tolist() for mapped in shards.tokens]  # one shard: row r begins at token r · 64
    for step, found in enumerate(global_batches(shards, 2, 8, 1, 4)):
        rows = data.shuffled(step * 16 + np.arange(16), shards.rows, 7)
        expected = [[tokens[r * 64:r * 64 + 64], tokens[r * 64 + 1:r * 64 + 65]] for r in rows.tolist()]
        assert found == sorted(expected)


def test_rows_of_many_shards(undisturbed):
    """No row crosses from one shard to the next, and none is lost but the rest at the end of each."""
    shards = data.Dataset([undisturbed], 100).train
    expected = []
    for path in sorted(undisturbed.glob("train_*.bin")):
        tokens = read_like_llmc(path).tolist()
        expected += [[tokens[a:a + 100], tokens[a + 1:a + 101]] for a in range(0, len(tokens) - 100, 100)]
    assert shards.rows == len(expected) > 5000
    x = np.empty((len(expected), 100), shards.dtype)
    y = np.empty(x.shape, np.int32)
    shards.take(np.arange(len(expected)), x, y)
    assert np.stack([x, y], 1).tolist() == expected
    some = np.sort(data.shuffled(np.arange(500), shards.rows, 1))
    shards.take(some, x[:500], y[:500])
    assert np.stack([x, y], 1)[:500].tolist() == [expected[row] for row in some]


def each_once(rows: np.ndarray, n: int) -> bool:
    return rows.dtype == np.int64 and np.array_equal(np.sort(rows), np.arange(n))


SIZES = [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 255, 256, 257, 1000, 4097,
         *(random.Random(4).randrange(1, 50_000) for _ in range(30))]


@pytest.mark.parametrize("seed", [0, 1, 12345, -1])
def test_an_epoch_visits_every_row_once(seed):
    for n in SIZES:
        for epoch in (0, 1, 10**6):
            assert each_once(data.shuffled(epoch * n + np.arange(n), n, seed), n), (n, epoch)


def test_an_order_that_repeats_rows_is_noticed():
    """What the permutation would be without cycle walking: folded into the range."""
    domain = data.permute(np.arange(1024), 1024, 0, 0)
    assert each_once(domain, 1024) and not each_once(domain[:1000] % 1000, 1000)


@pytest.mark.parametrize("n", [20, 1000, 31_337])
def test_epochs_and_seeds_differ(n):
    orders = [data.shuffled(epoch * n + np.arange(n), n, seed).tolist()
              for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for a, b in itertools.combinations([*orders, list(range(n))], 2))


def test_the_order_does_not_depend_on_how_it_is_asked_for():
    n, chance, at = 777, random.Random(5), 0
    whole = data.shuffled(np.arange(5 * n), n, 3).tolist()
    while at < 4 * n:
        count = chance.randrange(1, 300)
        assert data.shuffled(np.arange(at, at + count), n, 3).tolist() == whole[at:at + count]
        at += count


def test_the_order_is_not_only_locally_shuffled():
    """The mean distance between neighbours of a random order of n rows is n/3."""
    n = 100_000
    steps = np.abs(np.diff(data.permute(np.arange(n), n, 0, 0)))
    assert 0.32 < steps.mean() / n < 0.345


def test_a_loader_opens_at_step_a_million_at_once(undisturbed):
    shards, seconds = data.Dataset([undisturbed], 64).train, []
    for _ in range(7):
        begin = time.perf_counter()
        loader = data.Loader(shards, 64, place(3, 8), 1, samples=10**6 * 512)
        count, [(x, _)] = loader.step(1)
        seconds.append(time.perf_counter() - begin)
        loader.close()
    assert min(seconds) < 0.05
    rows = np.sort(data.shuffled(10**6 * 512 + 3 * 64 + np.arange(64), shards.rows, 1))
    expected, _ = data.read_rows(shards, rows)
    assert x.tolist() == expected.tolist() and count == x.numel()


def test_labels_know_the_largest_id_and_what_is_not_learned(tmp_path):
    """65,535 is an id of some vocabularies, and no label that is left out."""
    tokens = np.arange(65_536 - 160, 65_536, dtype=np.uint16)
    packing.write_shard(tmp_path / "train_000000.bin", [tokens[:-1], tokens[-1:]], "uint16")
    shards = data.Shards([tmp_path / "train_000000.bin"], 53, lambda x: x % 2 == 0)
    loader = data.Loader(shards, 3, place(0, 1), 0)
    count, [(x, y)] = loader.step(1)
    loader.close()
    assert y.max() == 65_535 and count == (y >= 0).sum() == 3 * 53 - (3 * 53) // 2
    assert torch.equal(y, torch.where(x % 2 == 0, x + 1, -1))
    (x, y), = data.validation_batches(shards, 3, place(0, 1))
    assert y.max() == 65_535 and torch.equal(y, torch.where(x % 2 == 0, x + 1, -1))


def test_whole_steps_are_read_ahead(dataset, monkeypatch):
    """Two, and no more: so the labels of a step are known before its first forward pass."""
    taken, plain = [], data.Shards.take
    shards = copy.copy(dataset.train)  # which no thread of a loader before reads

    def take(*arguments):
        taken.extend([1] * (arguments[0] is shards))
        plain(*arguments)

    monkeypatch.setattr(data.Shards, "take", take)
    loader = data.Loader(shards, 2, place(0, 1), 0)
    for step in range(3):
        count, batches = loader.step(3)
        assert len(batches) == 3 and count == sum((y >= 0).sum() for _, y in batches)
        deadline = time.monotonic() + 20
        while len(taken) < 3 * (step + 3) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(taken) == 3 * (step + 3)
    loader.close()


def test_steps_of_another_size_begin_where_the_last_one_ended(dataset):
    loader, other = (data.Loader(dataset.train, 2, place(1, 2), 0, 8) for _ in range(2))
    found = [micro_batch for n in (2, 3, 3, 1, 2) for micro_batch in loader.step(n)[1]]
    for (x, y), (_, [(expected_x, expected_y)]) in zip(found, (other.step(1) for _ in found)):
        assert torch.equal(x, expected_x) and torch.equal(y, expected_y)
    loader.close(), other.close()


def test_close_ends_the_thread(dataset):
    before = set(threading.enumerate())
    loader = data.Loader(dataset.train, 2, place(0, 1), 0)
    loader.step(1)
    assert len(set(threading.enumerate()) - before) == 1
    loader.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_an_error_of_the_reading_thread_reaches_the_trainer(dataset, monkeypatch):
    def fail(*arguments):
        raise OSError("the disk is gone")

    monkeypatch.setattr(dataset.train, "take", fail)
    loader = data.Loader(dataset.train, 4, place(0, 1), 0)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.step(1)
    loader.close()


def test_a_batch_larger_than_a_share_names_the_global_batch_that_it_needs():
    with pytest.raises(UserError, match="Use --batch 2 --grad-accum 1, or --global-batch 256."):
        plan_batch(8, None, 32, None, 16, 8)
    assert plan_batch(8, 256, 32, None, 16, 8) == (256, 32, 1)


def test_plan_batch_always_divides_or_says_what_does():
    for world_size, wanted, batch, grad_accum in itertools.product(
            range(1, 10), [None, *range(1, 40), 512], [None, 1, 3, 4, 8], [None, 1, 2, 5]):
        try:
            plan = plan_batch(world_size, wanted, batch, grad_accum, 48, 8)
        except UserError as error:
            first, *second = str(error).split(": ")[-1].split(", or --global-batch ")
            if second:
                other = int(second[0].rstrip("."))
                assert plan_batch(world_size, other, batch, grad_accum, 48, 8)[0] == other
            advice = dict(re.findall(r"--([a-z-]+) (\d+)", first))
            said = [int(advice.get(name, 0)) or None for name in ("global-batch", "batch", "grad-accum")]
            plan = plan_batch(world_size, said[0] or wanted or 48, *said[1:], 48, 8)
        else:
            assert (batch or plan[1], grad_accum or plan[2]) == plan[1:]
            if wanted or batch and grad_accum or 48 % world_size == 0:
                usual = world_size * batch * grad_accum if batch and grad_accum else 48
                assert plan[0] == (wanted or usual)
        assert plan[0] == world_size * plan[1] * plan[2] and min(plan) > 0


@pytest.mark.parametrize("trainer", ["train_hrm", "train_gpt2", "train_mlm"])
def test_every_recipe_fits_any_number_of_processes(trainer):
    module = importlib.import_module(trainer)
    rows = [*getattr(module, "RECIPES", module.SIZES).values()]
    for row, world_size in itertools.product(rows, [*range(1, 10), 12, 16, 24, 64]):
        wanted = row["global_batch"]
        found, batch, grad_accum = plan_batch(world_size, None, None, None, wanted, row["batch"])
        assert found == world_size * batch * grad_accum and 1 <= batch <= row["batch"]
        assert found == wanted if wanted % world_size == 0 else abs(found - wanted) < world_size + wanted / 20
        assert plan_batch(world_size, None, None, None, found, row["batch"])[0] == found  # a resume


@pytest.mark.parametrize("world_size, wanted, largest, plan", [
    (5, 512, 32, (520, 26, 4)), (7, 512, 32, (525, 25, 3)), (5, 16, 8, (15, 3, 1)),
    (6, 768, 24, (768, 16, 8)), (64, 16, 8, (64, 1, 1)), (3, 1024, 64, (1062, 59, 6))])
def test_a_recipe_that_does_not_divide_gets_a_large_micro_batch(world_size, wanted, largest, plan):
    assert plan_batch(world_size, None, None, None, wanted, largest) == plan


# -----------------------------------------------------------------------------------------------------------
# Validation


def validated(shards, batch: int, world_size: int, limit=None) -> tuple[Counter, int, set]:
    """The rows that count, the sum of their targets, and how many batches each rank had."""
    rows, total, lengths = Counter(), 0, set()
    for rank in range(world_size):
        batches = list(data.validation_batches(shards, batch, place(rank, world_size), limit))
        lengths.add(len(batches))
        for x, y in batches:
            assert x.shape == y.shape == (batch, shards.seq_len) and x.dtype == y.dtype == torch.int64
            padding = (y == -1).any(1)
            assert (y[padding] == -1).all()
            rows.update(map(tuple, x[~padding].tolist()))
            total += y[~padding].sum().item()
    return rows, total, lengths


@pytest.mark.parametrize("limit", [None, 1, 13])
def test_validation_counts_every_row_once_on_any_number_of_ranks(dataset, limit):
    shards = dataset.val[""]
    tokens = shards.tokens[0].tolist()
    count = limit or shards.rows
    rows = Counter(tuple(tokens[r * 64:r * 64 + 64]) for r in range(count))
    total = sum(tokens[1:count * 64 + 1])
    for world_size, batch in itertools.product((1, 2, 3, 5, 8), (1, 4, 7, 500)):
        found, found_total, lengths = validated(shards, batch, world_size, limit)
        assert found == rows and found_total == total, (world_size, batch)
        assert len(lengths) == 1, "a rank with fewer batches would leave the others waiting"


def test_an_evaluation_reads_ahead(dataset, monkeypatch):
    """While a batch is evaluated the next ones are read; and nothing goes on when it is cut short."""
    reads, read = [], data.read_rows

    def read_rows(*arguments):
        reads.append(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(data, "read_rows", read_rows)
    batches = data.validation_batches(dataset.val[""], 1, place(0, 1))
    next(batches)
    deadline = time.monotonic() + 60
    while len(reads) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 3 <= len(reads) < dataset.val[""].rows and threading.main_thread() not in reads
    batches.close()
    reads[0].join(60)
    assert not reads[0].is_alive() and len(reads) < dataset.val[""].rows

    monkeypatch.setattr(data, "read_rows", mock.Mock(side_effect=UserError("gone")))
    with pytest.raises(UserError, match="gone"):
        list(data.validation_batches(dataset.val[""], 1, place(0, 1)))


def test_without_padding_rows_would_count_twice(dataset):
    """Shows that the check above needs the targets of −1: the inputs alone repeat the last row."""
    shards, seen = dataset.val[""], 0
    for rank in range(3):
        seen += sum(len(x) for x, _ in data.validation_batches(shards, 7, place(rank, 3)))
    assert seen > shards.rows


# -----------------------------------------------------------------------------------------------------------
# info, verify, peek


def test_info(corpus, shards, dataset):
    result = run(0, "data.py", "info", shards)
    counts = Counter(itertools.chain.from_iterable(t[1:].tolist() for t in dataset.train.tokens))  # labels
    p = np.array(list(counts.values())) / sum(counts.values())
    assert result.code == 0, result.out
    train, val = dataset.train.num_tokens, dataset.val[""].num_tokens
    for part in (f"text:{corpus}: {train:,} training and {val:,} validation tokens of bytes, 2 documents",
                 "val_split tail:0.1", f"unigram entropy {-(p * np.log(p)).sum():.4f} nats",
                 "tokenizer: bytes, 257 ids, end of text is 256, [MASK] is 257",
                 f"fingerprint: {dataset.fingerprint}"):
        assert part in result.out
    assert train + val == corpus.stat().st_size + 2


def test_verify(undisturbed):
    result = run(0, "data.py", "verify", undisturbed)
    lines = result.out.splitlines()
    assert result.code == 0 and lines[-1] == f"{undisturbed}: OK"
    assert {line.split(":")[0] for line in lines[:-1]} == {p.name for p in undisturbed.glob("*.bin")}
    assert all(line.endswith("tokens, checksum OK") for line in lines[:-1])


@pytest.mark.parametrize("split", ["train", "val"])
def test_peek(shards, dataset, split):
    result = run(0, "data.py", "peek", shards, *f"--rows 4 --split {split} --seq-len 96".split())
    tokens = data_py.splits_of(dataset)[split].tokens[0]
    rows = sorted(data.shuffled(np.arange(4), (len(tokens) - 1) // 96, 0).tolist())
    texts = [dataset.tokenizer.decode(tokens[row * 96:row * 96 + 96]) for row in rows]
    expected = [f"--- {split} row {row}\n{text}\n" for row, text in zip(rows, texts, strict=True)]
    assert result.code == 0 and result.out == "".join(expected)


def test_peek_into_a_pipe_that_closes(shards):
    command = f"{sys.executable} {ROOT}/data.py peek {shards} --rows 2000 | head -n 1"
    result = finish(start(["bash", "-c", f"set -o pipefail; {command}"]))
    assert result.code == 0 and len(result.out.splitlines()) == 1, result.out


def test_a_cut_of_an_endless_source_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = []
    monkeypatch.setattr(pipeline, "prepare", lambda *_, **given: options.append(given))
    pipeline.locate("fineweb-edu", "bytes", 1000, 0)
    assert "fineweb-edu is prepared up to 1,000 tokens, 20 for each parameter" in capsys.readouterr().out
    pipeline.locate("fineweb-edu", "bytes", 1000, 0, max_tokens=7, max_samples=5)
    pipeline.locate("jsonl:any", "bytes", 1000, 0, max_samples=5)
    assert options == [{"max_tokens": 1000}, {"max_tokens": 7, "max_samples": 5},
                       {"max_tokens": None, "max_samples": 5}]
    assert not capsys.readouterr().out


def test_prepared_data_is_not_prepared_again(corpus, shards):
    before = tree(shards)
    command = f"prepare --dataset text:{corpus} --tokenizer bytes --out {shards}"
    result = run(0, "data.py", *command.split())
    assert result.code == 0 and "is already prepared" in result.out and tree(shards) == before


def test_a_host_that_never_answers_counts_as_unreachable():
    """A full queue of connections, as behind a firewall that drops packets."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert sources.reachable(address)
        full = [socket.socket() for _ in range(4)]
        for client in full:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        begin = time.perf_counter()
        assert not sources.reachable(address, 0.3)
        assert time.perf_counter() - begin < 1
        for client in full:
            client.close()


def test_ids_beyond_the_vocabulary_are_refused(undisturbed, tmp_path):
    shutil.copy(undisturbed / "train_000000.bin", tmp_path)
    with pytest.raises(UserError, match="train_000000.bin holds the id 5[0-9][0-9], but bytes has 257"):
        data.Dataset([tmp_path], 64, "bytes")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("at, wrong", [(65, 300), (128, 300), (65, 60_000), (65, 257)])  # 257 is [MASK]
@pytest.mark.parametrize("masked", [False, True])
def test_an_id_beyond_the_vocabulary_in_a_later_shard_is_refused_as_it_is_read(tmp_path, split, at, wrong,
                                                                               masked):
    """Also where it is only the label after a row, of which there are two; and the file is named."""
    tokens = np.arange(129, dtype="u2")
    for name in ("x_train_0", "x_train_1", "x_val_0", "x_val_1"):
        packing.write_shard(tmp_path / f"{name}.bin", [tokens], "uint16")
    tokens[at] = wrong
    packing.write_shard(tmp_path / f"x_{split}_1.bin", [tokens], "uint16")
    dataset = data.Dataset([tmp_path], 64, "bytes")
    masker = data.Masker(dataset.tokenizer, 64, 0.3, 0) if masked else None
    epochs = np.zeros(4, np.int64)
    sets = {"train": dataset.train, "val": dataset.val[""]}
    data.read_rows(sets.pop("train" if split == "val" else "val"), np.arange(4), epochs, masker)
    data.read_rows(sets[split], np.arange(2), epochs[:2], masker)
    if masked and at == 128:
        return  # a masked model has no label after a row
    with pytest.raises(UserError, match=f"x_{split}_1.bin holds the id {wrong}, but bytes has 257 ids"):
        data.read_rows(sets[split], np.arange(4), epochs, masker)


def test_one_process_of_a_node_prints_the_help(capsys, monkeypatch):
    parser = ArgumentParser(prog="any")
    for rank, expected in ((1, ""), (0, "usage: any")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        parser.print_help()
        assert capsys.readouterr().out[:10] == expected
    with pytest.raises(UserError, match="--flag; --help-all lists all flags"):
        parser.parse_args(["--flag"])


@pytest.mark.parametrize("command, near", [
    ("prepare --tokeniser=x --dataset stdlib", "--tokeniser (use --tokenizer)"),
    ("info a --tokenzer x", "--tokenzer (use --tokenizer)"),
    ("prepare --gpus 8 --num_proc=4 --dataset-name x", "--gpus (not needed), --num_proc (use --workers), "
     "--dataset-name (use --data)"),
    ("prepare --batch-size 3 --dataset stdlib", "--batch-size (not needed)"), ("info a --max-tokens 3", ""),
    ("info a b", "")])
def test_a_command_names_the_nearest_of_its_own_flags(command, near, monkeypatch):
    monkeypatch.setattr("sys.argv", ["data.py", *command.split()])
    with pytest.raises(UserError) as caught:
        data_py.main()
    assert near in str(caught.value) and ("(" in str(caught.value)) == bool(near)


@pytest.mark.parametrize("path, name", [
    ("runs/x/tokenizer.json", "x"), ("runs/x/hf/tokenizer.json", "x"), ("runs/x/english.json", "english")])
def test_shards_are_named_after_the_owner_of_a_tokenizer_json(tmp_path, monkeypatch, path, name):
    monkeypatch.chdir(tmp_path)
    Path(path).parent.mkdir(parents=True)
    Path(path).touch()
    assert data.default_directory("text:a.txt", path) == Path("shards", f"a-{name}")


@pytest.mark.parametrize("name, form", [("https_proxy", "{}"), ("HTTPS_PROXY", "http://{}"),
                                        ("ALL_PROXY", "{}"), ("all_proxy", "socks5://{}")])
def test_a_proxy_in_any_form_is_asked(monkeypatch, name, form):
    """Without a scheme, as curl takes it, or the one proxy for all."""
    for other in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(name, form.format(f"127.0.0.1:{server.getsockname()[1]}"))
        assert sources.reachable("https://host.invalid")
        monkeypatch.setenv("no_proxy", "host.invalid")
        assert not sources.reachable("https://host.invalid")
    monkeypatch.delenv("no_proxy")
    assert not sources.reachable("https://host.invalid")  # the proxy has gone


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:nope", "http://[::1"])
def test_a_proxy_that_is_no_address_is_a_sentence(tmp_path, monkeypatch, proxy):
    """Of the hub, too, whose client raises errors that are no OSError."""
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UserError, match="stanfordnlp/imdb cannot be read .ValueError: "):
        pipeline.prepare("imdb", tmp_path / "out", "bytes")
    with pytest.raises(UserError, match="hf:none/such is neither a directory nor a repository that can"):
        huggingface.config_from_hf(model.GPT2, "none/such")


def test_a_preparation_without_a_terminal_has_lines(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "LINE_EVERY", 0)
    pipeline.prepare(f"text:{corpus}", tmp_path / "out", "bytes")
    said = capsys.readouterr()
    assert re.search(r"^0\.\dM tokens so far$", said.out, re.M) and said.err == ""
