"""data.py: shards, the order of samples, batches, validation, several directories."""

import io
import itertools
import math
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import place
from pair_data import (
    pairs,  # noqa: F401
    prepare,
    samples,
    split_rows,
)
from shard_files import ids_of, write_rows

import data
from cli.errors import UserError
from prepare import packing
from prepare.pipeline import directory_of


@pytest.fixture(scope="session")
def dataset(shards) -> data.Dataset:
    return data.Dataset([shards], 64)


def write(folder: Path, width: int = 16, **arrays) -> list[Path]:
    """Shards without a manifest."""
    for name, tokens in arrays.items():
        packing.write_shard(folder / f"{name}.bin", [np.asarray(tokens)], f"uint{width}")
    return [folder / f"{name}.bin" for name in arrays]


# -----------------------------------------------------------------------------------------------------------
# Shards


def test_shards_have_the_form_of_llmc_and_hold_the_text(corpus, shards, dataset):
    train, val = ids_of(shards, "train"), ids_of(shards, "val")
    assert train[0] == val[0] == 256, "a document starts with end-of-text"
    assert bytes(train[1:] + val[1:]) == corpus.read_bytes()
    assert train == dataset.train.tokens[0].tolist() and dataset.train.num_tokens == len(train)


def test_shards_of_two_widths_do_not_mix(tmp_path):
    paths = write(tmp_path, 32, wide=[70_000, 5, 65_536]) + write(tmp_path, narrow=[1, 2, 3])
    assert data.Shards(paths[:1], 2).tokens[0].tolist() == [70_000, 5, 65_536]
    with pytest.raises(UserError, match=str(tmp_path)):
        data.Shards(paths, 2)


def test_shards_without_a_manifest_need_a_tokenizer(shards, dataset, tmp_path):
    for path in shards.glob("*.bin"):
        shutil.copy(path, tmp_path)
    with pytest.raises(UserError, match="--tokenizer"):
        data.Dataset([tmp_path], 64)
    bare, again = (data.Dataset([tmp_path], 64, "bytes") for _ in range(2))
    assert bare.val[""].tokens[0].tolist() == dataset.val[""].tokens[0].tolist()
    with open(tmp_path / "train_000000.bin", "r+b") as file:
        file.seek(5000)
        file.write(b"\0\1")
    assert bare.fingerprint == again.fingerprint != data.Dataset([tmp_path], 64, "bytes").fingerprint


def test_val_is_a_whole_part_of_a_name(tmp_path):
    names = {"retrieval_000000": "train", "interval_1": "train", "x_val_000000": "val", "val": "val",
             "fineweb-val1": "val", "validation_0": "val", "eval_0": "val"}
    write(tmp_path, **dict.fromkeys(names, range(9)))
    manifest, _ = data.manifest_of_plain_shards(tmp_path, "bytes")
    assert {shard["file"][:-4]: shard["split"] for shard in manifest["shards"]} == names


@pytest.mark.parametrize("at, wrong, masked", [(65, 300, False), (128, 257, False), (65, 60_000, True)])
def test_an_id_that_the_tokenizer_lacks_is_refused_as_it_is_read(tmp_path, at, wrong, masked):
    """Also where it is only the label after a row. 257 is [MASK]."""
    tokens = np.arange(129)
    write(tmp_path, train_0=tokens, val_0=tokens)
    tokens[at] = wrong
    write(tmp_path, val_1=tokens)
    dataset = data.Dataset([tmp_path], 64, "bytes")
    masker = data.Masker(dataset.tokenizer, 64, 0.3, 0) if masked else None
    data.read_rows(dataset.val[""], np.arange(2), masker=masker)
    with pytest.raises(UserError, match=rf"val_1.bin .* {wrong}\D.* 257 "):
        data.read_rows(dataset.val[""], np.arange(4), masker=masker)
    write(tmp_path, train_0=tokens)
    with pytest.raises(UserError, match=rf"train_0.bin .* {wrong}\D"):
        data.Dataset([tmp_path], 64, "bytes")


def test_a_file_of_nanogpt_is_named_with_a_command_that_converts_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(500, dtype=np.uint16).tofile("train.bin")
    with pytest.raises(UserError) as error:
        data.open_shard(Path("train.bin"))
    Path("x").mkdir()
    exec(re.search(r'python -c "(.*?)"', str(error.value))[1])
    assert data.open_shard(Path("x/train_000000.bin")).tolist() == list(range(500))


def test_entropy_is_that_of_the_labels(tmp_path):
    paths = write(tmp_path, x=[9] + [1] * 6 + [2] * 2)
    rows = data.Shards(paths, 4)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert data.unigram_entropy([rows] * 2) == pytest.approx(expected, 1e-12)
    assert data.unigram_entropy([rows], 5) == 0 < data.unigram_entropy([rows], 6)  # of the first 6 or 7
    marked = data.Shards(paths, 4, lambda x: (x == 9) | (np.arange(4) == 3))  # the labels 1, 1 and 2
    assert data.unigram_entropy([marked]) == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


