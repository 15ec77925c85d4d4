"""data.py: shards, the order of samples, batches, validation."""

import itertools
import json
import math
import random
import re
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import place
from shard_files import documents_of, flip, ids_of, prepared, write_texts

import data
from cli.errors import UserError
from prepare import packing
from startup.plan import plan_batch


@pytest.fixture(scope="session")
def dataset(shards) -> data.Dataset:
    return data.Dataset([shards], 64)


def write(folder: Path, width: int = 16, **arrays) -> list[Path]:
    """Shards without a manifest."""
    for name, tokens in arrays.items():
        packing.write_shard(folder / f"{name}.bin", [np.asarray(tokens)], f"uint{width}")
    return [folder / f"{name}.bin" for name in arrays]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -----------------------------------------------------------------------------------------------------------
# Shards


def test_shards_have_the_form_of_llmc_and_hold_the_text(corpus, shards, dataset):
    train, val = ids_of(shards, "train"), ids_of(shards, "val")
    assert train[0] == val[0] == 256, "a document starts with end-of-text"
    assert bytes(train[1:] + val[1:]) == corpus.read_bytes()
    assert train == dataset.train.tokens[0].tolist() and dataset.train.num_tokens == len(train)


def test_shards_of_32_bits(tmp_path):
    wide, = write(tmp_path, 32, wide=[70_000, 5, 65_536])
    assert data.open_shard(wide).tolist() == [70_000, 5, 65_536]
    narrow, = write(tmp_path, narrow=[1, 2, 3])
    with pytest.raises(UserError, match=str(tmp_path)):
        data.Shards([narrow, wide], 2)


def test_shards_without_a_manifest_need_a_tokenizer(shards, dataset, tmp_path):
    for path in shards.glob("*.bin"):
        shutil.copy(path, tmp_path)
    with pytest.raises(UserError, match="--tokenizer"):
        data.Dataset([tmp_path], 64)
    bare, again = (data.Dataset([tmp_path], 64, "bytes") for _ in range(2))
    for mine, theirs in (bare.train, dataset.train), (bare.val[""], dataset.val[""]):
        assert [a.tolist() for a in mine.tokens] == [a.tolist() for a in theirs.tokens]
    assert bare.fingerprint == again.fingerprint
    flip(tmp_path / "train_000000.bin", 5000)
    assert bare.fingerprint != data.Dataset([tmp_path], 64, "bytes").fingerprint


def test_val_is_a_whole_part_of_a_name(tmp_path):
    names = {"retrieval_000000": "train", "interval_1": "train", "x_val_000000": "val", "val": "val",
             "fineweb-val1": "val", "validation_0": "val", "eval_0": "val"}
    write(tmp_path, **dict.fromkeys(names, range(9)))
    manifest, _ = data.manifest_of_plain_shards(tmp_path, "bytes")
    assert {shard["file"][:-4]: shard["split"] for shard in manifest["shards"]} == names


@pytest.mark.parametrize("split, at, wrong, masked", [
    ("train", 65, 300, False), ("val", 128, 257, False), ("val", 65, 60_000, True)])
def test_an_id_that_the_tokenizer_lacks_is_refused_as_it_is_read(tmp_path, split, at, wrong, masked):
    """Also where it is only the label after a row. 257 is [MASK]."""
    tokens = np.arange(129)
    write(tmp_path, x_train_0=tokens, x_train_1=tokens, x_val_0=tokens, x_val_1=tokens)
    tokens[at] = wrong
    write(tmp_path, **{f"x_{split}_1": tokens})
    dataset = data.Dataset([tmp_path], 64, "bytes")
    masker = data.Masker(dataset.tokenizer, 64, 0.3, 0) if masked else None
    sets = {"train": dataset.train, "val": dataset.val[""]}
    rows = sets.pop(split)
    data.read_rows(*sets.values(), np.arange(4), masker=masker)
    data.read_rows(rows, np.arange(2), masker=masker)
    with pytest.raises(UserError, match=rf"x_{split}_1.bin .* {wrong}\D.* 257 "):
        data.read_rows(rows, np.arange(4), masker=masker)
    write(tmp_path, x_train_0=tokens)
    with pytest.raises(UserError, match=rf"x_train_0.bin .* {wrong}\D"):
        data.Dataset([tmp_path], 64, "bytes")


def test_a_file_of_nanogpt_is_named_with_a_command_that_converts_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(500, dtype=np.uint16).tofile("train.bin")
    with pytest.raises(UserError) as error:
        data.open_shard(tmp_path / "train.bin")
    (tmp_path / "x").mkdir()
    exec(re.search(r'python -c "(.*?)"', str(error.value))[1])
    assert data.open_shard(tmp_path / "x" / "train_000000.bin").tolist() == list(range(500))


