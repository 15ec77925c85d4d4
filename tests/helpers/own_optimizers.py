"""Optimizers that keep more than tensors, as some packages do."""

import torch
import torch.distributed as dist


class Schedule(torch.optim.Optimizer):
    """Keeps numbers of several kinds in its groups and in its state, as schedulefree and others do."""

    def __init__(self, params, lr=1e-3, odd=None):
        super().__init__(params, {"lr": lr, "odd": odd, "k": 0, "history": (), "mode": "begin"})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["history"] = [*group["history"], 0.1 * group["k"]][-2:]
            group["mode"] = f"step {group['k']}"
            group["total"] = group.get("total", 0) + group["history"][0]
            if group["odd"]:
                group["bad"] = group["odd"]()
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("first", p.clone())  # such as schedule-free's z
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                state["step"] = state.get("step", 0) + 1
                state["nested"] = {"a": [state["step"], [None, True]], "b": 0.5 * state["step"]}
                rate = group["lr"] * group["total"] / (group["k"] + state["nested"]["b"])
                p.add_(state["mean"], alpha=-rate)


class Lists(torch.optim.SGD):
    """Keeps lists in its state, as SOAP does, and a tensor in its group, as Prodigy does, which its first
    group alone makes and a later step replaces.
    """

    def step(self, closure=None):
        first = self.param_groups[0]
        seen = first.setdefault("seen", torch.zeros(2000))  # so many are not printed
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                means, _, norms = state.setdefault("means", [torch.zeros_like(p), [], torch.zeros(3)])
                state["means"] = [means * 0.9 + p.grad, [], norms + p.grad.norm()]
                seen[1000] += p.grad.norm()
                if seen[1000] > 0:
                    group["total"] = seen.sum()
                    p.grad.add_(state["means"][0]).mul_(1 + state["means"][2][0] + group["total"])
        super().step()


class Divided(torch.optim.SGD):
    """Keeps the state of a parameter on one rank, or, if it is `sliced`, another part of it on each."""

    sliced = False

    def step(self):
        rank = dist.get_rank()
        for i, p in enumerate(self.param_groups[0]["params"]):
            if self.sliced or i == rank:
                self.state[p]["mean"] = torch.full((3,), rank)
