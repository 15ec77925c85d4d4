"""Attention in bfloat16 on CPUs.

torch's kernel computes it in float32 unless the CPU has AMX. Plain bfloat16 matrix products are faster, but
take more memory: they keep the softmax weights (B, H, T, T) for the backward pass. With a window they skip
what no query sees.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 256  # queries in a block; with a window, a quarter of that
SUMMED = 512  # terms that a bfloat16 matrix product on a CPU adds up before it rounds


class BandMask(NamedTuple):
    """An attention mask, True where a query sees a key, which is False outside of a band around the diagonal.
    """

    allowed: Tensor  # bool (B, 1, T, T)
    before: int | None  # a query sees at most so many keys back; None: no limit
    after: int | None  # and ahead


def _aligned(begin: int, end: int) -> int:
    """Moves `begin` down so that a sum over [begin, end) rounds at the same places as a sum from 0."""
    return begin if begin // SUMMED == (end - 1) // SUMMED else begin // SUMMED * SUMMED


class _BlockAttention(torch.autograd.Function):
    """Attention of scaled queries q (B, H, T, D) over keys k and values v (B, H, S, D).

    It takes a block of queries at a time, so that the block's scores fit in the CPU's cache. Query i sees at
    most keys i − before to i + after (None: no limit). Up to 1,024 tokens the result has the same bits as
    with the whole matrix of scores (T, S) at once.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, before, after):
        T, S = q.size(2), k.size(2)
        step = QUERIES if before is None else QUERIES // 4
        out = torch.empty_like(q)
        weights, blocks = [], []  # the softmax weights of each block, and its (begin, end, first, last)
        for begin in range(0, T, step):
            end = min(begin + step, T)
            last = S if after is None else min(math.ceil((end + after) / step) * step, S)
            first = 0 if before is None else _aligned(max(begin - before, 0) // step * step, last)
            scores = q[:, :, begin:end] @ k[:, :, first:last].mT
            seen = None
            if mask is not None:
                seen = mask[..., begin:end, first:last]
            elif after == 0:
                seen = q.new_ones(end - begin, last - first, dtype=torch.bool).tril(begin - first)
            if seen is not None:
                scores = scores + torch.where(seen, 0.0, -torch.inf).to(scores.dtype)
            weights.append(scores.softmax(dim=-1))
            blocks.append((begin, end, first, last))
            out[:, :, begin:end] = weights[-1] @ v[:, :, first:last]
        ctx.save_for_backward(q, k, v, *weights)
        ctx.blocks, ctx.step = blocks, step
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, *weights = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grads = []  # gradients of the scores, by block
        for (begin, end, first, last), p in zip(ctx.blocks, weights):
            grad_p = grad[:, :, begin:end] @ v[:, :, first:last].mT
            grads.append(torch._softmax_backward_data(grad_p, p, -1, p.dtype))
            grad_q[:, :, begin:end] = grads[-1] @ k[:, :, first:last]
        for begin in range(0, k.size(2), ctx.step):
            keys = slice(begin, min(begin + ctx.step, k.size(2)))
            seeing = [block for block in ctx.blocks if block[2] <= begin < block[3]]
            rows = slice(_aligned(seeing[0][0], seeing[-1][1]), seeing[-1][1])
            grad_v[:, :, keys] = _columns(weights, ctx.blocks, rows, keys).mT @ grad[:, :, rows]
            grad_k[:, :, keys] = (q[:, :, rows].mT @ _columns(grads, ctx.blocks, rows, keys)).mT
        return grad_q, grad_k, grad_v, None, None, None


def _columns(parts: list[Tensor], blocks: list[tuple], rows: slice, keys: slice) -> Tensor:
    """Cuts (B, H, rows, keys) out of a matrix (B, H, T, S) that is given by blocks of rows. A part holds the
    columns from first to last of its block; the others are 0.
    """
    columns = []
    for (begin, _, first, last), part in zip(blocks, parts):
        if rows.start <= begin < rows.stop:
            if not first <= keys.start < last:  # no query of this block sees these keys
                part, first = torch.zeros_like(part[..., :1]).expand(*part.shape[:3], keys.stop), 0
            columns.append(part[..., keys.start - first:keys.stop - first])
    return torch.cat(columns, dim=2)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, before: int | None,
                  after: int | None) -> Tensor:
    """Attention of q (B, H, T, D) over k and v (B, H, S, D); returns (B, H, T, D). `mask`, broadcastable to
    (B, H, T, S), is True where a query sees a key. A query sees at most `before` keys back and `after` keys
    ahead (None: no limit). See Block.attend in model.py.
    """
    q = q * q.size(-1) ** -0.5
    if q.size(2) > QUERIES:
        return _BlockAttention.apply(q, k, v, mask, before, after)
    scores = q @ k.mT
    if mask is None and after == 0:
        mask = scores.new_ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
    return scores.softmax(dim=-1) @ v
