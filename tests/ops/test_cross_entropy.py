"""The loss in chunks against the plain one: values, gradients and hits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from model import linear_cross_entropy
from ops import cross_entropy

VOCAB, PADDED = 60, 64


def inputs_of(n: int, dtype=torch.float32, with_bias: bool = False) -> tuple[list, torch.Tensor]:
    """Leaves (hidden, weight and perhaps a bias), and targets (n,), of which some do not count."""
    generator = torch.Generator().manual_seed(n)
    leaves = [torch.randn(n, 24, generator=generator).to(dtype),
              torch.randn(PADDED, 24, generator=generator) / 5, torch.linspace(-1, 1, PADDED)]
    targets = torch.randint(VOCAB, (n,), generator=generator)
    targets[1::3], targets[2::7] = -1, -100
    return [leaf.requires_grad_() for leaf in leaves[:2 + with_bias]], targets


def plain(leaves, targets, z_loss: float = 0.0) -> tuple:
    """Of each target the objective and the loss, and which targets have the largest logit."""
    logits = F.linear(leaves[0].float(), *leaves[1:])[:, :VOCAB]
    loss = F.cross_entropy(logits, targets.clamp(min=-1), ignore_index=-1, reduction="none")
    return loss + z_loss * logits.logsumexp(-1).square() * (targets >= 0), loss, logits.argmax(-1) == targets


@pytest.mark.parametrize("n, cache, with_bias, z_loss, reduction, compiled", [
    (1, 2**20, False, 0.0, "sum", False), (2049, 2**20, False, 1e-2, "sum", False),
    (2500, 100 * PADDED, True, 1e-2, "sum", False), (70, 0, True, 0.0, "sum", False),
    (513, 0, True, 1e-2, "none", False), (1300, 0, False, 0.0, "none", False),
    *(pytest.param(2349, 0, *case, "sum", True, marks=pytest.mark.full)
      for case in ((False, 0.0), (True, 1e-2)))])
def test_it_equals_the_plain_loss(n, cache, with_bias, z_loss, reduction, compiled, monkeypatch):
    """In chunks of 2,048 rows, with fewer rows between the matrix products; or as single losses."""
    monkeypatch.setattr(cross_entropy, "LOSS_CACHE", cache)
    leaves, targets = inputs_of(n, with_bias=with_bias)

    def found(targets=targets, columns=VOCAB, hits=False):
        return linear_cross_entropy(*leaves[:2], targets, columns, *leaves[2:], z_loss=z_loss, hits=hits,
                                    reduction=reduction, compiled=compiled)

    objective, loss, hits = found(hits=True)
    expected, losses, right = plain(leaves, targets, z_loss)
    if reduction == "none":
        torch.testing.assert_close(objective, expected, rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(losses.sum().item(), rel=1e-6) and not loss.requires_grad
    assert objective.sum().item() == pytest.approx(expected.sum().item(), rel=1e-6)
    assert torch.equal(hits, right) and objective.dtype == loss.dtype == torch.float32
    # an upstream gradient other than 1 has to arrive too
    for a, b in zip(torch.autograd.grad(3 * objective.sum(), leaves),
                    torch.autograd.grad(3 * expected.sum(), leaves)):
        assert (a - b).norm() <= 1e-5 * b.norm()
    with torch.no_grad():
        alone, _, none = found()
    torch.testing.assert_close(alone, objective.detach(), rtol=1e-6, atol=0)
    assert none is None
    if n > 1:  # controls: a target or a padding column too many
        for change in ({"targets": targets.clamp(min=0)}, {"columns": PADDED}):
            assert abs(found(**change)[1] - loss) > 1e-3


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_batch_in_bfloat16_has_float32_gradients_of_weights(reduction):
    leaves, targets = inputs_of(600, torch.bfloat16)
    objective, *_ = linear_cross_entropy(leaves[0].view(3, 200, 24), leaves[1], targets.view(3, 200), VOCAB,
                                         reduction=reduction)
    assert objective.dtype == torch.float32 and objective.shape == ((3, 200) if reduction == "none" else ())
    objective, expected = objective.sum() / 900, plain(leaves, targets)[0].sum() / 900
    assert objective.item() == pytest.approx(expected.item(), rel=1e-2)
    for a, b in zip(torch.autograd.grad(objective, leaves), torch.autograd.grad(expected, leaves)):
        assert a.dtype == b.dtype and (a - b).norm() <= 1e-2 * b.norm()


def test_sums_over_rows_do_not_overflow_in_float16():
    """Activations of 300 in 2,048 rows, of which a third have the same target."""
    leaves, y = inputs_of(2048, torch.float16)
    y[::3] = 3
    h, weight = leaves[0].detach(), leaves[1]
    h[:, 0] = 300
    linear_cross_entropy(h, weight, y, VOCAB)[0].backward()
    exact, = torch.autograd.grad(plain((h, weight), y)[0].sum(), weight)
    assert exact.abs().max() > torch.finfo(torch.float16).max
    assert (weight.grad - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_loss_without_any_target_is_zero(compiled):
    leaves, targets = inputs_of(9)
    loss, *_ = linear_cross_entropy(*leaves, targets.clamp(max=-1), VOCAB, z_loss=0.1, compiled=compiled)
    loss.backward()
    assert loss.item() == 0 and not any(leaf.grad.any() for leaf in leaves)


def test_another_reduction_is_refused():
    leaves, targets = inputs_of(9)
    with pytest.raises(ValueError, match="mean"):
        linear_cross_entropy(*leaves, targets, VOCAB, reduction="mean")


def test_evaluation_does_not_pay_for_gradients():
    leaves, targets = inputs_of(600)
    for grad, products in ((True, 3), (False, 1)):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
            linear_cross_entropy(*leaves, targets, VOCAB)
        assert counter.get_total_flops() == products * 2 * 600 * 24 * PADDED


@pytest.mark.parametrize("rows, compiled, count", [
    (10, True, 20), (10, False, 140), (20_000, False, 2 * 16384 + 12 * 4096)])
def test_bytes_of_logits(rows, compiled, count):
    assert cross_entropy.logits_bytes(rows, 100, torch.bfloat16, compiled) == 100 * count
