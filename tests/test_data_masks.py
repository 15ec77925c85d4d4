"""The masks of data.py for the masked language model: a function of seed, epoch, row and position."""

import numpy as np
import pytest
from conftest import place

import data
from vocab import bpe

T = 96


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.train_bpe(["the quick brown fox jumps over the lazy dog and runs away again " * 50], 300)


@pytest.fixture(scope="module")
def rows(tokenizer):
    """32 rows of text, which begin with end-of-text. The last ones hold next to nothing else."""
    text = tokenizer.encode("the lazy dog jumps over the fox and the quick dog runs again " * 40)
    x = np.stack([np.roll(text, 7 * i)[:T] for i in range(32)]).astype(np.uint16)
    x[:, 0] = tokenizer.eot
    x[30, 5:], x[31] = tokenizer.eot, tokenizer.eot
    return x


def mask(tokenizer, x, epoch=0, rate=0.3, seed=0, first_row=0):
    masked = x.copy()
    numbers = np.arange(first_row, first_row + len(x))
    return masked, *data.Masker(tokenizer, T, rate, seed)(masked, numbers, np.full(len(x), epoch))


@pytest.mark.parametrize("rate, k", [(0.3, 29), (0.15, 14), (0.001, 1)])
def test_k_positions_in_each_row_and_never_a_special_id(tokenizer, rows, rate, k):
    masked, positions, labels = mask(tokenizer, rows, rate=rate)
    assert positions.shape == labels.shape == (32, k) and (np.diff(positions) > 0).all()
    assert (labels[:30] >= 0).all()
    assert (labels[30] >= 0).sum() == min(k, 4) and (labels[31] == -1).all()  # all that there is
    counted = labels >= 0
    assert (np.take_along_axis(rows, positions, 1)[counted] == labels[counted]).all()
    assert tokenizer.eot not in labels and tokenizer.mask not in labels
    changed = np.zeros_like(rows, dtype=bool)
    np.put_along_axis(changed, positions, counted, 1)
    assert (masked == rows)[~changed].all()


def test_a_mask_depends_on_seed_epoch_and_row_alone(tokenizer, rows):
    whole, part = mask(tokenizer, rows), mask(tokenizer, rows[10:20], first_row=10)
    assert all((a[10:20] == b).all() for a, b in zip(whole, part))
    for change in ("epoch", "seed", "first_row"):
        assert (whole[1] != mask(tokenizer, rows, **{change: 1})[1]).mean() > 0.5


def test_eighty_ten_ten_spread_evenly(tokenizer):
    x = np.full((4000, T), 65, dtype=np.uint16)
    masked, positions, _ = mask(tokenizer, x)
    new = np.take_along_axis(masked, positions, 1)
    is_mask, is_kept = new == tokenizer.mask, new == 65
    assert np.allclose([is_mask.mean(), is_kept.mean()], [0.8, 0.1], atol=0.005)
    assert not np.isin(new[~is_mask], list(tokenizer.specials.values())).any()
    assert len(np.unique(new)) > 200  # random ids are spread over the vocabulary
    expected = positions.size / T  # at each position
    assert abs(np.bincount(positions.ravel(), minlength=T) - expected).max() < 6 * expected**0.5


def test_loaders_mask_alike_on_any_number_of_ranks(shards):
    dataset = data.Dataset([shards], T)
    masker = data.Masker(dataset.tokenizer, T, 0.3, 5)

    def seen(world_size: int) -> list:
        found = []
        for rank in range(world_size):
            loader = data.Loader(dataset.train, 16 // world_size, place(rank, world_size), 5, 160, masker)
            for step in range(3):
                count, [batch] = loader.step(1)
                assert count == (batch[2] >= 0).sum()
                found += [(step, *row) for row in zip(*(map(tuple, t.tolist()) for t in batch))]
            loader.close()
        return sorted(found)

    assert seen(1) == seen(2) == seen(4)


def test_validation_masks_are_frozen_and_count_each_row_once(shards):
    dataset = data.Dataset([shards], T)
    masker, val = data.Masker(dataset.tokenizer, T, 0.15, 0), dataset.val[""]
    labels = [sorted(tuple(row) for rank in range(world_size)
                     for b in data.validation_batches(val, 4, place(rank, world_size), masker=masker)
                     for row in b[2].tolist() if max(row) >= 0) for world_size in (1, 3)]
    assert labels[0] == labels[1] and len(labels[0]) == val.rows
