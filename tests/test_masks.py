"""The masks of the masked language model: a pure function of seed, epoch, row and position."""

import json

import numpy as np
import pytest
from conftest import SHARED, place

import data
from startup import dry_run
from vocab import bpe, tokenizer_json
from vocab.tokenizer import load_tokenizer, parse_tokenizer_json

T = 96


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.train_bpe(["the quick brown fox jumps over the lazy dog and runs away again " * 50], 300)


@pytest.fixture(scope="module")
def rows(tokenizer):
    """32 rows of text, which begin with end-of-text; the last ones hold next to nothing else."""
    text = tokenizer.encode("the lazy dog jumps over the fox and the quick dog runs again " * 40)
    x = np.stack([np.roll(text, 7 * i)[:T] for i in range(32)]).astype(np.uint16)
    x[:, 0] = tokenizer.eot
    x[30, 5:], x[31] = tokenizer.eot, tokenizer.eot
    return x


def mask(tokenizer, x, epoch=0, rate=0.3, seed=0, first_row=0):
    masked = x.copy()
    numbers = np.arange(first_row, first_row + len(x))
    masker = data.Masker(tokenizer, T, rate, seed)
    positions, labels = masker(masked, numbers, np.full(len(x), epoch))
    return masked, positions, labels


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
    whole = mask(tokenizer, rows)
    part = mask(tokenizer, rows[10:20], first_row=10)
    for a, b in zip(whole, part):
        assert (a[10:20] == b).all()
    for change in ("epoch", "seed", "first_row"):
        other = mask(tokenizer, rows, **{change: 1})
        assert (whole[1] != other[1]).mean() > 0.5


def test_eighty_ten_ten(tokenizer):
    x = np.full((400, T), 65, dtype=np.uint16)
    masked, positions, _ = mask(tokenizer, x)
    new = np.take_along_axis(masked, positions, 1)
    is_mask, is_kept = new == tokenizer.mask, new == 65
    shares = [is_mask.mean(), is_kept.mean(), (~is_mask & ~is_kept).mean()]
    assert np.allclose(shares, [0.8, 0.1, 0.1], atol=0.01)
    assert not np.isin(new[new != tokenizer.mask], list(tokenizer.specials.values())).any()
    assert len(np.unique(new)) > 200  # random ids are spread over the vocabulary


def test_positions_are_chosen_evenly(tokenizer):
    _, positions, _ = mask(tokenizer, np.full((4000, T), 65, dtype=np.uint16))
    counts = np.bincount(positions.ravel(), minlength=T)
    expected = positions.size / T
    assert abs(counts - expected).max() < 6 * expected**0.5


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loaders_mask_alike_on_any_number_of_ranks(shards, world_size):
    dataset = data.Dataset([shards], T)
    masker = data.Masker(dataset.tokenizer, T, 0.3, 5)
    seen = []
    for rank in range(world_size):
        loader = data.Loader(dataset.train, 16 // world_size, place(rank, world_size), 5, 160, masker)
        for step in range(3):
            count, [batch] = loader.step(1)
            assert count == (batch[2] >= 0).sum()
            seen += [(step, *row) for row in zip(*(map(tuple, t.tolist()) for t in batch))]
        loader.close()
    alone = data.Loader(dataset.train, 16, place(0, 1), 5, 160, masker)
    expected = [(step, *row) for step, (_, [batch]) in enumerate(alone.step(1) for _ in range(3))
                for row in zip(*(map(tuple, t.tolist()) for t in batch))]
    alone.close()
    assert sorted(seen) == sorted(expected)


def test_validation_masks_are_frozen_and_count_each_row_once(shards):
    dataset = data.Dataset([shards], T)
    masker, shards = data.Masker(dataset.tokenizer, T, 0.15, 0), dataset.val[""]
    labels = {}
    for world_size in (1, 3):
        batches = [b for rank in range(world_size)
                   for b in data.validation_batches(shards, 4, place(rank, world_size), masker=masker)]
        labels[world_size] = sorted(tuple(row) for b in batches for row in b[2].tolist() if max(row) >= 0)
    assert labels[1] == labels[3] and len(labels[1]) == shards.rows


def test_word_pieces_continue_a_word(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "[SEP]": 1, "[MASK]": 2, "run": 3, "##ning": 4, "dog": 5, ".": 6}
    built = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    built.add_special_tokens(["[UNK]", "[SEP]", "[MASK]"])
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.lengths()[4] == len("ning") and tokenizer.lengths()[5] == len(" dog")
    assert set(tokenizer.specials.values()) >= {0, 1, 2}


def test_bytes_of_tokens_that_another_program_wrote(tmp_path):
    """In the vocabulary a byte-level BPE spells a byte as a character, and SentencePiece some as <0xNN>."""
    pytest.importorskip("tokenizers")
    ours = bpe.train_bpe(["Niño: ¡eh!\n\tИван 你好 " * 9], 300)
    spec = json.loads(ours.to_json())
    spec["model"]["dropout"] = None
    theirs = parse_tokenizer_json("other", json.dumps(spec))
    assert isinstance(theirs, tokenizer_json.HuggingFaceTokenizer)
    assert not isinstance(ours, tokenizer_json.HuggingFaceTokenizer)
    assert theirs.lengths() == ours.lengths()
    vocab = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "\u2581é": 3}
    spec = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
            "post_processor": None, "decoder": {"type": "ByteFallback"},
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True,
                      "unk_token": "<unk>"}}
    spelled = parse_tokenizer_json("other", json.dumps(spec)).lengths()
    assert spelled[2] == 1 and spelled[3] == len(" é".encode())


def test_gpt2_has_room_for_the_mask(monkeypatch):
    if not (SHARED / "tiktoken").exists():
        pytest.skip("the vocabulary of gpt2 is not on this machine")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.vocab_size, tokenizer.mask) == (50257, 50257)
    assert tokenizer.num_ids == dry_run.expected_ids("text:x", "gpt2") == 50258