def test_the_row_of_pairs_is_that_of_a_manifest_that_can_be_read(shards, tmp_path):
    manifest = json.loads((shards / "manifest.json").read_text())
    roles = {"start": 256, "response": 258, "end": -1}
    packing.write_manifest(tmp_path, manifest | {"row": 90, "roles": roles})
    assert data.packed_row_length(tmp_path) == 90 and data.packed_row_length(shards) is None
    (tmp_path / "manifest.json").write_text("{")
    assert data.packed_row_length(tmp_path) is None  # all ranks are told later


def test_a_mixture_knows_whether_its_parts_are_split_alike(tmp_path):
    """Of a set and a part of it. Split unlike, a document is in a validation set and in a training set."""
    texts = [f"row {n} of many" for n in range(400)]
    large, small = (write_texts(tmp_path / f"{n}.jsonl", texts[::n]) for n in (1, 4))
    for name, split in (("alike", "hash:0.1"), ("unlike", "hash:0.01")):
        a = prepared(large, tmp_path / name / "a", val_split=split)
        b = prepared(small, tmp_path / name / "b")
        dataset = data.Dataset([a, b, b], 32)
        assert dataset.val_splits == {"hash:0.1", split}
        assert len(dataset.train.tokens) == 3  # b is read twice
        train, of_b = {*documents_of(a, "train")}, {*documents_of(b, "train")}
        both = train.intersection(documents_of(b, "val")) | of_b.intersection(documents_of(a, "val"))
        assert bool(both) == (name == "unlike")


def test_entropy_is_that_of_the_labels(tmp_path):
    paths = write(tmp_path, x=[9] + [1] * 6 + [2] * 2)
    rows = data.Shards(paths, 4)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert data.unigram_entropy([rows]) == data.unigram_entropy([rows] * 2) == pytest.approx(expected, 1e-12)
    assert data.unigram_entropy([rows], 5) == 0  # the first six
    assert data.unigram_entropy([rows], 6) > 0
    marked = data.Shards(paths, 4, lambda x: (x == 9) | (np.arange(4) == 3))  # the labels 1, 1 and 2
    assert data.unigram_entropy([marked]) == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


@pytest.mark.parametrize("dataset, tokenizer, expected", [
    ("stdlib", "bpe:4096", "stdlib-bpe4096"), ("text:books/quijote.txt", "gpt2", "quijote-gpt2"),
    ("text:books/*.txt", "gpt2", "books-gpt2"), ("text:/data/es/**/*.txt", "bytes", "es-bytes"),
    ("text:*.txt", "bytes", "text-bytes"), ("hf:allenai/c4:es", "gpt2", "allenai-c4-es-gpt2"),
    ("task:addition", "bytes", "task-addition-bytes"), ("text:a.txt", "runs/x/tokenizer.json", "a-x"),
    ("text:a.txt", "runs/x/hf/tokenizer.json", "a-x"), ("text:a.txt", "runs/x/english.json", "a-english")])
def test_shards_are_named_after_source_and_tokenizer(tmp_path, monkeypatch, dataset, tokenizer, expected):
    monkeypatch.chdir(tmp_path)
    if "/" in tokenizer:
        Path(tokenizer).parent.mkdir(parents=True)
        Path(tokenizer).touch()
    assert data.default_directory(dataset, tokenizer) == Path("shards", expected)


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


# -----------------------------------------------------------------------------------------------------------
# The order of samples


def test_the_order_is_what_it_was():
    """A checkpoint stores only the number of samples. With another order, a run would repeat some."""
    first_two = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert data.splitmix64(first_two).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # as published
    assert data.shuffled(np.arange(997, 1003), 1000, 7).tolist() == [136, 496, 386, 545, 577, 292]
    assert data.shuffled(10**12 + np.arange(3), 10**6, -1).tolist() == [931606, 234395, 482195]


def each_once(rows: np.ndarray, n: int) -> bool:
    return rows.dtype == np.int64 and np.array_equal(np.sort(rows), np.arange(n))


@pytest.mark.parametrize("seed", [0, -1])
def test_an_epoch_visits_every_row_once(seed):
    chance = random.Random(4)
    sizes = [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 256, 257, 4097, *(chance.randrange(50_000) for _ in range(9))]
    for n in sizes:
        for epoch in (0, 1, 10**6):
            assert each_once(data.shuffled(epoch * n + np.arange(n), n, seed), n), (n, epoch)
    domain = data.permute(np.arange(1024), 1024, seed, 0)
    assert not each_once(domain[:1000] % 1000, 1000)  # the control: without cycle walking


