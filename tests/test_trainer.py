"""What any trainer has to do: resume, all strategies, prompts, an estimate of its memory.

    pytest tests/test_trainer.py --trainer train_mine.py       # yours, with the defaults of its smallest size

Without the option it tests the trainers here, and examples/train_recurrent.py.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from processes import fork
from runs import Trainer, assert_close_runs, assert_same_run, copy_of_the_first_half, module_of, steps_of
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_recurrent import Recurrent, RecurrentConfig

import ddp_utils
from cli.errors import UserError
from ddp_utils import World, list_checkpoints
from model import GPT2, CausalLM, ConfigError, GPT2Config, Linear, make_optimizers
from training.step import TrainState
from training.strategies import build_model
from weights.sampling import KVCache, has_usual_loss
from weights.use import load_model

RECURRENT = "examples/train_recurrent.py"
# The shape in which a trainer is tested, and more flags of the run that is killed
TRAINERS = {
    "train_gpt2.py": ({}, {"modern": True, "optimizer": "muon", "ema": 0.9, "batch": 2}),
    "train_hrm.py": ({"ff": 64}, {"global_batch": 24, "batch": 6, "ema": 0.9, "halt": True, "dropout": 0.1,
                                  "precision": "bf16", "optimizer": "adam-atan2", "steps": 28}),
    "train_mlm.py": ({"ff": 48, "window": 16}, {"precision": "bf16", "batch": 2}),
    RECURRENT: ({"depth": 2, "width": 32}, {"optimizer": "muon", "batch": 2}),
}


def pytest_generate_tests(metafunc):
    if "script" in metafunc.fixturenames:
        metafunc.parametrize("script", metafunc.config.getoption("trainer") or [
            pytest.param(script, marks=[pytest.mark.full] * (script != "train_hrm.py"))
            for script in TRAINERS])


def trainer_of(script: str, capsys) -> Trainer:
    """With those of the usual flags that it has."""
    shape, _ = TRAINERS.get(script, ({}, {}))
    trainer = Trainer(script, max_new_tokens=5, **shape)
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [script, "--help-all"])
        module_of(script).main()
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    trainer.defaults = {key: value for key, value in trainer.defaults.items()
                        if f"--{key.replace('_', '-')}" in known}
    return trainer


def together(trainer: Trainer, shards: Path, base: Path, runs: dict[str, dict]):
    """Runs by name, with changed flags, on two processes that start once."""
    commands = [["", trainer.script, *trainer.flags(shards, base / name, **changes)]
                for name, changes in runs.items()]
    done = fork(2, "tests/helpers/many_runs.py", json.dumps(commands), timeout=200)
    assert done.code == 0, done.out
    return done.out


def test_a_killed_run_resumes_bit_for_bit(script, shards, tmp_path, capsys):
    _, changes = TRAINERS.get(script, ({}, {}))
    trainer_of(script, capsys).check_killed_run(tmp_path, 2, shards, **changes)


@pytest.mark.full
def test_strategies_compute_the_same_and_resume_bit_for_bit(script, shards, tmp_path, capsys):
    trainer = trainer_of(script, capsys)
    trainer.defaults |= {"global_batch": 8, "steps": 8, "save_every": 4, "eval_every": 4}
    again = {"zero1": {"strategy": "zero1"}, "zero3": {"strategy": "zero3"}}
    together(trainer, shards, tmp_path, {"ddp": {}} | again)
    for name in again:
        assert_close_runs(tmp_path / "ddp", tmp_path / name)
        copy_of_the_first_half(tmp_path / name, tmp_path / "again" / name)
    out = together(trainer, shards, tmp_path / "again", again)
    assert re.findall(r"resuming after step (\d+)", out) == ["4"] * len(again), out
    for name in again:
        assert_same_run(tmp_path / name, tmp_path / "again" / name)


def test_a_run_can_be_used(script, shards, tmp_path, capsys, monkeypatch, pytestconfig):
    """The cache gives what all tokens at once give; --prompt answers; --export works or says why not. Where
    the peak of the device is known, FLOPs are counted.
    """
    trainer = trainer_of(script, capsys)
    of_model, stepped, begin = set(), set(), TrainState.__init__

    def noting(state, model, *rest):
        begin(state, model, *rest)
        of_model.update(model.parameters())

    def note(optimizer, *_):
        stepped.update(p for group in optimizer.param_groups for p in group["params"])

    hook = register_optimizer_step_post_hook(note)  # for all optimizers
    with monkeypatch.context() as patch:
        patch.setattr("loggers.mfu.peak_flops", lambda device, say: 1e12)
        patch.setattr(TrainState, "__init__", noting)
        done = trainer.train(0, shards, tmp_path / "run", steps=4, eval_every=4)
    hook.remove()
    foreign = {tuple(p.shape) for p in stepped - of_model}
    assert not foreign, "no checkpoint holds these parameters: create them in the model's constructor"
    # shapes that depend on the data, in a trainer of one's own
    uncounted = pytestconfig.getoption("--trainer") and "MFU is not shown (" in done.out
    assert uncounted or all(record["mfu"] > 0 for record in steps_of(tmp_path / "run"))
    assert done.code == 0 and re.search(r", [1-9][\d,]+ of them in \d+ blocks", done.out), done.out
    first = steps_of(tmp_path / "run")[0]
    assert first["loss"] > 1, "the loss is tiny: return a sum over labels, not a mean"
    saved = torch.load(list_checkpoints(tmp_path / "run")[0], weights_only=True)
    model_class = getattr(module_of(script), saved["family"])
    exported = trainer.here("--out", tmp_path / "run", "--export")
    assert exported.code in (0, 2) and (exported.code == 0) == ("is ready for" in exported.out), exported.out
    if not issubclass(model_class, CausalLM):
        filled = trainer.here("--out", tmp_path / "run", "--fill", "def [MASK]elf(x")
        assert filled.code == 0 and filled.out.count("%") == 5, filled.out
        return
    answers = [trainer.here("--out", tmp_path / "run", "--prompt", "def", "--temperature", "0").out
               for _ in range(2)]
    assert answers[0] == answers[1] and answers[0].startswith("def"), answers
    world = ddp_utils.init("gloo", "cpu")
    try:
        saved = ddp_utils.load_checkpoint(tmp_path / "run", print)
        model = load_model(model_class, saved, world)
    finally:
        torch.distributed.destroy_process_group()
    assert_decodes(model.eval())


@torch.no_grad()
def assert_decodes(model: CausalLM) -> None:
    """A prompt at once, then the rest of a row token by token, and again after the cache was emptied. And the
    loss is that of the logits, unless the class has a loss of its own.
    """
    T, generator = model.config.seq_len, torch.Generator().manual_seed(0)
    for p in model.parameters():
        if not p.any():  # as they were initialized, and hide what comes before them
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    idx = torch.randint(256, (2, T), generator=generator)
    whole, cache = model(idx), KVCache(T)
    for _ in range(2):
        cache.rewind(0)
        for end, new in enumerate([idx[:, :5], *idx[:, 5:].split(1, 1)], 5):
            assert (model.decode(new, cache) - whole[:, end - 1]).abs().max() <= 1e-4 * whole.abs().max()
    if has_usual_loss(model):
        x = 100 * model.hidden(idx, None)  # logits as large as those of trained weights
        exact = torch.nn.functional.cross_entropy(model.logits(x).mT.float(), idx, reduction="none")
        torch.testing.assert_close(model.loss(x, idx, idx, reduction="none")[0], exact, rtol=1e-4,
                                   atol=1e-4)
        torch.testing.assert_close(model.loss(x, idx, idx)[1]["loss"], exact.sum(), rtol=1e-4, atol=0)


def test_control_wrong_models_are_noticed(monkeypatch):
    """A window that generated tokens do not have; attention that later layers alone would show, if their
    weights were zero; a loss of other logits than those that write.
    """
    class Windowed(GPT2):
        def mask(self, idx, cache, flex=True):
            t = torch.arange(idx.size(1))
            return (t[:, None] >= t) & (t[:, None] - t < 8)

    for modern in (False, True):
        config = GPT2Config(**TINY, n_layer=2, n_head=2, d_model=32, modern=modern)
        assert_decodes(GPT2(config).eval())
        with pytest.raises(AssertionError):
            assert_decodes(Windowed(config).eval())
    monkeypatch.setattr(CausalLM, "logits", capped(CausalLM.logits))
    with pytest.raises(AssertionError):
        assert_decodes(GPT2(config).eval())

    class Capped(GPT2):
        logits = capped(GPT2.logits)

    assert_decodes(Capped(config).eval())


def capped(logits):
    return lambda self, hidden: 2 * torch.tanh(logits(self, hidden) / 2)


def test_flags_do_not_change_after_parse(script, shards, tmp_path, capsys, monkeypatch):
    trainer, seen = trainer_of(script, capsys), []
    parse = module_of(script).parse_args

    def parse_args(argv):
        command = parse(argv)
        seen.append((command, copy.deepcopy((command.given, command.defaults, command.sizes))))
        return command

    monkeypatch.setattr(module_of(script), "parse_args", parse_args)
    assert trainer.train(0, shards, tmp_path / "run", steps=2, eval_every=2).code == 0
    (command, before), = seen
    assert (command.given, command.defaults, command.sizes) == before


def test_rows_of_the_sizes_are_flags(script):
    """With underscores in their names, and numbers without quotes."""
    module = module_of(script)
    for name, row in module.SIZES.items():
        for key, value in row.items() - {("vocab_size", row.get("vocab_size"))}:
            option = f"--{key.replace('_', '-')}"
            given = module.parse_args([option] if value is True else [f"{option}={value}"]).given
            assert given.get(key) == value, f"the row {name} of SIZES sets {key}={value!r}"


def test_memory_is_estimated(script, shards, tmp_path, capsys):
    done = trainer_of(script, capsys).train(0, shards, tmp_path / "run", dry_run="2x80", steps=1)
    assert done.code == 0 and "--strategy ddp fits." in done.out and not (tmp_path / "run").exists(), done.out


# ------------------------------------------------------------------------------ traps of a model of one's own

TINY = {"vocab_size": 258, "padded_vocab": 320, "seq_len": 16}
WORLD = World(0, 1, 0, "node0", 1, torch.device("cpu"), "gloo")


class Other(CausalLM):
    """Two layers that do not inherit Block."""

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
    """Wherever they are, and whether they are saved or not; random ones are the same each time."""
    class Mine(Recurrent):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("noise", torch.rand(5), persistent=False)
            self.blocks[1].register_buffer("kept", torch.arange(3.0))

    config = RecurrentConfig(**TINY)
    built, again = (build_model(Mine, config, WORLD) for _ in range(2))
    expected = dict(Mine(config).named_buffers())
    for name, buffer in built.named_buffers():
        assert torch.equal(buffer, dict(again.named_buffers())[name]), name
        assert name == "noise" or torch.equal(buffer, expected[name]), name
    assert {"noise", "blocks.0.decay", "blocks.1.kept"} <= expected.keys()
    assert "blocks.0.decay" not in built.state_dict() and "blocks.1.kept" in built.state_dict()


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

    for model_class, nouns in ((Tied, "embed.weight and head.weight"), (Derived, "buffer twice of Derived")):
        with pytest.raises(UserError, match=nouns):
            build_model(model_class, RecurrentConfig(**TINY), WORLD)


def test_muon_takes_the_matrices_of_blocks_wherever_these_are():
    model = Recurrent(RecurrentConfig(**TINY))
    _, muon = make_optimizers(model, "muon", 1e-2, (0.9, 0.95), 0.1)
    found = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in found}
    assert names == {f"blocks.{i}.{layer}.weight" for i in range(4) for layer in ("inner", "outer")}
    with pytest.raises(ConfigError, match="Other inherits Block"):
        make_optimizers(Other(RecurrentConfig(**TINY)), "muon", 1e-2, (0.9, 0.95), 0.1)


def test_a_flag_exists_where_the_model_has_what_it_changes(shards, tmp_path):
    """A recurrent model has no mask, no heads and no dropout."""
    trainer = Trainer(RECURRENT)
    trainer.defaults = {"steps": 1}
    for flag in ("--attention=isolated", "--n-head=2", "--dropout=0.1", "--d-model=64"):
        done = trainer.here(flag, "--data", shards, "--out", tmp_path / "run")
        assert done.code == 2 and flag.partition("=")[0] in done.out, done.out
    with pytest.raises(ConfigError, match="--n-head 5"):
        GPT2(GPT2Config(**TINY, n_head=5, d_model=128))


def test_a_model_without_a_table_of_names_is_not_exported(shards, tmp_path):
    trainer = Trainer(RECURRENT, width=32, depth=1)
    trainer.defaults = {"width": 32, "depth": 1, "seq_len": 32, "max_new_tokens": 3, "eval_batches": 1}
    done = trainer.train(0, shards, tmp_path / "run", steps=1)
    assert done.code == 0, done.out
    for flags in (["--out", tmp_path / "run", "--export"],
                  ["--data", shards, "--out", tmp_path / "new", "--size", "tiny",
                   "--init-from", f"hf:{tmp_path}"]):
        done = trainer.here(*flags)
        assert done.code == 2 and "Recurrent" in done.out and "HF_FAMILIES" in done.out, done.out


def test_layers_that_are_no_blocks_are_named_at_the_start(shards, tmp_path, monkeypatch):
    trainer = Trainer(RECURRENT)
    trainer.defaults = {"width": 32, "seq_len": 32, "max_new_tokens": 3, "eval_batches": 1, "steps": 1}
    monkeypatch.setattr(module_of(RECURRENT), "Recurrent", Other)
    done = trainer.train(0, shards, tmp_path / "run")
    assert done.code == 0 and "0 of them in 0 blocks" in done.out, done.out
