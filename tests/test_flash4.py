"""FlashAttention 4 in the place of torch's flash attention: when a run takes it, and what it records. The
package and the GPU are pretended, see flash4.py; test_cuda.py is for real ones.
"""

import json
from types import SimpleNamespace

import flash4
import pytest
import torch
from runs import Trainer, assert_same_run, copy_of_the_first_half

import ddp_utils
import train_gpt2
from cli.errors import at_end
from ddp_utils import list_checkpoints
from model import GPT2, HRM, MLM, GPT2Config, HRMConfig, MLMConfig

TINY = dict(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16)
PLAN = SAID = "attention: FlashAttention 4"
RUN = Trainer("train_gpt2.py", precision="bf16", steps=8, save_every=4, eval_every=8, sample_every=0,
              max_new_tokens=3)


@pytest.fixture
def world():
    world = ddp_utils.init("gloo", "cpu")
    yield world
    torch.distributed.destroy_process_group()


def of_my_own():
    """A model whose configuration has none of these names."""
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace()
    return model


def takes(model=None, saved=None, dtype=torch.bfloat16, fast=False) -> tuple[bool, list[str]]:
    """Whether set_modes takes it, and what it says, on a GPU for a run with these settings."""
    said, precision = [], {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    args = SimpleNamespace(fast=fast, precision=precision, checkpoint_activations="none", compile=False)
    model = model or GPT2(GPT2Config(**TINY))
    run = SimpleNamespace(args=args, world=SimpleNamespace(device=flash4.GPU), saved=saved, say=said.append)
    taken = flash4.set_modes(model, run)["flash_attention_4"]
    teacher = GPT2(GPT2Config(**TINY))
    ddp_utils.apply_modes(teacher, args, run.world)
    assert taken == flash4.active()  # whatever could be taken for another model
    return taken, said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: GPT2(GPT2Config(**TINY)), lambda: HRM(HRMConfig(**TINY, ff=32))])
def test_it_is_taken_where_it_is_installed(tmp_path, world, make, dtype):
    with flash4.gpu(flash4.install(tmp_path)):
        assert takes(make(), dtype=dtype) == (True, [SAID]) and flash4.active()
        at_end.close()
        assert not flash4.active()
        assert takes(make(), dtype=dtype) == (True, [SAID]) and flash4.active()  # in the next main()
    assert not flash4.active()


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_it_is_taken_on_blackwell(tmp_path, world, capability):
    with flash4.gpu(flash4.install(tmp_path), capability):
        assert takes() == (True, [SAID])