def test_orders_differ_and_do_not_depend_on_how_they_are_asked_for():
    n, chance, at = 777, random.Random(5), 0
    orders = [data.shuffled(first + np.arange(n), n, seed).tolist() for seed in (0, 1) for first in (0, n)]
    assert all(a != b for a, b in itertools.combinations([*orders, list(range(n))], 2))
    whole = data.shuffled(np.arange(5 * n), n, 3).tolist()
    while at < 4 * n:
        count = chance.randrange(1, 300)
        assert data.shuffled(np.arange(at, at + count), n, 3).tolist() == whole[at:at + count]
        at += count
    steps = np.abs(np.diff(data.permute(np.arange(100_000), 100_000, 0, 0)))
    assert 0.32 < steps.mean() / 100_000 < 0.345  # n/3 in a random order


def test_rows_of_many_shards(tmp_path):
    """No row crosses from one shard to the next, and only the rest at the end of each is lost."""
    chance = np.random.default_rng(0)
    sizes = (1000, 0, 1, 100, 101, 200, 201, 7000)
    arrays = {f"s{i}": chance.integers(0, 60_000, n) for i, n in enumerate(sizes)}
    rows = data.Shards(write(tmp_path, **arrays), 100)
    expected = [[tokens[a:a + 100].tolist(), tokens[a + 1:a + 101].tolist()] for tokens in arrays.values()
                for a in range(0, len(tokens) - 100, 100)]
    assert rows.rows == len(expected) == 9 + 1 + 1 + 2 + 69
    for some in (np.arange(rows.rows), np.array([0, 8, 9, 10, 11, 12, 13, 81])):
        assert np.stack(data.read_rows(rows, some), 1).tolist() == [expected[row] for row in some]
    with pytest.raises(IndexError):
        data.read_rows(rows, np.array([0, rows.rows]))


# -----------------------------------------------------------------------------------------------------------
# Training batches


def global_batches(shards, world_size, batch, grad_accum, steps, samples=0, seed=7, ranks=None) -> list[list]:
    """For each step the sorted rows of all ranks and micro-batches, with their targets."""
    loaders = [data.Loader(shards, batch, place(rank, world_size), seed, samples)
               for rank in ranks or range(world_size)]
    found = [sorted(row for loader in loaders for micro_batch in loader.step(grad_accum)[1]
                    for row in torch.stack(micro_batch, 1).tolist()) for _ in range(steps)]
    for loader in loaders:
        loader.close()
    return found


