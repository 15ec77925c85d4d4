"""What --comm late costs in loss: a trainer in which one process imitates several.

    python bench/late.py 5 train_gpt2.py --modern --optimizer muon --comm late --global-batch 20 --batch 4
    python train_gpt2.py --modern --optimizer muon --global-batch 20 --batch 4     # the same without

Each micro-batch is that of another process, as the trainers deal them out; so --grad-accum is a multiple of
the number of processes. Their gradients are packed, added up and applied as `Late` does that with as many
processes. The results are the same bits (tests/test_strategies.py), with one thread each.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import ddp_utils  # noqa: E402
from ddp_utils import Late, Metrics, dequantise, quantise  # noqa: E402


def imitate(processes: int) -> None:
    """From now on, a single process has the gradients that so many processes would have together."""
    made, add = [], Metrics.add

    class Imitated(Late):
        def __init__(self, model, world):
            super().__init__(model, ddp_utils.World(**vars(world) | {"world_size": processes}))
            self.gradients, self.micro_steps = [None] * processes, 0
            made.append(self)

        def keep(self):
            """Moves the gradient of a micro-batch to the process that it belongs to."""
            rank = self.micro_steps % processes
            new, old = [p.grad for p in self.params], self.gradients[rank]
            self.gradients[rank] = [a + b for a, b in zip(old, new)] if old else new
            self.micro_steps += 1
            for p in self.params:
                p.grad = None

        def pack(self, gradients):
            assert self.micro_steps % processes == 0, f"--grad-accum has to be a multiple of {processes}"
            packed = torch.stack([super(Imitated, self).pack(own) for own in self.gradients])
            self.gradients = [None] * processes
            return packed

        def _add_up(self, packed):
            return torch.stack([quantise(sum(map(dequantise, shares))) for shares in packed.unbind(1)])

    def add_and_keep(metrics, sums):  # after each micro-batch
        add(metrics, sums)
        made[-1].keep()

    ddp_utils.Late, Metrics.add = Imitated, add_and_keep


if __name__ == "__main__":
    imitate(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    ddp_utils.launch(importlib.import_module(Path(sys.argv[0]).stem).main)
