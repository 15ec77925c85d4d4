"""--optimizer adam-atan2 is that of HRM-Text."""

import torch

from ops.adam_atan2 import AdamAtan2


def test_updates_follow_the_formula_whatever_the_scale_of_the_gradients():
    """Both corrections within the arctangent, or none of it as in AdamW, would be off by 1e-3."""
    start, *gradients = torch.randn(13, 50, 20, generator=torch.Generator().manual_seed(0)).unbind()
    p, mean, square = start.double(), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * g.double(), 0.95 * square + 0.05 * g.double() ** 2
        angle = torch.atan2(mean, (square / (1 - 0.95**t)).sqrt())
        p = p - 0.01 * (0.1 * p + angle / (1 - 0.9**t))
    found = []
    for scale in (1.0, 2.0 ** -20):
        found.append(torch.nn.Parameter(start.clone()))
        optimizer = AdamAtan2([{"params": found[-1:], "weight_decay": 0.1}], lr=0.01)
        for g in (*gradients, None):  # a step without gradient changes nothing
            found[-1].grad = g if g is None else scale * g
            optimizer.step()
    assert torch.equal(*found) and (found[0] - p).abs().max() < 2e-6
    state = optimizer.state[found[-1]]
    assert {t.dtype for t in state.values()} == {torch.float32} and state["step"] == 12


def test_without_gradient_and_rate_it_moves_nothing():
    """As TrainState._create_optimizer_state steps, so that a checkpoint can be copied into its state."""
    p = torch.nn.Parameter(torch.tensor([1.5, -0.0, 0.0, -3e-39]))
    optimizer, before = AdamAtan2([p], lr=0.0), p.detach().clone()
    p.grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(p, before) and not torch.stack([*optimizer.state[p].values()][1:]).any()
