"""What any trainer has to do: resume, all strategies, prompts, an estimate of its memory.

    pytest tests/test_trainer.py --trainer train_mine.py       # yours, with the defaults of its smallest size

Without the option it tests the trainers here, and examples/train_recurrent.py.
"""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from processes import fork
from runs import (
    Trainer,
    assert_close_runs,
    assert_same_run,
    copy_of_the_first_half,
    ended,
    module_of,
    steps_of,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

import ddp_utils
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2, CausalLM, GPT2Config
from training.step import TrainState
from weights.sampling import KVCache, has_usual_loss
from weights.use import load_model

# The shape in which a trainer is tested
TRAINERS = {"train_gpt2.py": {}, "train_hrm.py": {"ff": 64}, "train_mlm.py": {"ff": 48, "window": 16},
            "examples/train_recurrent.py": {"depth": 2, "width": 32}}


def pytest_generate_tests(metafunc):
    if "script" in metafunc.fixturenames:
        metafunc.parametrize("script", metafunc.config.getoption("trainer") or [
            pytest.param(script, marks=[pytest.mark.full] * (script != "train_hrm.py"))
            for script in TRAINERS], scope="module")


@pytest.fixture(scope="module")
def trainer(script) -> Trainer:
    """With those of the usual flags that it has."""
    trainer = Trainer(script, max_new_tokens=5, **TRAINERS.get(script, {}))
    known = module_of(script).parse_args([]).defaults
    trainer.defaults = {key: value for key, value in trainer.defaults.items() if key in known}
    return trainer


@pytest.fixture(scope="module")
def ran(trainer, shards, tmp_path_factory) -> SimpleNamespace:
    """A run of four steps, and what was noted while it ran: the model's parameters, and those that an
    optimizer has changed.
    """
    noted = SimpleNamespace(of_model=set(), stepped=set(), out=tmp_path_factory.mktemp("runs") / "run")
    begin = TrainState.__init__

    def noting(state, model, *rest):
        begin(state, model, *rest)
        noted.of_model.update(model.parameters())

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: noted.stepped.update(
        p for group in optimizer.param_groups for p in group["params"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loggers.mfu.peak_flops", lambda device, say: 1e12)
        patch.setattr(TrainState, "__init__", noting)
        noted.done = ended(trainer.train(0, shards, noted.out, steps=4, eval_every=4))
    hook.remove()
    return noted


@pytest.mark.full
def test_a_killed_run_resumes_bit_for_bit(trainer, shards, tmp_path):
    """test_kill_and_resume.py has the cases of the trainers here that run first."""
    trainer.check_killed_run(tmp_path, 2, shards)


@pytest.mark.full
def test_strategies_compute_the_same_and_resume_bit_for_bit(trainer, shards, tmp_path):
    few = {"global_batch": 8, "steps": 8, "save_every": 4, "eval_every": 4}

    def together(base, *names) -> str:
        """Runs with these strategies, on two processes that start once."""
        commands = [["", trainer.script, *trainer.flags(shards, base / name, **few, strategy=name)]
                    for name in names]
        return ended(fork(2, "tests/helpers/many_runs.py", json.dumps(commands), timeout=200)).out

    together(tmp_path, "ddp", "zero1", "zero3")
    for name in ("zero1", "zero3"):
        assert_close_runs(tmp_path / "ddp", tmp_path / name)
        copy_of_the_first_half(tmp_path / name, tmp_path / "again" / name)
    out = together(tmp_path / "again", "zero1", "zero3")
    assert re.findall(r"resuming after step (\d+)", out) == ["4", "4"], out
    for name in ("zero1", "zero3"):
        assert_same_run(tmp_path / name, tmp_path / "again" / name)


def test_what_a_run_learns_is_its_model(ran, pytestconfig):
    """Where the peak of the device is known, FLOPs are counted."""
    foreign = {tuple(p.shape) for p in ran.stepped - ran.of_model}
    assert not foreign, "no checkpoint holds these parameters: create them in the model's constructor"
    first, *_ = steps = steps_of(ran.out)
    # shapes that depend on the data, in a trainer of your own
    uncounted = pytestconfig.getoption("--trainer") and "MFU is not shown (" in ran.done.out
    assert uncounted or all(record["mfu"] > 0 for record in steps)
    assert re.search(r", [1-9][\d,]+ .* in \d+ blocks", ran.done.out), ran.done.out
    assert first["loss"] > 1, "the loss is tiny: return a sum over labels, not a mean"


def test_rows_of_the_sizes_are_flags(script):
    """With underscores in their names, and numbers without quotes."""
    module = module_of(script)
    for row in module.SIZES.values():
        for key, value in row.items() - {("vocab_size", row.get("vocab_size"))}:
            option = f"--{key.replace('_', '-')}"
            given = module.parse_args([option] if value is True else [f"{option}={value}"]).given
            assert given.get(key) == value


def test_a_run_can_be_used(trainer, ran):
    """--prompt gives the same answer twice, --export works or says why not, and the cache gives what all
    tokens at once give.
    """
    family = read_checkpoint(list_checkpoints(ran.out)[0])["family"]
    model_class = getattr(module_of(trainer.script), family)
    exported = trainer.here("--out", ran.out, "--export")
    assert exported.code in (0, 2) and (exported.code == 0) == ("is ready for" in exported.out), exported.out
    if not issubclass(model_class, CausalLM):
        filled = ended(trainer.here("--out", ran.out, "--fill", "def [MASK]elf(x"))
        assert filled.out.count("%") == 5
        return
    answers = [trainer.here("--out", ran.out, "--prompt", "def", "--temperature", "0").out for _ in range(2)]
    assert answers[0] == answers[1] and answers[0].startswith("def"), answers
    world = ddp_utils.init("gloo", "cpu")
    try:
        model = load_model(model_class, ddp_utils.load_checkpoint(ran.out, print), world)
    finally:
        torch.distributed.destroy_process_group()
    assert_decodes(model.eval())


@pytest.mark.full
def test_memory_is_estimated(trainer, shards, tmp_path):
    ended(trainer.train(0, shards, tmp_path / "run", dry_run="2x80", steps=1), "--strategy ddp fits.")
    assert not (tmp_path / "run").exists()


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
    """A window that generated tokens don't have, and a loss of other logits than those that write."""
    class Windowed(GPT2):
        def mask(self, idx, cache, flex=True):
            t = torch.arange(idx.size(1))
            return (t[:, None] >= t) & (t[:, None] - t < 8)

    config = GPT2Config(258, 320, 16, n_layer=2, n_head=2, d_model=32)
    assert_decodes(GPT2(config).eval())
    with pytest.raises(AssertionError):
        assert_decodes(Windowed(config).eval())
    logits = CausalLM.logits
    monkeypatch.setattr(CausalLM, "logits", lambda self, hidden: torch.tanh(logits(self, hidden)))
    with pytest.raises(AssertionError):
        assert_decodes(GPT2(config).eval())
