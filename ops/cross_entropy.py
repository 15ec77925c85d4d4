"""The cross-entropy loss and its gradients in one pass over chunks of rows."""

import functools
import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOSS_ROWS = {"cuda": 16384, "cpu": 2048}  # rows of logits per chunk: enough for fast matrix products
FEW_ROWS = 4096  # rows that uncompiled operations on a GPU take at a time, to save memory
LOSS_CACHE = 2**20  # logits that fit in a CPU's cache


@functools.cache
def compiled_once(function):
    """compiled_once of model.py, again: model.py imports this file, so this file can't import model.py."""
    return torch.compile(function, dynamic=False)


def _rows_loss(products: Tensor, target_products: Tensor | None, y: Tensor, bias: Tensor | None,
               z_loss: float, needs_grad: bool, hits: bool, compiled: bool):
    """Computes what lies between the matrix products of `LinearCrossEntropy`, for some of the rows.

    `products` (rows, V) are logits without the bias; y (rows, 1) are the targets. Returns the summed
    objective, the summed loss, whether each target has the largest logit (rows, 1) if `hits`, and the
    gradient of the bias (V). If `needs_grad`, the gradient overwrites `products`.

    `compiled` selects operations that Inductor fuses into kernels that read `products` twice and write it
    once. If `target_products` (rows, 1) is given as well, sums and gradient become one kernel, because it
    need not look up the targets between the two. The gradient of a bias takes another kernel.
    """
    counted, y = y >= 0, y.clamp(min=0)
    logits = products.float()
    if bias is not None:  # compiled add_ would add it twice to some float32 logits (Inductor of torch 2.11)
        logits = logits + bias if compiled else logits.add_(bias)
    correct = (logits.argmax(-1, keepdim=True) == y) & counted if hits else None
    if target_products is None:
        log_p = torch.log_softmax(logits, dim=-1)
        target_log_p = log_p.gather(1, y)
        log_z = logits.gather(1, y) - target_log_p  # (rows, 1)
    else:
        largest = logits.amax(-1, keepdim=True)
        log_sum = (logits - largest).exp().sum(-1, keepdim=True).log()
        log_p = logits - largest - log_sum
        target_log_p = target_products.float() - largest - log_sum
        log_z = largest + log_sum
    objective = loss = -(target_log_p * counted).sum()
    if z_loss:
        objective = loss + z_loss * (log_z.square() * counted).sum()
    if not needs_grad:
        return objective, loss, correct, None
    p = log_p.exp_()
    if z_loss:
        p = p * (1 + 2 * z_loss * log_z)
    if compiled:
        column = torch.arange(p.size(1), device=p.device)
        p = p - (column == y).float()
    else:  # takes half as long on a CPU
        p.scatter_add_(1, y, torch.full_like(y, -1, dtype=torch.float32))
    p.mul_(counted)
    products.copy_(p)
    return objective, loss, correct, None if bias is None else p.sum(0)


def logits_bytes(rows: int, vocab_size: int, dtype: torch.dtype, compiled: bool) -> int:
    """The most bytes of logits that `LinearCrossEntropy` holds at a time on a GPU: a chunk of them in `dtype`
    and, if it isn't compiled, three times FEW_ROWS rows in float32.
    """
    few = 0 if compiled else min(rows, FEW_ROWS)
    return (min(rows, LOSS_ROWS["cuda"]) * dtype.itemsize + 12 * few) * vocab_size


class LinearCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy, in nats, of softmax(hidden · weightᵀ + bias), with memory that doesn't grow
    with N · V.

    Takes hidden (N, C), weight (V, C), bias (V) or None, and targets (N); targets below 0 are ignored. Rows
    of `weight` from `vocab_size` on are padding. Returns three tensors:

        objective    scalar, float32: loss + z_loss · Σ log² Z. Only this one is differentiable.
        loss         scalar, float32
        correct      bool (N): whether the target has the largest logit; undefined without `hits`

    It takes a chunk of rows at a time. The forward pass also computes the gradients, while it has the chunk's
    probabilities: that needs three matrix products with the vocabulary instead of four.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, vocab_size, z_loss, grad_enabled, hits, compiled):
        chunk = LOSS_ROWS["cuda" if hidden.is_cuda else "cpu"]
        if compiled:  # chunks of almost equal size, because each size compiles its own graph
            chunk = math.ceil(len(hidden) / math.ceil(len(hidden) / chunk))
        # without compiling, the operations between the products take fewer rows at a time
        few = chunk if compiled else FEW_ROWS if hidden.is_cuda else max(LOSS_CACHE // len(weight), 8)
        rows_loss = compiled_once(_rows_loss) if compiled else _rows_loss
        needs_grad = grad_enabled and any(ctx.needs_input_grad)  # needs_input_grad ignores torch.no_grad
        w = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_grad and bias is not None else None
        objective, total = (hidden.new_zeros((), dtype=torch.float32) for _ in range(2))
        correct = torch.empty_like(targets, dtype=torch.bool)
        space = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows]
            products = torch.mm(h, w.T, out=space[:len(h)])
            products[:, vocab_size:] = -torch.inf  # padding; set here, so that no kernel has to check for it
            for some, y, right in zip(*(t.split(few) for t in (products, targets[rows], correct[rows]))):
                y = y[:, None]
                target_products = some.gather(1, y.clamp(min=0)) if compiled and bias is None else None
                part, loss, hit, bias_part = rows_loss(
                    some, target_products, y, bias, z_loss, needs_grad, hits, compiled)
                objective += part
                total += loss
                if hits:
                    right.copy_(hit[:, 0])
                if bias_part is not None:
                    grad_bias += bias_part
            if needs_grad:  # `products` now holds the gradient
                torch.mm(products, w, out=grad_hidden[rows])
                if hidden.is_cuda:  # here matrix products can accumulate in float32
                    torch.addmm(grad_weight, products.T, h, out_dtype=torch.float32, out=grad_weight)
                elif h.dtype == torch.float16:  # sums over the rows can overflow it, whatever the loss scale
                    grad_weight += products.T.float() @ h.float()
                else:
                    grad_weight += products.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(total, correct)
        return objective, total, correct

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # multiply in float32, because bfloat16 cannot represent 1 / labels exactly
        return ((grad_hidden.float() * grad).to(grad_hidden.dtype), grad_weight * grad,
                None if grad_bias is None else grad_bias * grad, None, None, None, None, None, None)
