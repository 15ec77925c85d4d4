"""Attention of bfloat16 on CPUs. torch's kernel computes it in float32 unless the CPU has AMX. Products of
bfloat16 with some of the scores (B, H, T, T) in between are faster, but keep these for the backward pass.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 256  # that bfloat16 attention on a CPU takes at a time; with a window a quarter of them
SUMMED = 512  # terms that a matrix product of bfloat16 on a CPU adds up before it rounds


def _first(begin: int, end: int) -> int:
    """Where to begin instead, so that sums over [begin, end) are rounded as those over all from 0 on."""
    return begin if begin // SUMMED == (end - 1) // SUMMED else begin // SUMMED * SUMMED


class _BlockAttention(torch.autograd.Function):
    """Attention of scaled queries q (B, H, T, D) over keys and values (B, H, S, D), a few queries at a time,
    whose scores fit a cache. Position i sees at most the keys from i - before to i + after (None: any). Up to
    1,024 tokens these are the bits of two products over all of T x S.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, before, after):
        T, S = q.size(2), k.size(2)
        step = QUERIES if before is None else QUERIES // 4
        out = torch.empty_like(q)
        weights, blocks = [], []  # of some queries, and which queries and keys these are
        for begin in range(0, T, step):
            end = min(begin + step, T)
            last = S if after is None else min(math.ceil((end + after) / step) * step, S)
            first = 0 if before is None else _first(max(begin - before, 0) // step * step, last)
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
        grads = []  # of the scores
        for (begin, end, first, last), p in zip(ctx.blocks, weights):
            grad_p = grad[:, :, begin:end] @ v[:, :, first:last].mT
            grads.append(torch._softmax_backward_data(grad_p, p, -1, p.dtype))
            grad_q[:, :, begin:end] = grads[-1] @ k[:, :, first:last]
        for begin in range(0, k.size(2), ctx.step):
            keys = slice(begin, min(begin + ctx.step, k.size(2)))
            seeing = [block for block in ctx.blocks if block[2] <= begin < block[3]]
            rows = slice(_first(seeing[0][0], seeing[-1][1]), seeing[-1][1])
            grad_v[:, :, keys] = _columns(weights, ctx.blocks, rows, keys).mT @ grad[:, :, rows]
            grad_k[:, :, keys] = (q[:, :, rows].mT @ _columns(grads, ctx.blocks, rows, keys)).mT
        return grad_q, grad_k, grad_v, None, None, None


def _columns(parts: list[Tensor], blocks: list[tuple], rows: slice, keys: slice) -> Tensor:
    """Some queries and keys, (B, H, rows, keys), of `parts` (B, H, block of queries, keys that they see)."""
    columns = []
    for (begin, _, first, last), part in zip(blocks, parts):
        if rows.start <= begin < rows.stop:
            if not first <= keys.start < last:  # all of these see none of the keys
                part, first = torch.zeros_like(part[..., :1]).expand(*part.shape[:3], keys.stop), 0
            columns.append(part[..., keys.start - first:keys.stop - first])
    return torch.cat(columns, dim=2)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention over q, k, v (B, H, T, D), as Block.attend in model.py."""
    before, after = (None, 0) if is_causal else getattr(mask, "reach", (None, None))
    q = q * q.size(-1) ** -0.5
    if q.size(2) > QUERIES:
        return _BlockAttention.apply(q, k, v, mask, before, after)
    scores = q @ k.mT
    if is_causal:
        mask = scores.new_ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
    return scores.softmax(dim=-1) @ v
