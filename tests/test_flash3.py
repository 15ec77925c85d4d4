"""FlashAttention 3 in the place of torch's flash attention: when a run takes it, and what it records. The
package and the GPU are pretended, see flash3.py; test_cuda.py is for real ones.
"""

import json
from types import SimpleNamespace

import flash3
import pytest
import torch
from runs import Trainer, assert_same_run, copy_of_the_first_half

import ddp_utils
import train_gpt2
from cli.errors import at_end
from ddp_utils import list_checkpoints
from model import GPT2, HRM, MLM, GPT2Config, HRMConfig, MLMConfig

TINY = dict(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16)
PLAN = SAID = "attention: FlashAttention 3"
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
    model.config = SimpleNamespace(attention="causal")
    return model


def takes(model=None, saved=None, dtype=torch.bfloat16, fast=False) -> tuple[bool, list[str]]:
    """Whether set_modes takes it, and what it says, on a GPU for a run with these settings."""
    said, precision = [], {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    args = SimpleNamespace(fast=fast, precision=precision, checkpoint_activations="none", compile=False)
    model = model or GPT2(GPT2Config(**TINY))
    run = SimpleNamespace(args=args, world=SimpleNamespace(device=flash3.GPU), saved=saved, say=said.append)
    taken = flash3.set_modes(model, run)["flash_attention_3"]
    teacher = GPT2(GPT2Config(**TINY))
    ddp_utils.apply_modes(teacher, args, run.world)
    assert taken == flash3.active()  # whatever could be taken for another model
    return taken, said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: GPT2(GPT2Config(**TINY)), lambda: HRM(HRMConfig(**TINY, ff=32))])
def test_it_is_taken_where_it_is_installed(tmp_path, world, make, dtype):
    with flash3.gpu(flash3.install(tmp_path)):
        assert takes(make(), dtype=dtype) == (True, [SAID]) and flash3.active()
        at_end.close()
        assert not flash3.active()
        assert takes(make(), dtype=dtype) == (True, [SAID]) and flash3.active()  # in the next main()
    assert not flash3.active()


