"""prepare/pipeline.py: the same bytes whatever happens, limits, splits, and which data a trainer takes."""

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Group, KillAtOperation
from runs import Trainer, log_of
from shard_files import (
    bins,
    documents_of,
    ids_of,
    prepared,
    refused,
    stopped_after,
    tree,
    write_rows,
    write_texts,
)

import data
from cli.errors import UserError
from prepare import packing, pipeline, sources
from vocab.tokenizer import Tokenizer
from vocab.vocabulary import EOT

ALL_TRAIN = {"val_split": "hash:0.000001"}
PAIR = {"prompt_field": "q", "response_field": "a"}
LIMITS = {"max_tokens": None, "max_samples": None, "min_words": None}  # as a trainer has them by default


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def raise_(error: BaseException):
    raise error


def splits_of(out: Path) -> set[str]:
    return {shard["split"] for shard in data.read_manifest(out)["shards"]}


# -----------------------------------------------------------------------------------------------------------
# The same bytes

MANY = {"tokenizer": "bpe:600", "shard_tokens": 4000, "val_split": "hash:0.2"}


@pytest.fixture(scope="module")
def many(corpus, tmp_path_factory) -> tuple[list[str], str, Path]:
    """Texts of all lengths, no two alike, one longer than a block, and their shards."""
    code, folder = 8 * corpus.read_text(), tmp_path_factory.mktemp("many")
    texts = [f"{n} ünï 😀 {code[4000 * n:][:(1, 30, 1000, 10_000)[n % 4]]}" for n in range(100)]
    texts[40] += code
    source = write_texts(folder / "many.jsonl", texts)
    return texts, source, prepared(source, folder / "out", **MANY)


def test_kills_and_the_number_of_workers_change_no_byte(many):
    """SIGKILL, when it has opened, renamed and removed so many files. A server that forks starts first."""
    _, source, undisturbed = many
    out = Path("out").absolute()
    flags = "--tokenizer bpe:600 --shard-tokens 4k --val-split hash:0.2 --workers 2".split()
    for number in (25, 40):
        group = Group("data.py", "prepare", "--dataset", source, "--out", out, *flags,
                      fault=KillAtOperation(out, number, 0))
        assert group.finish().code == -signal.SIGKILL and not data.read_manifest(out)["complete"]
    written = (out / "train_000000.bin").stat().st_mtime_ns
    prepared(source, out, **MANY, workers=3)
    assert (out / "train_000000.bin").stat().st_mtime_ns == written, "it has begun again"
    assert tree(out) == tree(undisturbed) and len(bins(out)) > 20


def test_documents_come_back_in_order_and_a_hash_splits_them(many):
    """By the text alone, whatever the order and the limits."""
    texts, _, undisturbed = many
    assert pipeline.hash64("prompt") == pipeline.hash64(("prompt", "a")) == 14832251758147735480
    val = [text for text in texts if pipeline.hash64(text[:1 << 20]) < 0.2 * 2**64]
    some = random.Random(1).sample(texts, 50)
    part = prepared(write_texts("x.jsonl", some), "out", val_split="hash:0.2", max_samples=30)
    for out, expected in ((undisturbed, texts), (part, some[:30])):
        assert documents_of(out, "val") == [text for text in expected if text in val]
        assert documents_of(out) == [text for text in expected if text not in val]


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def killed_at_rename(number: int, after: bool, *arguments, **options) -> bool:
    """A prepare that is killed before or after its rename `number`. False if it has fewer."""
    count, rename = itertools.count(), os.replace

    def replace(source, target):
        reached = next(count) == number
        if after or not reached:
            rename(source, target)
        if reached:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            prepared(*arguments, **options)
        except Killed:
            return True
    return False


@pytest.fixture
def few(monkeypatch) -> str:
    """Documents of two or three pieces, so that shards end inside of some; as text, two files."""
    monkeypatch.setattr(sources, "BLOCK", 100)
    for n in range(2):
        Path(f"{n}.txt").write_text(" ".join(random.Random(n).choices(["the", "sea", "ships"], k=200)))
    return write_texts("few.jsonl", [f"{n} " * 80 for n in range(16)])


