"""Is it the hierarchy? Trains train_hrm.py's model with one stack instead of two, and takes the same flags.

    python bench/looped.py loop --size puzzle --n-layer 2 --out runs/looped
    python bench/looped.py share --size puzzle --out runs/shared
    python bench/looped.py loop --out runs/looped --prompt 400123456789+400876543211

`loop` has one stack and one state: z = H(z + x), from z = 0, where x is the embedded input. This is a looped
transformer (Yang et al., 2023, arXiv 2311.12424). It ignores --l-cycles. At --size puzzle, with one call of L
in each cycle, two blocks a stack give it the parameters and FLOPs of the HRM. `share` has both states of the
HRM, but calls H where the HRM calls L, so it has half the blocks.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import ddp_utils
import train_hrm
from model import HRM, ConfigError


class Shared(HRM):
    def __init__(self, config):
        super().__init__(config)
        del self.L

    @property
    def L(self):
        return self.H


class Looped(Shared):
    def __init__(self, config):
        if not config.inject_input:  # the embedding gets a gradient in each step
            raise ConfigError("the looped stack gets the input in each call: add --inject-input.")
        super().__init__(config)

    def high_level_states(self, idx, cycles, bp_steps=None, cache=None):
        c, T = self.config, idx.size(1)
        begin = cache.length if cache else 0
        rope, mask = self.rope[:, begin:begin + T], self.mask(idx, cache)
        x = self.embed(idx).to(self.compute_dtype) * c.embed_scale  # (B, T, C)
        z, grad = torch.zeros_like(x), torch.is_grad_enabled()
        for _, kept in c.calls_with_grad(bp_steps, cycles):
            with torch.set_grad_enabled(grad and kept > 0):
                z = self.H(z + x, rope, mask, cache)
            yield z


MODELS = {"loop": Looped, "share": Shared}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MODELS:
        sys.exit(f"error: give one of {', '.join(MODELS)} first, then the flags of train_hrm.py.")
    train_hrm.HRM = MODELS[sys.argv.pop(1)]
    train_hrm.__file__ = __file__  # a run keeps a copy of this file
    ddp_utils.launch(train_hrm.main)