@pytest.mark.parametrize("what, capability, changes", [
    ("nothing", (9, 0), lambda: {}), ("sm80", (8, 0), lambda: {}), ("sm100", (10, 0), lambda: {}),
    ("--fast", (9, 0), lambda: {"fast": True}), ("fp32", (9, 0), lambda: {"dtype": torch.float32}),
    ("dropout", (9, 0), lambda: {"model": GPT2(GPT2Config(**TINY, dropout=0.1))}),
    ("masks", (9, 0), lambda: {"model": GPT2(GPT2Config(**TINY, attention="isolated"))}),
    ("wide heads", (9, 0), lambda: {"model": GPT2(GPT2Config(**TINY | {"d_model": 512}))}),
    ("a model of one's own", (9, 0), lambda: {"model": of_my_own()}),
    ("the MLM", (9, 0), lambda: {"model": MLM(MLMConfig(**TINY, ff=24))}),
    ("begun without", (9, 0), lambda: {"saved": {"settings": {"flash_attention_3": False}}}),
    ("begun before there was the setting", (9, 0), lambda: {"saved": {"settings": {}}}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_elsewhere_all_is_as_without_it(tmp_path, world, what, capability, changes):
    with flash3.gpu(flash3.install(tmp_path), capability):
        assert takes(**changes()) == ((True, [SAID]) if what == "nothing" else (False, []))
        assert flash3.active() == (what == "nothing")


def test_without_the_package_nothing_is_said(world):
    with flash3.gpu(None):
        assert takes() == (False, [])


@pytest.mark.parametrize("text, version, words", [
    ("import no_such_module", "3.0.0", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("raise OSError('libcudart.so.12: cannot\\nopen')", "3.0.0", "OSError: libcudart.so.12: cannot"),
    ("import os; os.no_such_name", "3.0.0", "AttributeError: module 'os' has no attribute 'no_such_name'"),
    ("", "3.0.0", "RuntimeError: Module 'flash_attn_interface' does not expose FA3 forward kernels"),
    (flash3.PACKAGE, "3.0.0b1", "flash_attn_3 3.0.0b1 may add up in any order, so install 3.0.0 or newer"),
])
@pytest.mark.parametrize("saved", [None, {"settings": {"flash_attention_3": True}}])
def test_a_package_that_is_of_no_use_is_one_sentence(tmp_path, world, text, version, words, saved):
    with flash3.gpu(flash3.install(tmp_path, text, version)):
        assert takes(saved=saved) == (False, [f"WARNING: FlashAttention 3 is not used: {words}"])
        assert not flash3.active()


def test_a_torch_without_the_switch(tmp_path, world, monkeypatch):
    with flash3.gpu(flash3.install(tmp_path)):
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
        taken, [said] = takes()
        assert not taken and "has no attribute 'activate_flash_attention_impl'" in said


def setting(out) -> bool:
    """What config.json and the newest checkpoint record."""
    recorded = json.loads((out / "config.json").read_text())["settings"]["flash_attention_3"]
    assert ddp_utils.read_checkpoint(list_checkpoints(out)[0])["settings"]["flash_attention_3"] is recorded
    return recorded


CHANGED = "resuming with flash_attention_3 False (was True)"


def test_a_run_stays_with_it_and_says_where_it_is_missing(tmp_path, shards):
    with flash3.gpu(flash3.install(tmp_path / "package")):
        done = RUN.train(0, shards, tmp_path / "run")
        assert done.code == 0 and PLAN in done.out and setting(tmp_path / "run"), done.out
        assert not flash3.active()
        done = RUN.train(0, shards, tmp_path / "run", steps=10)
        assert done.code == 0 and PLAN in done.out and setting(tmp_path / "run"), done.out
        assert "flash_attention_3" not in done.out
        for flags in (["--eval-only"], ["--prompt", "def", "--max-new-tokens", "2"], ["--export"]):
            done = RUN.here("--out", tmp_path / "run", *flags)
            assert done.code == 0 and "FlashAttention" not in done.out, done.out
    with flash3.gpu(None):
        done = RUN.train(0, shards, tmp_path / "run", steps=12)
        assert done.code == 0 and CHANGED in done.out and PLAN not in done.out, done.out
        assert not setting(tmp_path / "run")


@pytest.mark.parametrize("old", [False, True])
def test_a_run_stays_without_it(tmp_path, shards, old):
    """Also one of before there was the setting."""
    with flash3.gpu(None):
        done = RUN.train(0, shards, tmp_path / "run")
        assert done.code == 0 and "FlashAttention" not in done.out and not setting(tmp_path / "run"), done.out
    copy_of_the_first_half(tmp_path / "run", tmp_path / "half")
    if old:
        path = list_checkpoints(tmp_path / "half")[0]
        content = torch.load(path, weights_only=True)
        del content["settings"]["flash_attention_3"]
        torch.save(content, path)
    with flash3.gpu(flash3.install(tmp_path / "package")):
        done = RUN.train(0, shards, tmp_path / "half")
        assert done.code == 0 and "after step 4 from" in done.out, done.out
        assert "FlashAttention" not in done.out and "flash_attention_3" not in done.out, done.out
        assert not setting(tmp_path / "half")
        assert_same_run(tmp_path / "run", tmp_path / "half")
        new = RUN.train(0, shards, tmp_path / "new")  # as a new one does not
        assert new.code == 0 and PLAN in new.out


def test_an_error_gives_torch_its_own_kernels_back(tmp_path, shards, monkeypatch):
    class Mistake(Exception):
        pass

    def fail(*_):
        assert flash3.active()
        raise Mistake

    monkeypatch.setattr(ddp_utils, "seed_step", fail)
    with flash3.gpu(flash3.install(tmp_path / "package")):
        with pytest.raises(Mistake):
            train_gpt2.main(RUN.flags(shards, tmp_path / "run"))
        assert not flash3.active()