@pytest.mark.parametrize("after, source, options", [
    (False, "jsonl:few.jsonl", {"max_samples": 15}), (True, "jsonl:few.jsonl", {"max_tokens": 1700}),
    (True, "text:?.txt", {"max_tokens": 1200, "val_split": "tail:0.1"})])
def test_killed_at_every_rename(few, after, source, options):
    """Every file appears by a rename, so these are all the states that a kill can leave."""
    options = {"val_split": "hash:0.3", "shard_tokens": 400} | options
    expected = tree(prepared(source, "undisturbed", **options))
    number = 0
    while killed_at_rename(number, after, source, f"out{number}", **options):
        assert tree(prepared(source, f"out{number}", **options, workers=1 + number % 3)) == expected, number
        number += 1
    assert number >= 6
    manifest = stopped_after(2, source, "wrong", **options)
    manifest["shards"][-1]["end"][0] += 1
    packing.write_manifest(Path("wrong"), manifest)
    assert tree(prepared(source, "wrong", **options)) != expected  # the control


def test_a_second_process_waits_for_the_first(capsys):
    source, said = write_texts("x.jsonl", ["one", "two"]), ""
    second = threading.Thread(target=prepared, args=(source, "out"), kwargs=ALL_TRAIN, daemon=True)
    with pipeline.lock_directory(Path("out")):
        second.start()
        while "waiting" not in said:
            said += capsys.readouterr().out
            time.sleep(0.01)
        assert not Path("out/manifest.json").exists()
    second.join(60)
    assert data.read_manifest(Path("out"))["complete"]


class Panic(BaseException):
    """What a panic of Rust becomes."""


@pytest.mark.parametrize("workers, error, number", [(1, Panic, 82), (3, ValueError, 41)])
def test_an_error_of_a_worker_names_the_first_document(workers, error, number, monkeypatch):
    texts = ["known"] * 120
    texts[number - 1] = texts[-1] = "other"
    monkeypatch.setattr(pipeline.in_batches, "__defaults__", (60,))  # a batch has twelve lines
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: text == "known" and [1]
                        or raise_(error("no")))
    found = refused(write_texts("x.jsonl", texts), workers=workers)
    assert re.search(rf"x.jsonl, document {number}, .*{error.__name__}", found)