@pytest.mark.parametrize("what, changes", [
    ("nothing", lambda: {}), ("--fast", lambda: {"fast": True}), ("fp32", lambda: {"dtype": torch.float32}),
    ("dropout", lambda: {"model": GPT2(GPT2Config(**TINY, dropout=0.1))}),
    ("masks", lambda: {"model": GPT2(GPT2Config(**TINY, attention="isolated"))}),
    ("the MLM", lambda: {"model": MLM(MLMConfig(**TINY, ff=24))}),
    ("a model of one's own", lambda: {"model": of_my_own()}),
    ("begun without", lambda: {"saved": {"settings": {"flash_attention_4": False}}}),
    ("begun before there was the setting", lambda: {"saved": {"settings": {}}}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_elsewhere_all_is_as_without_it(tmp_path, world, what, changes):
    with flash4.gpu(flash4.install(tmp_path)):
        assert takes(**changes()) == ((True, [SAID]) if what == "nothing" else (False, []))
        assert flash4.active() == (what == "nothing")


def test_without_the_package_nothing_is_said(tmp_path, world):
    """Nor with FlashAttention 2, whose package has the same name."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("import no_such_module")
    for directory in (None, tmp_path):
        with flash4.gpu(directory):
            assert takes() == (False, [])


MORE = flash4.PACKAGE.replace("more = ()", "more = (None, None, None)")
UNPACKS_TWO = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


@pytest.mark.parametrize("text, words", [
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("raise OSError('libcudart.so.12: cannot\\nopen')", "OSError: libcudart.so.12: cannot"),
    ("import os; os.no_such_name", "AttributeError: module 'os' has no attribute 'no_such_name'"),
    ("", "does not expose FA4 kernels"),
    (flash4.changed("y", "1 / 0"), "ZeroDivisionError: division by zero"),
    (flash4.changed("dv", "1 / 0"), "ZeroDivisionError: division by zero"),
    *((flash4.changed(name, "result * 1.1"), "numbers") for name in ("y", "dq", "dk", "dv")),
    *((flash4.changed(name, "result * torch.nan"), "numbers") for name in ("y", "dq")),
    (flash4.PACKAGE.replace("if causal else", "if False else"), "numbers"),  # sees later tokens
    (flash4.PACKAGE.replace(".tril()", ".tril(1)"), "numbers"),
    *((flash4.changed(name, "noise(result)"), "bits") for name in ("y", "dq", "dk", "dv")),
    (flash4.PACKAGE.replace("if not deterministic", "if deterministic"), "bits"),
    pytest.param(MORE, "ValueError: too many values to unpack (expected 2)", marks=pytest.mark.skipif(
        not UNPACKS_TWO, reason="from torch 2.14 on that is no mistake")),
])
@pytest.mark.parametrize("saved", [None, {"settings": {"flash_attention_4": True}}])
def test_what_is_broken_or_wrong_is_one_sentence(tmp_path, world, text, words, saved):
    with flash4.gpu(flash4.install(tmp_path, text)):
        taken, [said] = takes(saved=saved)
        assert not taken and said.startswith("WARNING: FlashAttention 4 is not used") and words in said
        assert "\n" not in said and not flash4.active()


@pytest.mark.skipif(UNPACKS_TWO, reason="torch before 2.14 unpacks two values")
def test_newer_packages_return_more_values(tmp_path, world):
    with flash4.gpu(flash4.install(tmp_path, MORE, "4.0.0b36")):
        assert takes() == (True, [SAID])


def test_a_gpu_that_it_is_not_for(tmp_path, world):
    with flash4.gpu(flash4.install(tmp_path), (8, 0)):
        taken, [said] = takes()
        assert not taken and "requires compute capability 9.0 or 10.0" in said


def test_a_torch_without_the_switch(tmp_path, world, monkeypatch):
    with flash4.gpu(flash4.install(tmp_path)):
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
        taken, [said] = takes()
        assert not taken and "has no attribute 'activate_flash_attention_impl'" in said


def test_a_configuration_without_heads(tmp_path, world):
    model = of_my_own()
    model.config.attention = "causal"
    with flash4.gpu(flash4.install(tmp_path)):
        taken, [said] = takes(model)
        assert not taken and "has no attribute 'head_dim'" in said


def setting(out) -> bool:
    """What config.json and the newest checkpoint record."""
    recorded = json.loads((out / "config.json").read_text())["settings"]["flash_attention_4"]
    assert ddp_utils.read_checkpoint(list_checkpoints(out)[0])["settings"]["flash_attention_4"] is recorded
    return recorded


CHANGED = "resuming with flash_attention_4 False (was True)"


def test_a_run_stays_with_it_and_says_where_it_is_missing(tmp_path, shards):
    with flash4.gpu(flash4.install(tmp_path / "package")):
        done = RUN.train(0, shards, tmp_path / "run")
        assert done.code == 0 and PLAN in done.out and setting(tmp_path / "run"), done.out
        assert not flash4.active()
        done = RUN.train(0, shards, tmp_path / "run", steps=10)
        assert done.code == 0 and PLAN in done.out and setting(tmp_path / "run"), done.out
        assert "flash_attention_4" not in done.out
        for flags in (["--eval-only"], ["--prompt", "def", "--max-new-tokens", "2"], ["--export"]):
            done = RUN.here("--out", tmp_path / "run", *flags)
            assert done.code == 0 and "FlashAttention" not in done.out, done.out
    with flash4.gpu(None):
        done = RUN.train(0, shards, tmp_path / "run", steps=12)
        assert done.code == 0 and CHANGED in done.out and PLAN not in done.out, done.out
        assert not setting(tmp_path / "run")


@pytest.mark.parametrize("old", [False, True])
def test_a_run_stays_without_it(tmp_path, shards, old):
    """Also one of before there was the setting."""
    with flash4.gpu(None):
        done = RUN.train(0, shards, tmp_path / "run")
        assert done.code == 0 and "FlashAttention" not in done.out and not setting(tmp_path / "run"), done.out
    copy_of_the_first_half(tmp_path / "run", tmp_path / "half")
    if old:
        path = list_checkpoints(tmp_path / "half")[0]
        content = torch.load(path, weights_only=True)
        del content["settings"]["flash_attention_4"]
        torch.save(content, path)
    with flash4.gpu(flash4.install(tmp_path / "package")):
        done = RUN.train(0, shards, tmp_path / "half")
        assert done.code == 0 and "after step 4 from" in done.out, done.out
        assert "FlashAttention" not in done.out and "flash_attention_4" not in done.out, done.out
        assert not setting(tmp_path / "half")
        assert_same_run(tmp_path / "run", tmp_path / "half")
        new = RUN.train(0, shards, tmp_path / "new")  # as a new one does not
        assert new.code == 0 and PLAN in new.out


def test_an_error_gives_torch_its_own_kernels_back(tmp_path, shards, monkeypatch):
    class Mistake(Exception):
        pass

    def fail(*_):
        assert flash4.active()
        raise Mistake

    monkeypatch.setattr(ddp_utils, "seed_step", fail)
    with flash4.gpu(flash4.install(tmp_path / "package")):
        with pytest.raises(Mistake):
            train_gpt2.main(RUN.flags(shards, tmp_path / "run"))
        assert not flash4.active()
