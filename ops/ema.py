"""Averaged weights: --ema."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor (a view of it); any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class EMA:
    """An exponential moving average of the parameters, for evaluation, sampling and export.

    After n updates the decay is min(decay, (1 + n) / (10 + n)), so that the untrained weights soon fade from
    the average. With `constant` it is `decay` from the start.
    """

    model: nn.Module
    decay: float
    updates: int = 0
    constant: bool = False

    def __post_init__(self):
        self.params = dict(self.model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self.params.items()}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors for a checkpoint, by parameter name. Your own average may add a group `kept`."""
        return {"ema": self.average}

    @torch.no_grad()
    def update(self):
        decay = self.decay if self.constant else min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_([local_shard(t) for t in self.average.values()],
                             [local_shard(p) for p in self.params.values()], 1 - decay)

    @torch.no_grad()
    def swap(self):
        """Swaps the average and the parameters; a second call restores both, bit for bit. With zero2 and
        zero3, call reshard afterwards: gathered parameters are stale.
        """
        for name, p in self.params.items():
            held = p.clone()
            p.copy_(self.average[name])
            self.average[name].copy_(held)