def test_a_large_vocabulary_makes_shards_of_32_bits():
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    vocab = {f"w{i}": i for i in range(65_600)} | {"[UNK]": 65_600}
    Path("tokenizer.json").write_text(json.dumps(empty | {
        "version": "1.0", "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}))
    out = prepared(write_texts("x.jsonl", ["w65520", "w65599"]), "out", "tokenizer.json", **ALL_TRAIN)
    assert ids_of(out, "train") == [65_601, 65_520, 65_601, 65_599]
    # [MASK] is the id 65,535
    assert [*map(packing.shard_dtype, (65_535, 65_536))] == ["uint16", "uint32"]


# -----------------------------------------------------------------------------------------------------------
# Limits and splits


def test_max_tokens_cuts_a_text_and_its_end_is_held_out(few, monkeypatch):
    monkeypatch.setattr(pipeline.in_batches, "__defaults__", (200,))
    size, second = (sum(Path(f"{n}.txt").stat().st_size for n in numbers) for numbers in ((0, 1), (1,)))
    whole = prepared("text:?.txt", "whole")
    for limit in (99, 150, size - second + 100):
        out = prepared("text:?.txt", str(limit), max_tokens=limit)
        assert ids_of(out, "train") == ids_of(whole, "train")[:limit]
        assert ids_of(out, "val") == ids_of(whole, "val")
        assert len(ids_of(out, "val")) == size - int(size * 0.9) + 1


def test_other_limits():
    texts = ["a b c" if n % 2 else f"{n}" for n in range(9)]
    source = write_texts("x.jsonl", texts)
    for limits, expected in (({"max_tokens": 7}, ["0", "a b "]),
                             ({"min_words": 3, "max_samples": 3}, texts[1:7:2])):
        assert documents_of(prepared(source, str(limits), **limits, **ALL_TRAIN)) == expected
    pairs = write_rows("pairs.jsonl", *({"q": str(i), "a": "x" * 20} for i in range(10)))
    each = 3 + 20  # tokens of each: the start, a digit, the marker and the response
    for limit, samples in ((5 * each - 1, 4), (5 * each, 5), (10_000, 10)):
        out = prepared(pairs, f"{limit}", max_tokens=limit, **PAIR, **ALL_TRAIN)
        assert data.read_manifest(out)["pairs"]["samples"] == samples  # the one that exceeds it is left out


HALF = {"split_on": "|"}


@pytest.mark.parametrize("expected, dataset, options", [
    ("hash:0.1", "csv:a.csv", {}), ("hash:0.01", "csv:b.csv", {}),
    ("hash:0.1", "csv:b.csv", {"max_tokens": 9_999_999}), ("hash:0.01", "csv:b.csv", {"max_tokens": 10**7}),
    ("hash:0.1", "csv:b.csv", {"max_samples": 9_999}), ("hash:0.01", "csv:b.csv", {"max_samples": 10_000}),
    ("hash:0.1", "hf:small", {}),
    ("hash:0.1", "text:?*.txt", {}), ("tail:0.1", "text:??.txt", {}), ("hash:0.1", "text:??.txt", HALF),
    ("hash:0.025", "task:addition", {"max_samples": 9}), ("hash:0.01", "stdlib", {})])
def test_how_much_is_held_out_by_default(monkeypatch, expected, dataset, options):
    """One in ten of small sets, one in a hundred of others, and the end of few texts."""
    for number in range(100):
        Path(f"{number}.txt").write_text("text")
    Path("small").mkdir()
    for name, size in {"a.csv": 39_999_999, "b.csv": 40_000_000, "small/a.csv": 9}.items():
        os.truncate(os.open(name, os.O_CREAT | os.O_RDWR), size)
    for files, unlike in ((1000, ""), (999, "stdlib")):  # Linux may leave out the tests
        monkeypatch.setattr(pipeline, "stdlib_files", lambda files=files: [Path()] * files)
        found = pipeline.settings_of(dataset, **options)["val_split"]
        assert (found == expected) == (dataset != unlike)


@pytest.mark.parametrize("source, named", [("jsonl:x.jsonl", "hash:0.5"), ("text:x.txt", "tail:0.1")])
def test_a_set_without_validation_names_a_split_that_works(source, named, capsys):
    """Of a text one that works with a single document."""
    texts = [text for text in map(str, range(9)) if pipeline.hash64(text) > 2**64 / 10]
    write_texts("x.jsonl", texts)
    Path("x.txt").write_text("some text")
    for split, says in ((None, True), (named, False)):
        out = prepared(source, f"{says}", val_split=split, **HALF if "txt" in source else {})
        assert ("val" in splits_of(out)) != says == (named in capsys.readouterr().out)


def test_a_set_may_be_held_out_altogether():
    texts = [text for text in map(str, range(99)) if pipeline.hash64(text) < 2**64 / 10]
    source = write_texts("x.jsonl", texts)
    named = re.search(r"--val-split (\S+) ", refused(source))[1]
    for split, there in ((named, {"train"}), ("hash:1", {"val"})):
        assert splits_of(prepared(source, split, val_split=split)) == there
    assert "x.jsonl" in refused(write_texts("x.jsonl", []), "empty", val_split="hash:1")


def test_validation_sets_of_a_field():
    rows = [{"q": f"film {n}", "a": n % 2, "kind": [0, None, True, "x y"][n % 4]} for n in range(300)]
    make = {"val_field": "kind", "val_split": "hash:0.3"} | PAIR
    out = prepared(write_rows("x.jsonl", *rows), "out", **make)
    assert data.read_manifest(out)["pairs"]["samples"] == 300  # an answer 0 is not empty
    assert splits_of(out) == {"train", "val_0", "val_none", "val_true", "val_x-y"}
    rows[-2]["kind"] = "x+y"
    assert re.search(r"'x y'.*'x\+y'.*val_x-y", refused(write_rows("x.jsonl", *rows), "y", **make))


# -----------------------------------------------------------------------------------------------------------
# What is said


STORY = EOT.join(f"a cat {n}\n" for n in range(9))


@pytest.mark.parametrize("texts, options, said", [
    (["a", None, " \n", "", "b c"], {"min_words": 2}, "note: 4 documents"), (["a", None], {}, "note: 1 doc"),
    (["a", None, "b"], {"max_tokens": 1}, None),
    ([STORY], {}, "note: .* 8 times"), (STORY, {}, "note: .* 8 times.*--split-on"),
    (STORY, {"split_on": EOT}, None), (STORY, {"split_on": "<end>"}, "WARNING: --split-on '<end>'.* x.txt")])
def test_what_is_left_out_or_looks_like_a_mistake_is_said(capsys, monkeypatch, texts, options, said):
    monkeypatch.setattr(pipeline, "LINE_EVERY", 0)
    Path("x.txt").write_text(str(texts))
    prepared("text:x.txt" if isinstance(texts, str) else write_texts("x.jsonl", texts), "out",
             **ALL_TRAIN, **options)
    out, err = capsys.readouterr()
    assert re.search(said, out) if said else "note:" not in out and "WARNING" not in out
    assert re.search(r"^0\.0M tokens", out, re.M) and not err  # without a terminal, lines


# -----------------------------------------------------------------------------------------------------------
# Another source


def later(path, seconds: float = 10):
    os.utime(path, (time.time() + seconds,) * 2)


@pytest.mark.parametrize("large", [False, True])
def test_an_edit_of_the_source_is_noticed(large, capsys, monkeypatch):
    """Of a large one, a start reads only samples, and all if it is newer than the shards."""
    monkeypatch.setattr(sources.identity_of, "__defaults__", (1000 if large else 10**9,))
    text = "the cat sat on the mat and looked at ships\n" * 10_000
    Path("x.txt").write_text(text)
    options = {"shard_tokens": 9000, "max_tokens": 30_000, "split_on": "ships"} | ALL_TRAIN
    stopped_after(2, "text:x.txt", "begun", **options)
    out = prepared("text:x.txt", "out", **options)
    manifest = data.read_manifest(out)
    check = functools.partial(pipeline.check_source, "text:x.txt", out, manifest["settings"])
    later("x.txt")
    assert prepared("text:x.txt", "out", **options) == out, "a time alone refuses nothing"
    check()
    Path("x.txt").write_text(text[:43 * 2500] + text[43 * 2500:].replace("cat", "dog", 1))  # between samples
    later("x.txt", -1000)
    if large:
        with monkeypatch.context() as patch:
            patch.setattr(sources, "sha256_of", None)  # all is read only if a file is newer
            assert prepared("text:x.txt", "out", **options) == out
    later(out / "tokenizer.json", -2000)  # the text was edited while its shards were written
    for name in "out", "begun":
        assert re.search(f"{name} .*source .*--out", refused("text:x.txt", name, **options))
        later("x.txt")
    with pytest.raises(UserError, match="--data out.*--out.*--init-from"):
        check()
    if large:
        monkeypatch.setattr(pipeline, "LARGEST_READ", 1000)
        assert "note" not in capsys.readouterr().out
        check()
        assert capsys.readouterr().out.count("note: text:x.txt ") == 1


def test_what_else_is_refused_or_not_needed(capsys, monkeypatch):
    Path("set").mkdir()
    for name in "row", "now":
        write_texts("set/a.jsonl", [f"{name} {n}" for n in range(99)])
        assert name == "row" or "source" in refused("hf:set")
        assert name == "now" or prepared("hf:set", "out") == prepared("hf:set", "out")
    prepared("jsonl:set/*", "half", val_split="hash:0.5")
    assert "hash:0.5, now hash:0.1" in refused("jsonl:set/*", "half")  # also if it is the default
    assert "set holds a.jsonl" in refused("jsonl:set/*", "set")
    settings = data.read_manifest(Path("half"))["settings"]
    monkeypatch.setattr(sources, "sha256_of", lambda path: raise_(PermissionError(13, "denied")))
    pipeline.check_source("jsonl:set/*", Path("half"), settings)  # the shards are enough
    assert "denied" in capsys.readouterr().out


# -----------------------------------------------------------------------------------------------------------
# A trainer's --data


def test_the_first_process_of_a_node_prepares_and_the_others_wait(corpus, shards):
    found, watched = [], threading.Event()
    locate = functools.partial(pipeline.locate, f"text:{corpus}", "bytes", 0)
    waiting = threading.Thread(daemon=True, target=lambda: found.append(locate(1, watched.set)))
    waiting.start()
    assert watched.wait(60) and not found
    assert bins(locate(0)) == bins(shards)
    waiting.join(60)
    assert found == [Path("shards/corpus-bytes")]


@pytest.mark.parametrize("source", ["hf:set", "jsonl:set/train.jsonl", "task:addition"])
def test_a_smoke_test_does_not_decide_what_the_next_run_reads(source, monkeypatch, capsys):
    """Files of other splits are named."""
    monkeypatch.setattr(pipeline, "TASK_TOKENS", 5000)
    Path("set").mkdir()
    for name in "train", "test":
        write_texts(f"set/{name}.jsonl", [f"{name} {n} " * 9 for n in range(120)])
    small, large, again = (pipeline.locate(source, "bytes", 5000, 0, max_tokens=n) for n in (900, None, 900))
    assert small == again and len(ids_of(small, "train")) < len(ids_of(large, "train"))
    assert ("not read: test\n" in capsys.readouterr().out) == (source == "hf:set")


@pytest.fixture
def locate(shards, monkeypatch):
    """Calls locate() where the data have been prepared with some settings. Returns the options of `prepare`
    if it is called, or True if the data are used as they are.
    """
    monkeypatch.setattr(pipeline, "check_source", lambda *_: None)
    monkeypatch.setattr(pipeline, "prepare", lambda *_, **options: options)

    def call(source: str, settings: dict, limits: dict, useful: int = 1000, rank: int = 0, **changes):
        out = pipeline.directory_of(source, {"tokenizer": "bytes"})
        manifest = data.read_manifest(shards) | changes
        manifest["settings"] = {"tokenizer": "bytes"} | settings
        out.mkdir(parents=True, exist_ok=True)
        packing.write_manifest(out, manifest)
        return (found := pipeline.locate(source, "bytes", useful, rank, **LIMITS | limits)) == out or found
    return call


@pytest.mark.parametrize("source, settings, limits, named", [
    ("./shards/x", {"max_tokens": 900}, {"max_tokens": 901}, "--max-tokens .900, now 901"),
    ("jsonl:x", {"min_words": 3}, {}, "--min-words .3.* --data shards/x-bytes "),
    ("./shards/x", {}, {"max_samples": 7}, "None, now 7"),
    ("task:addition", {"max_samples": 20}, {}, "--max-samples .20"),
    ("jsonl:x", {"max_tokens": 900}, {}, "--max-tokens .900"), ("jsonl:x", {"min_words": 0}, {}, None),
    ("task:addition", {"max_tokens": 900}, {}, None),
    ("hf:x", {"max_tokens": 900}, {}, None), ("./shards/x", {"max_tokens": 900}, {}, None)])
def test_data_with_other_limits_are_refused(locate, source, settings, limits, named):
    """So those of another run, which an older version didn't name, don't become those of a real one."""
    for rank, complete in itertools.product((0, 1), (True, False) if named else (True,)):
        with pytest.raises(UserError, match=named) if named else contextlib.nullcontext():
            assert locate(source, settings, limits, rank=rank, complete=complete) is True


@pytest.mark.parametrize("source, most, useful, limits, said", [
    ("hf:x", 2000, 2001, {}, " 2,000 .* 2,001: .*--max-tokens 2001"), ("hf:x", 2000, 2000, {}, None),
    ("hf:x", 10**7, 10**8, {}, None),  # there is no more
    ("task:addition", 900, 3000, {}, " 900 .* 3,500,000:")])
def test_a_larger_model_is_told_how_to_get_more(locate, capsys, source, most, useful, limits, said):
    assert locate(source, {"max_tokens": most}, limits, useful) is True
    out = capsys.readouterr().out
    assert re.search(said, out) if said else not out


def test_an_endless_source_is_prepared_up_to_what_is_useful(locate, capsys):
    """What never got a shard begins again, and what has some goes on as it was begun."""
    nothing = {"complete": False, "shards": []}
    assert locate("imdb", {"max_tokens": 5}, {}, **nothing) == LIMITS | {"max_tokens": 1000}
    assert re.search("imdb .* 1,000 .*--max-tokens", capsys.readouterr().out)
    limits = LIMITS | {"max_tokens": 7, "max_samples": 5, "min_words": 2}
    for source in "imdb", "jsonl:x":
        assert locate(source, {}, limits, **nothing) == limits and not capsys.readouterr().out
    sums = {"max_tokens": 3_500_000, "row": 90}
    assert locate("task:addition", {}, {"row": 90}, **nothing) == LIMITS | sums
    assert locate("imdb", {"row": 90, "source": "x"}, {}, complete=False) == {"row": 90}


# -----------------------------------------------------------------------------------------------------------
# The hub


def test_a_repository_that_changes_after_a_kill_is_read_as_it_was(monkeypatch):
    """Also where an earlier pass has trained the tokenizer."""
    import datasets
    import huggingface_hub
    load, newest = datasets.load_dataset, ["one"]
    for name in "one", "two":  # folders that are read as a repository of the hub is
        Path(name).mkdir()
        write_texts(f"{name}/a.jsonl", [f"{n} " + f"{name} cat " * 100 for n in range(200)])
    monkeypatch.setattr(sources, "reachable", lambda url: True)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: argparse.Namespace(sha=newest[0]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, revision, **given: load(revision, **given))
    make = functools.partial(prepared, "hf:some/corpus", tokenizer="bpe:300", shard_tokens=20_000)
    whole = bins(make("whole"))
    manifest = stopped_after(1, "hf:some/corpus", "killed", "bpe:300", shard_tokens=20_000)
    assert manifest["reading"]["revision"] == "one"
    newest[0] = "two"
    assert bins(make("killed")) == whole != bins(make("later")) and len(whole) > 2


def test_a_resumed_prepare_of_the_hub_reads_what_is_left(monkeypatch):
    """After any kills it writes the same bytes, without the files that it has read. The first one names the
    fields.
    """
    Path("many").mkdir()
    files = [Path(f"many/{at:05}.jsonl") for at in range(0, 12_000, 1500)]
    for number, path in enumerate(files):  # those that begin a batch have no text
        write_rows(path, *({"text": f"{n} " + "a b c " * (n % 7) * (n % 1000 > 0), "kind": n % 2}
                           for n in range(number * 1500, number * 1500 + 1500)))
    options = {"val_split": "hash:0.1", "shard_tokens": 20_000, "val_field": "kind", "min_words": 2}
    whole = bins(prepared("hf:many", "whole", **options))
    for kill in 1, 1, 2, len({name[-10:] for name in whole}) - 7:
        manifest = stopped_after(kill, "hf:many", "killed", **options)
    monkeypatch.setattr(pipeline, "current_identity", lambda source, out: manifest["settings"]["source"])
    read = files[1:(manifest["reading"]["document"] - 4000) // 1500]  # it reads the last two again
    for path in read:
        path.write_bytes(b"damaged")
    assert len(read) > 1 and "many" in refused("hf:many", "new", **options)
    assert bins(prepared("hf:many", "killed", **options)) == whole


# -----------------------------------------------------------------------------------------------------------
# Trainers that prepare their own data


def test_a_trainer_prepares_sums_and_reports_each_level(monkeypatch):
    monkeypatch.setattr(pipeline, "TASK_TOKENS", 30000)
    for module in (sources, pipeline):
        monkeypatch.setattr(module, "UNTRAINED", 0.3)
    trainer = Trainer("train_gpt2.py", seq_len=None, size="tiny", batch=2)
    done = trainer.train(0, "task:addition", "run", steps=2, eval_every=2)
    said = Path("run/train.log").read_text()
    assert done.code == 0 and "task:addition is prepared up to 30,000 tokens" in said, done.out
    groups = r"\| trained-1 \d+\.\d%, .*, untrained-5 \d+\.\d%, .*, untrained-8 \d+\.\d% \|"
    assert re.search("exact match .*" + groups, done.out) and "rows of 256" in done.out, done.out
    assert trainer.here("--out", "run", "--prompt", "1+2", "--max-new-tokens", "1").code == 0


def test_a_trainer_says_what_is_wrong_with_the_splits():
    """That nothing is evaluated, and that the parts of a mixture are split unlike."""
    dataset = write_texts("x.jsonl", [f"row {n} " * 9 for n in range(400)])
    for name, split in (("none", "hash:0.001"), ("a", "hash:0.1"), ("b", "hash:0.2")):
        prepared(dataset, name, val_split=split)
    Path("x.txt").write_text("row of text\n" * 99)
    for name in "c", "d":
        prepared("text:x.txt", name)
    for mixture, warned in (("none", "hash:0.5"), ("a", ""), ("a,a,b", "hash:0.1, hash:0.2"),
                            ("c,d", "tail:0.1 of c, tail:0.1 of d")):
        done = Trainer("train_gpt2.py").train(0, mixture, f"run-{mixture}", steps=1)
        assert done.code == 0 and done.out.count("--val-split") == bool(warned), done.out
        assert warned in done.out


def test_text_that_was_appended_is_trained_on_as_the_guide_says():
    """With the tokenizer of the first run. Nothing that this has trained on is in the new validation set, and
    without --init-from the grown text is refused.
    """
    guide = (ROOT / "docs" / "running.md").read_text()
    commands = re.search(r"\*\*Appended text\.\*\*.*?```bash\n(.*?)```", guide, re.S)[1].splitlines()
    first, second = (shlex.split(line.partition(".py")[2], comments=True) for line in commands)
    trainer = Trainer("train_gpt2.py")

    def train(words, code: int = 0) -> str:
        done = trainer.here(*trainer.flags(None, None, steps=2), *words)
        assert done.code == code, done.out
        return done.out

    def lines(shards: str, split: str) -> list[bytes]:
        return bytes(id for id in ids_of(Path("shards", shards), split) if id < 256).splitlines()

    Path("diary.txt").write_text("".join(f"the {n}. day of spring\n" for n in range(900)))
    train(first)
    trained = lines("diary-bytes", "train")
    with open("diary.txt", "a") as file:
        file.writelines(f"the {n}. night of autumn\n" for n in range(90))
    assert re.search("shards/diary-bytes .*--init-from", train(first, 2))
    assert "runs/diary/checkpoints/" in train(second)
    ours, theirs = (Path(folder, "tokenizer.json").read_bytes()
                    for folder in ("runs/diary", "shards/diary-diary"))
    assert ours == theirs
    held_out = lines("diary-diary", "val")[1:]
    assert {b"the 89. night of autumn", b"the 899. day of spring"} <= {*held_out}
    assert not {*trained} & {*held_out} and b"the 9. day of spring" in trained
    log = log_of(Path("runs/diary-2"))
    assert log and train(second) and log_of(Path("runs/diary-2")) == log, "it was complete"
