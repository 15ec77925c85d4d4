"""What --comm late costs in loss: a trainer in which one process imitates several.

    python bench/late.py 5 train_gpt2.py --modern --optimizer muon --comm late --global-batch 20 --batch 4
    python train_gpt2.py --modern --optimizer muon --global-batch 20 --batch 4     # the same without

Each micro-batch stands for another process, in the trainers' order, so --grad-accum has to be a multiple of
the number of processes. Gradients are packed, added up and applied as `Late` does it on that many processes.
With one thread each, the results are the same bits if the labels of a step divide evenly among the processes,
as in plain text (two: tests/cluster/test_late.py, five: tests/whole_runs/test_lab.py).
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import ddp_utils
import training.step
from cluster import late


def imitate(processes: int):
    """From now on, a single process has the gradients that `processes` would have together."""
    made = []
    add, end_step, async_sum = ddp_utils.Metrics.add, ddp_utils.Metrics.end_step, ddp_utils.async_sum

    class Imitated(late.Late):
        def __init__(self, model, optimizers, run):
            super().__init__(model, optimizers, run)
            self.size, self.own, self.micro_steps = processes, [None] * processes, 0
            made.append(self)

        def keep(self):
            """Moves the gradient of a micro-batch to its process."""
            rank = self.micro_steps % processes
            new, old = [p.grad for p in self.params], self.own[rank]
            self.own[rank] = [a + b for a, b in zip(old, new)] if old else new
            self.micro_steps += 1
            for p in self.params:
                p.grad = None

        def pack(self, gradients):
            assert self.micro_steps % processes == 0, f"--grad-accum has to be a multiple of {processes}"
            packed = torch.stack([super(Imitated, self).pack(own) for own in self.own])
            self.own = [None] * processes
            return packed

        def _mean(self, packed):
            return torch.stack([self.add_up(shares) for shares in packed.unbind(1)])

    def add_and_keep(metrics, sums):  # after each micro-batch
        add(metrics, sums)
        made[-1].keep()

    def labels_of_one(count, world):
        # the trainers compute loss * world_size / labels, and world_size is 1 here
        labels = async_sum(count, world)
        return lambda: labels() / processes

    def end_step_of_all(metrics, samples, labels):
        end_step(metrics, samples, labels * processes)

    training.step.Late, ddp_utils.async_sum = Imitated, labels_of_one
    ddp_utils.Metrics.add, ddp_utils.Metrics.end_step = add_and_keep, end_step_of_all


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("error: give the number of processes and a trainer, such as 5 train_gpt2.py --comm late.")
    imitate(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    ddp_utils.launch(importlib.import_module(Path(sys.argv[0]).stem).main)
