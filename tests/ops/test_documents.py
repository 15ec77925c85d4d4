"""ops/documents.py: where the documents of a row begin, where their responses are, and who sees whom."""

import random

import numpy as np
import pytest
import torch
from pair_data import CYCLES, RESPONSE, ROLES, START, T, gpt2, hrm

import data
from model import Block
from ops.attention import cpu_attention
from ops.documents import document_bounds


def test_bounds_of_whole_and_cut_documents():
    """7 starts a document and 8 a response. The first document has lost its start, the last its response."""
    row = [1, 8, 2, 7, 3, 8, 4, 7, 7, 5, 8, 8, 7, 6]
    number, first, response = document_bounds(torch.tensor([row, [1] * 14]), 7, 8)
    assert number.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4, 4], [0] * 14]
    assert first.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7, 8, 8, 8, 8, 12, 12], [0] * 14]
    assert response.tolist() == [[1, 1, 1, 5, 5, 5, 5, -1, 10, 10, 10, 11, -1, -1], [-1] * 14]


def packed(batch: int, seed: int = 0) -> torch.Tensor:
    """Rows of samples of random lengths and padding, some of them cut at the end."""
    some, rows = random.Random(seed), []
    for _ in range(batch):
        row = []
        while len(row) < T and some.random() < 0.9:
            prompt, response = ([some.randrange(256) for _ in range(some.randint(low, 9))] for low in (0, 1))
            row += [START, *prompt, RESPONSE, *response]
        rows.append(row[:T] + [START] * (T - len(row)))
    return torch.tensor(rows)


def brute_force(row: list[int], attention: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """The mask (T, T) and the positions that count (T,), by the words of the definition."""
    document = np.cumsum(np.array(row) == START)
    response = {document[i]: i for i, token in enumerate(row) if token == RESPONSE}
    sees, counts = np.zeros((len(row), len(row)), bool), np.zeros(len(row), bool)
    for i in range(len(row)):
        last = response.get(document[i], -1)
        for j in range(len(row)):
            prompt = attention == "prefix" and i <= last and j <= last
            sees[i, j] = document[i] == document[j] and (j <= i or prompt)
        counts[i] = last >= 0 and (loss == "all" or i >= last) and i < len(row) - 1
    return sees, counts


@pytest.mark.parametrize("attention, loss", [("prefix", "response"), ("isolated", "all")])
def test_the_mask_and_what_counts_are_those_of_the_definition(attention, loss):
    model, idx = gpt2(attention=attention), packed(64)
    idx[0, 5:] = START  # a row of padding, and one that is cut inside a prompt
    idx[1] = torch.tensor([START] + [7] * (T - 1))
    sees, counts = zip(*(brute_force(row.tolist(), attention, loss) for row in idx))
    mask = model.mask(idx, None)
    assert mask[1:] == (None, 0 if attention == "isolated" else None)
    assert np.array_equal(mask.allowed[:, 0].numpy(), np.stack(sees))
    rows = idx.numpy().astype(np.uint16)
    assert np.array_equal(data.label_mask(rows, ROLES, loss), np.stack(counts))
    assert 0 < np.stack(counts).sum() < idx.numel()


@torch.no_grad()
@pytest.mark.parametrize("build, changes, dtype", [
    (gpt2, {}, torch.float32), (gpt2, {"modern": True}, torch.bfloat16), (hrm, {"halt": True}, torch.float32),
    (hrm, CYCLES, torch.bfloat16)])
def test_packed_samples_are_computed_as_if_alone(build, changes, dtype):
    model, idx = build(dtype=dtype, **changes).eval(), packed(4)
    for block in (m for m in model.modules() if isinstance(m, Block)):
        block.cpu_attention = None if dtype == torch.float32 else cpu_attention
    logits = model(idx).float()
    bound = (1e-5 if dtype == torch.float32 else 0.05) * logits.abs().max()
    for row, found in zip(idx, logits):
        number = document_bounds(row[None], START, RESPONSE)[0][0]
        for here in (number == document for document in number.unique()):
            assert (model(row[here][None]).float()[0] - found[here]).abs().max() <= bound


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same_of_samples(monkeypatch):
    model, idx = hrm().eval(), packed(3)
    dense = model(idx)
    monkeypatch.setattr("model.uses_flex", lambda head_dim, device: True)
    monkeypatch.setattr("model.compiled_once", lambda function: function)
    monkeypatch.setattr(Block, "flex_attention", None)
    assert (model(idx) - dense).abs().max() <= 1e-5 * dense.abs().max()
    assert Block.flex_attention is torch.nn.attention.flex_attention.flex_attention