@pytest.mark.parametrize("dataset, tokenizer, expected", [
    ("stdlib", "bpe:4096", "stdlib-bpe4096"), ("text:books/quijote.txt", "gpt2", "quijote-gpt2"),
    ("text:/data/es/**/*.txt", "bytes", "es-bytes"), ("text:*.txt", "bytes", "text-bytes"),
    ("hf:allenai/c4:es", "gpt2", "allenai-c4-es-gpt2"), ("text:a.txt", "runs/x/hf/tokenizer.json", "a-x"),
    ("text:a.txt", "runs/x/tokenizer.json", "a-x"), ("text:a.txt", "runs/x/english.json", "a-english")])
def test_shards_are_named_after_source_and_tokenizer(tmp_path, monkeypatch, dataset, tokenizer, expected):
    monkeypatch.chdir(tmp_path)
    if "/" in tokenizer:
        Path(tokenizer).parent.mkdir(parents=True)
        Path(tokenizer).touch()
    assert directory_of(dataset, {"tokenizer": tokenizer}) == Path("shards", expected)


def test_batches_come_back_in_order_though_workers_overtake_each_other():
    ended, taken = [], []

    def work(n: int, factor: int) -> int:
        time.sleep(0.03 * (n % 4 == 0))
        ended.append(n)
        return n * factor

    batches = data.in_order((taken.append(n) or n for n in range(40)), 3, work, 2)
    assert next(batches) == (0, 0) and len(taken) == 7
    assert [*batches] == [(n, 2 * n) for n in range(1, 40)]
    assert ended != sorted(ended), "no worker has overtaken another"


