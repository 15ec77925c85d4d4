"""HRM-Text's optimizer, `--optimizer adam-atan2`. To add another one, see make_optimizers in model.py."""

import torch


class AdamAtan2(torch.optim.Optimizer):
    """AdamW that computes atan2(m, √v̂) instead of m̂ / (√v̂ + ε), so it needs no ε (Everett et al.,
    arXiv 2407.05872). As in HRM-Text, the update is atan2(m, √v̂) / (1 − β₁ᵗ): the bias correction of the
    first moment is applied outside the arctangent.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.95), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p),
                              "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                step = state["step"].double()
                mean = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                square = state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
                angle = torch.atan2(mean, square.div(1 - beta2 ** step).sqrt_())
                p.mul_(1 - lr * group["weight_decay"]).sub_(angle * (lr / (1 - beta1 ** step)))
