"""The loss of model.py and its gradients in one pass over chunks of rows."""

import functools
import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOSS_ROWS = {"cuda": 16384, "cpu": 2048}  # rows of logits per chunk, for fast matrix products
FEW_ROWS = 4096  # of them, in uncompiled operations between the products on a GPU, to save memory
LOSS_CACHE = 2**20  # logits that stay in a CPU's cache from one operation to the next


@functools.cache
def compiled_once(function):
    """As in model.py, which is above this file."""
    return torch.compile(function, dynamic=False)


def _rows_loss(products: Tensor, of_target: Tensor | None, y: Tensor, bias: Tensor | None, z_loss: float,
               needs_grad: bool, hits: bool, compiled: bool):
    """The part of `LinearCrossEntropy` between its matrix products, for some rows of logits (rows, V) with
    targets y (rows, 1). Returns the summed objective and loss, with `hits` whether each target has the
    largest logit, and the gradient of the bias. If `needs_grad`, the gradient overwrites `products`.
    `compiled` selects operations that Inductor fuses: they read the products twice and write them once. With
    `of_target`, the products of the targets (rows, 1), which then need not be read between the two, sums and
    gradient are one kernel. The gradient of a bias is a sum over the rows, in a kernel of its own.
    """
    counted, y = y >= 0, y.clamp(min=0)
    logits = products.float()
    if bias is not None:  # in place, Inductor of torch 2.11 would add it twice to some of the float32 logits
        logits = logits + bias if compiled else logits.add_(bias)
    correct = (logits.argmax(-1, keepdim=True) == y) & counted if hits else None
    if of_target is None:
        log_p = torch.log_softmax(logits, dim=-1)
        of_target = log_p.gather(1, y)
        log_z = logits.gather(1, y) - of_target  # (rows, 1)
    else:
        largest = logits.amax(-1, keepdim=True)
        log_sum = (logits - largest).exp().sum(-1, keepdim=True).log()
        log_p = logits - largest - log_sum
        of_target = of_target.float() - largest - log_sum
        log_z = largest + log_sum
    objective = loss = -(of_target * counted).sum()
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
    """Bytes of logits that `LinearCrossEntropy` holds at a time on a GPU: a chunk of products and, in
    uncompiled operations, three times FEW_ROWS in float32.
    """
    few = 0 if compiled else min(rows, FEW_ROWS)
    return (min(rows, LOSS_ROWS["cuda"]) * dtype.itemsize + 12 * few) * vocab_size


class LinearCrossEntropy(torch.autograd.Function):
    """Σ cross-entropy of softmax(hidden · weightᵀ + bias), computed in chunks of the N rows, so that memory
    does not grow with N · V. The objective, which is differentiated, adds z_loss · Σ log² Z. With `hits`,
    also returns whether each target has the largest logit of its row. The forward pass computes the gradients
    while it holds a chunk's probabilities: three vocabulary products instead of four.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, vocab_size, z_loss, grad_enabled, hits, compiled):
        chunk = LOSS_ROWS["cuda" if hidden.is_cuda else "cpu"]
        if compiled:  # even chunks, because each size compiles its own graph
            chunk = math.ceil(len(hidden) / math.ceil(len(hidden) / chunk))
        # uncompiled operations between the products take fewer rows at a time
        few = chunk if compiled else FEW_ROWS if hidden.is_cuda else max(LOSS_CACHE // len(weight), 8)
        rows_loss = compiled_once(_rows_loss) if compiled else _rows_loss
        needs_grad = grad_enabled and any(ctx.needs_input_grad)  # the latter ignores torch.no_grad
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
            products[:, vocab_size:] = -torch.inf  # padding; here, no kernel looks for it at each logit
            for some, y, right in zip(*(t.split(few) for t in (products, targets[rows], correct[rows]))):
                y = y[:, None]
                of_target = some.gather(1, y.clamp(min=0)) if compiled and bias is None else None
                part, loss, hit, bias_part = rows_loss(
                    some, of_target, y, bias, z_loss, needs_grad, hits, compiled)
                objective += part
                total += loss
                if hits:
                    right.copy_(hit[:, 0])
                if bias_part is not None:
                    grad_bias += bias_part
            if needs_grad:  # `products` now holds the gradient
                torch.mm(products, w, out=grad_hidden[rows])
                if hidden.is_cuda:  # where products can accumulate in float32
                    torch.addmm(grad_weight, products.T, h, out_dtype=torch.float32, out=grad_weight)
                elif h.dtype == torch.float16:  # whose sums over the rows can overflow, whatever the scale
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
        # in float32, because bfloat16 cannot represent 1 / labels exactly
        return ((grad_hidden.float() * grad).to(grad_hidden.dtype), grad_weight * grad,
                None if grad_bias is None else grad_bias * grad, None, None, None, None, None, None)
