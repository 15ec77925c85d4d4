"""--comm late, for slow links: sends gradients as int8 while the next step is computed, and applies them one
step late.

Each update moves the parameters by 2 u(t) - u(t - 1). u(t) is what the optimizers do with the gradients of
step t - 1. The next move is assumed to equal the last one, which makes up for the delay (arXiv 2606.30634).
All ranks always have the same state.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 128  # numbers that share a scale


def quantise(values: Tensor) -> Tensor:
    """Packs float32 (n,), n a multiple of BLOCK, into int8 (n / BLOCK, BLOCK + 2): levels from -127 to 127,
    then the two bytes of a bfloat16 scale. `dequantise` turns all of a block with NaN or inf into NaN.
    """
    blocks = values.view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).bfloat16()
    levels = (blocks / scales.float()).nan_to_num_().round_().clamp_(-127, 127)  # 0 / 0 is 0 here
    return torch.cat((levels.to(torch.int8), scales.view(torch.int8)), 1)


def dequantise(packed: Tensor) -> Tensor:
    """Returns the input of `quantise`, rounded. Takes (…, BLOCK + 2)."""
    levels, scales = packed.split([BLOCK, 2], -1)
    return (levels * scales.contiguous().view(torch.bfloat16).float()).view(-1)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Late:
    """Delays all gradients by a step, and corrects what the optimizers do with them. In the first tenth of a
    run, where a delay costs most, each step waits for its own gradients.
    """

    def __init__(self, model: nn.Module, optimizers: list, run):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.size = run.world.world_size
        self._waits = run.steps // 10  # steps
        if run.saved:
            self._waits -= run.saved["step"]
        self.gradient = torch.zeros_like(flat(self.params))  # to be applied next; 0 if it has been
        self.moved = torch.zeros_like(self.gradient)  # u of the step before
        # its own group, because gloo matches calls by their order
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=run.args.timeout))
        self._thread = ThreadPoolExecutor(1, "gradients")
        # the gradient after the next, a Future, from `exchange` to the end of a step that doesn't wait
        self._under_way = None
        self._left_out = []  # indices of parameters without a gradient in this step
        optimizers[0].register_step_pre_hook(self._before_step)
        optimizers[-1].register_step_post_hook(self._after_step)

    def state_dict(self) -> dict[str, Tensor]:
        """Waits for the gradient under way and returns what a checkpoint holds."""
        self._wait()
        return {"gradient": self.gradient, "moved": self.moved}

    def exchange(self):
        """Starts averaging the gradients over all ranks. Replaces them by those of the step before, or by
        their own mean if the step waits.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        packed = self.pack(gradients).cpu()
        self._wait()
        self._under_way = self._thread.submit(self._mean, packed)
        if self._waits > 0 and not self.gradient.any():  # not again if a run gets longer
            self._wait()
        self._waits -= 1
        self._taken = self._split(self.gradient)
        self.gradient = torch.zeros_like(self.gradient)
        for p, part in zip(self.params, self._taken):
            p.grad = part

    def leave_out(self):
        """Notes the gradients that the trainer has set to None since `exchange`: they belong to the step
        under way. Gradients of 0 become None, too, so no optimizer decays what doesn't learn yet.
        """
        for i, (p, part) in enumerate(zip(self.params, self._taken)):
            if self._under_way and p.grad is None:
                self._left_out.append(i)
                p.grad = part
            if not part.any():
                p.grad = None

    def pack(self, gradients: list[Tensor]) -> Tensor:
        """Packs gradients into int8 (ranks, blocks, BLOCK + 2): for each rank the share that it adds up."""
        whole = flat(gradients)
        whole = F.pad(whole, (0, -len(whole) % (BLOCK * self.size)))
        return quantise(whole).view(self.size, -1, BLOCK + 2)

    def add_up(self, received: Tensor) -> Tensor:
        """Returns the mean of a share over all ranks, in their order."""
        return quantise(sum(map(dequantise, received)) / self.size)

    def _mean(self, packed: Tensor) -> Tensor:
        """Runs in the thread. Nothing else uses this process group."""
        received = torch.empty_like(packed)
        together = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=self._group)
        dist.all_gather([*together], self.add_up(received), group=self._group)
        return together

    def _wait(self):
        if self._under_way:
            together = self._under_way.result().to(self.moved.device)  # or raises the thread's error
            self._under_way = None
            self.gradient = dequantise(together)[:len(self.moved)]
            for i in self._left_out:
                self._split(self.gradient)[i].zero_()
            self._left_out = []

    def _split(self, whole: Tensor) -> list[Tensor]:
        parts = whole.split([p.numel() for p in self.params])
        return [part.view_as(p) for p, part in zip(self.params, parts)]

    def _before_step(self, *_):
        if self._under_way:
            self._start = flat(self.params)

    def _after_step(self, *_):
        if self._under_way:
            moved = flat(self.params) - self._start
            for p, more in zip(self.params, self._split(moved - self.moved)):
                p.detach().add_(more)
            self.moved = moved
