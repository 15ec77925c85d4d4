"""examples/train_recurrent.py: a model of your own, and the mistakes that one can make with it."""

import pytest
import torch
from runs import Trainer, ended, module_of
from train_recurrent import Recurrent, RecurrentConfig

from cli.errors import UserError
from ddp_utils import World
from model import CausalLM, ConfigError, Linear, make_optimizers
from training.strategies import build_model

SCRIPT = "examples/train_recurrent.py"
TINY = {"vocab_size": 258, "padded_vocab": 320, "seq_len": 16}
WORLD = World(0, 1, 0, "node0", 1, torch.device("cpu"), "gloo")


class Other(CausalLM):
    """Two layers that don't inherit Block."""

    Config = RecurrentConfig

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = torch.nn.Embedding(config.padded_vocab, config.width)
        self.layers = torch.nn.ModuleList(Linear(config.width, config.width) for _ in range(2))

    hidden, head_weight = Recurrent.hidden, Recurrent.head_weight

    @property
    def blocks(self):
        return [lambda x, cache, layer=layer: x + layer(x) for layer in self.layers]


def test_buffers_have_the_values_that_the_model_gave_them():
    """Wherever they are, and whether they are saved or not. Random ones are the same each time."""
    class Mine(Recurrent):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("noise", torch.rand(5), persistent=False)
            self.blocks[1].register_buffer("kept", torch.arange(3.0))

    config = RecurrentConfig(**TINY)
    built, again, expected = (dict(model.named_buffers()) for model in (
        build_model(Mine, config, WORLD), build_model(Mine, config, WORLD), Mine(config)))
    assert built.keys() == expected.keys() and {"noise", "blocks.0.decay", "blocks.1.kept"} <= built.keys()
    assert all(torch.equal(built[name], again[name]) for name in built)
    assert all(torch.equal(built[name], expected[name]) for name in built if name != "noise")


def test_what_cannot_be_built_without_memory_is_refused():
    class Tied(Recurrent):
        def __init__(self, config):
            super().__init__(config)
            self.head = torch.nn.Linear(config.width, config.padded_vocab, bias=False)
            self.head.weight = self.embed.weight

    class Derived(Recurrent):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("twice", 2 * self.embed.weight.detach(), persistent=False)

    for model_class, names in ((Tied, "embed.weight and head.weight"), (Derived, "twice of Derived")):
        with pytest.raises(UserError, match=names):
            build_model(model_class, RecurrentConfig(**TINY), WORLD)


def test_muon_takes_the_matrices_of_blocks_wherever_these_are():
    model = Recurrent(RecurrentConfig(**TINY))
    _, muon = make_optimizers(model, "muon", 1e-2, (0.9, 0.95), 0.1)
    found = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in found}
    assert names == {f"blocks.{i}.{layer}.weight" for i in range(4) for layer in ("inner", "outer")}
    with pytest.raises(ConfigError, match="Other inherits Block"):
        make_optimizers(Other(RecurrentConfig(**TINY)), "muon", 1e-2, (0.9, 0.95), 0.1)


def test_layers_that_are_no_blocks_are_named_and_what_it_lacks_is_refused(shards, tmp_path, monkeypatch):
    """It has no mask, no heads, no dropout and no table of names for exports."""
    trainer, out = Trainer(SCRIPT), tmp_path / "run"
    trainer.defaults = {"width": 32, "seq_len": 32, "max_new_tokens": 3, "eval_batches": 1, "steps": 1}
    ended(trainer.train(0, shards, out))
    with monkeypatch.context() as patch:
        patch.setattr(module_of(SCRIPT), "Recurrent", Other)
        ended(trainer.train(0, shards, tmp_path / "other"), "in 0 blocks")
    new = ["--data", shards, "--out", tmp_path / "new"]
    for flags, name in ((["--attention=isolated"], "--attention"),
                        (["--out", out, "--export"], "HF_FAMILIES"),
                        ([*new, "--size", "tiny", "--init-from", f"hf:{tmp_path}"], "HF_FAMILIES")):
        ended(trainer.here(*flags), name, code=2)