def test_what_reads_ahead_ends_with_its_reader_and_its_error_is_raised(dataset, monkeypatch):
    before = {*threading.enumerate()}
    first = data.Loader(dataset.train, 2, place(0, 1), 0)
    first.step(1)
    batches = data.validation_batches(dataset.val[""], 1, place(0, 1))
    next(batches)
    threads = {*threading.enumerate()} - before
    first.close(), batches.close()
    for thread in threads:
        thread.join(20)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)
    monkeypatch.setattr(data, "read_rows", mock.Mock(side_effect=OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        data.Loader(dataset.train, 4, place(0, 1), 0).step(1)


# -----------------------------------------------------------------------------------------------------------
# The order of samples


def test_the_order_is_what_it_was():
    """A checkpoint stores only the number of samples. With another order, a run would repeat some."""
    first_two = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert data.splitmix64(first_two).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # as published
    assert data.shuffled(np.arange(997, 1003), 1000, 7).tolist() == [136, 496, 386, 545, 577, 292]
    assert data.shuffled(10**12 + np.arange(3), 10**6, -1).tolist() == [931606, 234395, 482195]


@pytest.mark.parametrize("seed", [0, -1])
def test_an_epoch_visits_every_row_once(seed):
    for n, epoch in itertools.product((*range(1, 18), 64, 65, 256, 257, 4097, 40_009), (0, 1, 10**6)):
        found = data.shuffled(epoch * n + np.arange(n), n, seed)
        assert found.dtype == np.int64 and np.array_equal(np.sort(found), np.arange(n)), (n, epoch)


def test_rows_of_many_shards(tmp_path):
    """No row crosses from one shard to the next, and only the rest at the end of each is lost."""
    arrays = {f"s{n}": np.random.default_rng(n).integers(0, 60_000, n).tolist()
              for n in (1000, 0, 1, 100, 101, 200, 201, 7000)}
    rows = data.Shards(write(tmp_path, **arrays), 100)
    expected = [[tokens[a:a + 100], tokens[a + 1:a + 101]] for tokens in arrays.values()
                for a in range(0, len(tokens) - 100, 100)]
    assert rows.rows == len(expected) == 9 + 1 + 1 + 2 + 69
    for some in (np.arange(82), np.array([0, 8, 9, 10, 11, 12, 13, 81])):
        assert np.stack(data.read_rows(rows, some), 1).tolist() == [expected[row] for row in some]
    with pytest.raises(IndexError):
        data.read_rows(rows, np.array([0, 82]))


# -----------------------------------------------------------------------------------------------------------
# Training batches


@pytest.mark.parametrize("world_size, batch, grad_accum", [(1, 16, 1), (2, 2, 4), (4, 4, 1), (8, 1, 2)])
def test_the_global_batch_is_that_of_the_order_on_any_number_of_ranks(shards, world_size, batch,
                                                                      grad_accum):
    """Into the second epoch. A row is 1,024 tokens as they lie in the shard, its targets the same one on."""
    rows = data.Dataset([shards], 1024).train
    tokens = rows.tokens[0].tolist()
    loaders = [data.Loader(rows, batch, place(rank, world_size), 7, 48) for rank in range(world_size)]
    for step in range(rows.rows // 16):
        found = [row for one in loaders for x, y in one.step(grad_accum)[1]
                 for row in torch.stack([x, y], 1).tolist()]
        order = data.shuffled(48 + step * 16 + np.arange(16), rows.rows, 7) * 1024
        assert sorted(found) == sorted([tokens[r:r + 1024], tokens[r + 1:r + 1025]] for r in order)


def test_labels_know_the_largest_id_and_what_is_not_learned(tmp_path):
    """65,535 is an id of some vocabularies, and no label that is left out."""
    rows = data.Shards(write(tmp_path, x=np.arange(65_536 - 160, 65_536)), 53, lambda x: x % 2 == 0)
    count, [batch] = data.Loader(rows, 3, place(0, 1), 0).step(1)
    assert count == (batch[1] >= 0).sum() == 3 * 53 - (3 * 53) // 2
    for x, y in (batch, *data.validation_batches(rows, 3, place(0, 1))):
        assert y.max() == 65_535 and torch.equal(y, torch.where(x % 2 == 0, x + 1, -1))


def test_steps_of_another_size_begin_where_the_last_one_ended(dataset):
    one, other = (data.Loader(dataset.train, 2, place(1, 2), 0, 8) for _ in range(2))
    for n in (2, 3, 3, 1, 2):
        for batch in one.step(n)[1]:
            assert torch.equal(torch.stack(batch), torch.stack(other.step(1)[1][0]))


# -----------------------------------------------------------------------------------------------------------
# Validation


@pytest.mark.parametrize("limit", [None, 1, 13])
def test_validation_counts_every_row_once_on_any_number_of_ranks(dataset, limit):
    rows = dataset.val[""]
    tokens, count = rows.tokens[0].tolist(), limit or rows.rows
    expected = sorted(tokens[r * 64:r * 64 + 64] + tokens[r * 64 + 1:r * 64 + 65] for r in range(count))
    for world_size, batch in ((1, 4), (3, 7), (5, 4), (8, 500)):
        batches = [[*data.validation_batches(rows, batch, place(rank, world_size), limit)]
                   for rank in range(world_size)]
        assert {*map(len, batches)} == {-(-count // (batch * world_size))}, "some would wait for the others"
        x, y = map(torch.cat, zip(*itertools.chain(*batches)))
        counts = (y >= 0).all(1)
        assert x.dtype == y.dtype == torch.int64 and (y[~counts] == -1).all()
        assert sorted(torch.cat([x, y], 1)[counts].tolist()) == expected, (world_size, batch)


@pytest.mark.parametrize("rank, terminal, shown", [(0, True, True), (1, True, False), (0, False, False)])
def test_rank_0_shows_the_progress_of_an_evaluation(dataset, monkeypatch, rank, terminal, shown):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    assert [*data.validation_batches(dataset.val[""], 4, place(rank, 2))]
    assert ("0/83" in screen.getvalue()) == shown == bool(screen.getvalue())


# -----------------------------------------------------------------------------------------------------------
# Several directories


def test_names_of_validation_sets():
    def manifest(*splits):
        return {"shards": [{"file": f"{split}_{i}", "split": split} for i, split in enumerate(splits)]}

    a, b, other = Path("a/data"), Path("b/data"), Path("b/more")
    for manifests, sets in (
            ({a: manifest("train")}, {}),
            ({a: manifest("val", "train", "val", "val_x")},
             {"": [a / "val_0", a / "val_2"], "x": [a / "val_x_3"]}),
            ({a: manifest("val_x", "val_y"), other: manifest("val", "val_x")},
             {"data-x": [a / "val_x_0"], "y": [a / "val_y_1"], "more": [other / "val_0"],
              "more-x": [other / "val_x_1"]}),
            ({a: manifest("val"), b: manifest("val_z"), other: manifest("train")},
             {"a/data": [a / "val_0"], "z": [b / "val_z_0"]})):
        assert data.files_of_sets(manifests) == sets


def test_a_comma_is_part_of_a_name_unless_it_follows_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "a,b"):
        (tmp_path / name).mkdir()
    for text, wanted in ("one,two,two", ["one", "two", "two"]), ("a,b", ["a,b"]), ("text:c,d", ["text:c,d"]):
        assert data.sources_of(text) == wanted


def test_a_directory_that_is_named_twice_is_read_twice_in_each_epoch(pairs, tmp_path):
    other = prepare(write_rows(tmp_path / "o.jsonl", *samples(300, seed=5)), tmp_path / "other")
    both = data.Dataset([pairs, other, other], 128)
    x, _ = data.read_rows(both.train, np.arange(both.train.rows))
    rows = [row for directory in (pairs, other, other) for row in split_rows(directory, "train")]
    assert np.array_equal(x, rows) and both.name == "pairs+other+other"
    assert both.val["other"].rows == len(split_rows(other, "val"))  # evaluated once
    prints = [data.Dataset(sets, 128).fingerprint for sets in ([pairs], [pairs, other], [other, pairs])]
    assert len({*prints, both.fingerprint}) == 4
