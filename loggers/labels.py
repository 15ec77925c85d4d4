"""The labels that a model gets, beside those that a trainer counts."""

import inspect

import torch
from torch import nn


class LabelCount:
    """Since this start: the labels that the model got in training on this rank (`given`), and those by which
    its losses were divided, on all ranks (`counted`).
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.given, self.counted = torch.zeros(2, dtype=torch.float64, device=device)
        self._got_labels = self._warned = False
        self._signature = inspect.signature(model.forward)
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: nn.Module, args: tuple, kwargs: dict):
        found = self._signature.bind_partial(*args, **kwargs).arguments
        labels = found.get("targets", found.get("labels"))
        own = found.get("per_token")  # then the trainer makes the objective, and counts what it likes
        if model.training and labels is not None and not own:
            self._got_labels = True
            self.given += (labels >= 0).sum()

    def compare(self, given: float, say):
        """Warns once if the labels that all ranks were `given` are not those that counted."""
        counted = self.counted.item()
        # a model may be called several times in a step
        unlike = given % max(counted, 1) or self._got_labels and given < counted
        if unlike and not self._warned:
            self._warned = True
            say(f"WARNING: the model got {given:,.0f} labels, but its losses are divided by {counted:,.0f}: "
                "if the trainer masks or cuts labels in its loop, let it count them anew, see the rules in "
                "docs/changing.md")
