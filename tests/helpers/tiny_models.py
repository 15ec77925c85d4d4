"""Tiny HRMs, GPT-2s and MLMs on a CPU, with the same weights each time, and what tests measure on them."""

import functools
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from model import GPT2, HRM, MLM, GPT2Config, HRMConfig, MLMConfig, blocks_of
from vocab.tokenizer import load_tokenizer
from weights.huggingface import to_hf

VOCAB, PADDED, SEQ_LEN = 60, 64, 16  # padded, so that every test has ids that must not matter
EOT, WINDOW = 0, 6  # of the MLM; three tokens to either side
SHAPE = {"vocab_size": VOCAB, "padded_vocab": PADDED, "seq_len": SEQ_LEN, "n_layer": 2, "n_head": 2,
         "d_model": 32}
# A halting bias for each number of H-cycles, of at most 4: p is 1.00, 0.73 (twice that is above 1) or 0.00.
HALT_BIAS = {1: 10.0, 2: 1.0, 4: -20.0}


def prepared(model, checkpointing: str, dtype):
    model.compute_dtype = dtype
    for block in blocks_of(model):
        block.checkpointing = checkpointing
    return model


def hrm(checkpointing: str = "none", dtype=torch.float32, depth: int | None = None, **config) -> HRM:
    """An HRM as it is initialized. `depth` makes it halt after so many H-cycles."""
    torch.manual_seed(0)
    model = HRM(HRMConfig(**SHAPE | {"ff": 48, "halt": depth is not None} | config))
    if depth is not None:
        nn.init.constant_(model.halt.bias, HALT_BIAS[depth])
        nn.init.normal_(model.halt.weight, std=0.01)  # from its initial 0 no gradient would reach z_H
    return prepared(model, checkpointing, dtype)


def gpt2(checkpointing: str = "none", dtype=torch.float32, **config) -> GPT2:
    return prepared(randomize(GPT2(GPT2Config(**SHAPE | config))), checkpointing, dtype)


def mlm(checkpointing: str = "none", dtype=torch.float32, **config) -> MLM:
    settings = SHAPE | {"n_layer": 4, "ff": 24, "window": WINDOW, "eot": EOT} | config
    return prepared(randomize(MLM(MLMConfig(**settings))), checkpointing, dtype)


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, std: float = 0.2) -> nn.Module:
    """Gives a model weights that make every tensor count: zeros and ones would hide one that is lost."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        p.normal_(std=std, generator=generator)
        if name.endswith("weight") and ("norm" in name or ".ln_" in name):
            p.add_(1.0)
    return model


BUILDS = {"hrm": hrm, "gpt2": gpt2, "modern": functools.partial(gpt2, modern=True), "mlm": mlm}
each_model = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def tokens(batch: int = 2, length: int = SEQ_LEN, seed: int = 7) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def documents() -> torch.Tensor:
    """Two rows of three documents, which start with EOT: (2, SEQ_LEN)."""
    idx = tokens().clamp(min=1)
    idx[:, [0, 5, 11]] = EOT
    return idx


def positions_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Five masked positions in each row. Two of the labels do not count."""
    positions = torch.tensor([[1, 3, 7, 8, 12], [2, 4, 6, 13, 15]])
    labels = tokens(seed=9).gather(1, positions)
    labels[0, 4], labels[1, 0] = -1, -100
    return positions, labels


def gradients(model: nn.Module) -> dict:
    return {name: p.grad for name, p in model.named_parameters()}


def step(model, **settings) -> tuple[dict, dict]:
    """One forward and backward pass: the objective and every gradient by name; and the sums. All are divided
    by 32, the number of targets of a causal model. It is a power of two, so no digit changes.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # for dropout
    idx = tokens(length=SEQ_LEN + 1)
    inputs = (documents(), *positions_and_labels()) if isinstance(model, MLM) else (idx[:, :-1], idx[:, 1:])
    if isinstance(model, HRM):
        settings = {"ponder_weight": 0.01} | settings
    objective, sums = model(*inputs, **settings)
    objective = objective / 32
    objective.backward()
    return ({"objective": objective.detach(), **gradients(model)},
            {name: value / 32 for name, value in sums.items()})


def differing(a: dict, b: dict) -> list[str]:
    """The names whose tensors differ in any bit, or exist on one side only."""
    assert a.keys() == b.keys()
    return [name for name in a if (a[name] is None) != (b[name] is None)
            or a[name] is not None and not torch.equal(a[name], b[name])]


def largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


# -----------------------------------------------------------------------------------------------------------
# Models that other programs read

WORDS = load_tokenizer("bytes")  # 257 ids, in a table of 320 rows; [MASK] is 257
TEXT = "the cat sat on the mat, and the cat — über alles — sat on 12 mats.\n"
TALL = 80


def made(name: str, seed: int = 0, **changes) -> nn.Module:
    """A model of random shape and weights. In a TALL one, another tensor has as many rows as the table."""
    pick = random.Random(seed).choice
    n_head, width, ff = (5, 16, 160) if seed == TALL else (pick((2, 3)), pick((8, 16)), pick((24, 40)))
    shape = {"vocab_size": 257, "padded_vocab": 320, "n_head": n_head, "d_model": n_head * width,
             "n_layer": pick((2, 3)), "norm_eps": pick((1e-6, 1e-3))}
    shape |= {"gpt2": {"dropout": 0.2}, "modern": {},
              "hrm": {"ff": ff, "h_cycles": pick((1, 2)), "l_cycles": pick((1, 2, 3)),
                      "rope_theta": pick((500.0, 10000.0)), "embed_scale": pick((None, 3.0))},
              "mlm": {"ff": ff, "dropout": 0.1, "window": pick((4, 7)), "eot": 256, "vocab_size": 258,
                      "global_every": pick((2, 3)), "global_theta": 500.0, "local_theta": 100.0}}[name]
    model = BUILDS[name](**shape | changes)
    return randomize(model, seed, model.config.d_model ** -0.5).eval()


def export(model: nn.Module, tokenizer, directory: Path) -> Path:
    """Writes a model for transformers into a directory. Returns the directory."""
    to_hf(model.eval(), directory, tokenizer)
    return directory