@pytest.mark.parametrize("world_size, batch", [(2, 2), (4, None), (8, 1)])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(shards, world_size, batch):
    """Into the second epoch."""
    rows = data.Dataset([shards], 1024).train
    expected = global_batches(rows, 1, 16, 1, rows.rows // 16 + 3)
    _, batch, grad_accum = plan_batch(world_size, 16, batch, None, 16, 16)
    assert world_size * batch * grad_accum == 16
    assert global_batches(rows, world_size, batch, grad_accum, len(expected)) == expected
    assert global_batches(rows, world_size, batch, grad_accum, 2, samples=5 * 16) == expected[5:7]
    for broken in {"seed": 8}, {"samples": 1}, {"ranks": [0] * world_size}:
        assert global_batches(rows, world_size, batch, grad_accum, 2, **broken) != expected[:2]


def test_batches_are_the_rows_of_the_order(dataset):
    """Each row is 64 tokens as they lie in the shard, its targets the same one token on."""
    rows = dataset.train
    (tokens,) = [mapped.tolist() for mapped in rows.tokens]  # row r begins at token r · 64
    far = 10**6 * 16
    for step, found in enumerate(global_batches(rows, 2, 8, 1, 3, far)):
        order = data.shuffled(far + step * 16 + np.arange(16), rows.rows, 7)
        expected = [[tokens[r * 64:r * 64 + 64], tokens[r * 64 + 1:r * 64 + 65]] for r in order.tolist()]
        assert found == sorted(expected)


def test_labels_know_the_largest_id_and_what_is_not_learned(tmp_path):
    """65,535 is an id of some vocabularies, and no label that is left out."""
    rows = data.Shards(write(tmp_path, x=np.arange(65_536 - 160, 65_536)), 53, lambda x: x % 2 == 0)
    loader = data.Loader(rows, 3, place(0, 1), 0)
    count, [batch] = loader.step(1)
    loader.close()
    assert count == (batch[1] >= 0).sum() == 3 * 53 - (3 * 53) // 2
    for x, y in (batch, *data.validation_batches(rows, 3, place(0, 1))):
        assert y.max() == 65_535 and torch.equal(y, torch.where(x % 2 == 0, x + 1, -1))


def test_two_steps_are_read_ahead(dataset, monkeypatch):
    """So the labels of a step are known before its first forward pass."""
    taken, take = [], data.Shards.take
    rows = data.Shards(dataset.train.paths, 64)
    monkeypatch.setattr(data.Shards, "take", lambda *given: taken.append(given[0] is rows) or take(*given))
    loader = data.Loader(rows, 2, place(0, 1), 0)
    for step in range(3):
        count, batches = loader.step(3)
        assert len(batches) == 3 and count == sum((y >= 0).sum() for _, y in batches)
        wait_until(lambda step=step: sum(taken) >= 3 * (step + 3))
        time.sleep(0.05)
        assert sum(taken) == 3 * (step + 3)
    loader.close()


def test_steps_of_another_size_begin_where_the_last_one_ended(dataset):
    loader, other = (data.Loader(dataset.train, 2, place(1, 2), 0, 8) for _ in range(2))
    found = [micro_batch for n in (2, 3, 3, 1, 2) for micro_batch in loader.step(n)[1]]
    for (x, y), (_, [(expected_x, expected_y)]) in zip(found, (other.step(1) for _ in found)):
        assert torch.equal(x, expected_x) and torch.equal(y, expected_y)
    loader.close(), other.close()


def test_the_thread_of_a_loader_ends_and_its_error_is_raised(dataset, monkeypatch):
    before = {*threading.enumerate()}
    loader = data.Loader(dataset.train, 2, place(0, 1), 0)
    loader.step(1)
    thread, = {*threading.enumerate()} - before
    loader.close()
    thread.join(20)
    assert not thread.is_alive()
    monkeypatch.setattr(dataset.train, "take", mock.Mock(side_effect=OSError("gone")))
    loader = data.Loader(dataset.train, 4, place(0, 1), 0)
    with pytest.raises(OSError, match="gone"):
        loader.step(1)


# -----------------------------------------------------------------------------------------------------------
# Validation


def validated(rows, batch: int, world_size: int, limit=None) -> tuple[Counter, int, set]:
    """The rows that count, the sum of their targets, and how many batches each rank had."""
    found, total, lengths = Counter(), 0, set()
    for rank in range(world_size):
        batches = list(data.validation_batches(rows, batch, place(rank, world_size), limit))
        lengths.add(len(batches))
        for x, y in batches:
            assert x.shape == y.shape == (batch, rows.seq_len) and x.dtype == y.dtype == torch.int64
            padding = (y == -1).any(1)
            assert (y[padding] == -1).all()
            found.update(map(tuple, x[~padding].tolist()))
            total += y[~padding].sum().item()
    return found, total, lengths


@pytest.mark.parametrize("limit", [None, 1, 13])
def test_validation_counts_every_row_once_on_any_number_of_ranks(dataset, limit):
    rows = dataset.val[""]
    tokens = rows.tokens[0].tolist()
    count = limit or rows.rows
    expected = Counter(tuple(tokens[r * 64:r * 64 + 64]) for r in range(count))
    for world_size, batch in ((1, 4), (2, 1), (3, 7), (5, 4), (8, 500), (3, 500)):
        found, total, lengths = validated(rows, batch, world_size, limit)
        assert found == expected and total == sum(tokens[1:count * 64 + 1]), (world_size, batch)
        assert lengths == {-(-count // (batch * world_size))}, "a rank with fewer would let the others wait"


def test_an_evaluation_reads_ahead_and_stops_when_it_is_cut_short(dataset, monkeypatch):
    reads, read, rows = [], data.read_rows, dataset.val[""]
    thread = threading.current_thread
    monkeypatch.setattr(data, "read_rows", lambda *given: reads.append(thread()) or read(*given))
    batches = data.validation_batches(rows, 1, place(0, 1))
    next(batches)
    wait_until(lambda: len(reads) >= 3)
    assert len(reads) < rows.rows and threading.main_thread() not in reads
    batches.close()
    reads[0].join(60)
    assert not reads[0].is_alive() and len(reads) < rows.rows
    monkeypatch.setattr(data, "read_rows", mock.Mock(side_effect=UserError("gone")))
    with pytest.raises(UserError, match="gone"):
        list(data.validation_batches(rows, 1, place(0, 1)))
