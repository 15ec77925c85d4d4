"""Where a run starts and ends: main() in a notebook or a script, flags, values that no machine can serve, the
memory that is estimated, the plan and the last lines.
"""

import argparse
import ctypes
import gc
import importlib.util
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from many_runs import TRAINERS
from processes import fork
from runs import Trainer, assert_same_run, module_of, steps_of
from states import flags_of, make_state, world  # noqa: F401

import ddp_utils
import startup.run
import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from ddp_utils import STOP_SIGNALS
from model import GPT2, HRM, MLM, ConfigError, use_device
from ops import attention, device
from ops.device import compute_dtype
from prepare.pipeline import prepare
from startup import dry_run
from startup.plan import say_plan, what_next

MODULES = [train_gpt2, train_hrm, train_mlm]
CPU = torch.device("cpu")


# -------------------------------------------------------------------------------------- notebooks and scripts

@pytest.mark.parametrize("script", ["train_gpt2.py", *(pytest.param(name, marks=pytest.mark.full)
                                                       for name in ("train_hrm.py", "train_mlm.py"))])
def test_main_can_be_called_again(tmp_path, shards, script, monkeypatch):
    """With a list of flags, after a mistake, after an interrupt in the middle of a step, to use the run."""
    module = module_of(script)
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel-1.json"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing would take half of the time
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a test before may have set it
    flags = Trainer(script).flags(shards, tmp_path / "run", steps=4)

    def state() -> list:
        return [*map(signal.getsignal, STOP_SIGNALS), sys.excepthook, gc.get_freeze_count(),
                torch.distributed.is_initialized(), os.environ.get("GLOO_SOCKET_IFNAME")]

    before, step = state(), ddp_utils.seed_step

    def interrupted(seed, number, rank):
        if number == 6:
            assert not any(a == b for a, b in zip(state()[-4:], before[-4:]))  # the control
            raise KeyboardInterrupt
        step(seed, number, rank)

    monkeypatch.setattr(ddp_utils, "seed_step", interrupted)
    held = []  # its traceback keeps the frames, as a notebook does
    for added, error in (([], None), (["--n-layer", "x"], UserError), (["--seq-len", "16"], UserError),
                         (["--steps", "8"], KeyboardInterrupt), (["--steps", "8"], None),
                         (["--eval-only"], None)):
        try:
            module.main([*flags, *added])
            assert error is None
        except (UserError, KeyboardInterrupt) as found:
            assert type(found) is error
            held.append(found)
            monkeypatch.setattr(ddp_utils, "seed_step", step if len(held) == 3 else interrupted)
        assert state() == before
    assert steps_of(tmp_path / "run")[-1]["step"] == 8


SCRIPT = """
import sys
import torch
import train_gpt2
from cli.errors import UserError
*flags, first, second = sys.argv[1:]
for out in (first, second, first):
    try:
        train_gpt2.main(["--no-such-flag"])
    except UserError:
        train_gpt2.main([*flags, "--out", out])  # while sys.exc_info() still has the mistake
    assert not torch.distributed.is_initialized()
print("goes on")
"""


def test_a_script_calls_main_on_several_processes(tmp_path, shards):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = TRAINERS["gpt2"].flags(shards, tmp_path / "a", steps=2)
    done = fork(2, tmp_path / "script.py", *flags, tmp_path / "a", tmp_path / "b")
    assert done.code == 0 and done.out.count("goes on") == 2, done.out
    assert_same_run(tmp_path / "a", tmp_path / "b")


# ------------------------------------------------------------------------------------------- flags and values

OURS = {
    "steps": "max-steps max_steps max-iters num-steps iters step",
    "batch": "batch-size per_device_train_batch_size",
    "global-batch": "train-batch-size global-batch-size",
    "lr": "learning-rate learning_rate",
    "min-lr": "min_lr min-lr-ratio",
    "out": "output-dir out_dir",
    "grad-accum": "gradient-accumulation-steps",
    "precision": "dtype mixed-precision bf16",
    "weight-decay": "wd",
    "d-model": "n_embd hidden-size",
    "data": "dataset",
    "init-from": "model-name-or-path",
}


def test_spellings_of_other_programs_lead_to_our_flags():
    ways = [(f"--{other}=3", rf"--{other} \(.*--{ours}\b") for ours in OURS for other in OURS[ours].split()]
    for flag, named in [*ways, *((far, f"{far}; --help-all") for far in ("--zebra", "two", "-x"))]:
        with pytest.raises(UserError, match=named):
            train_gpt2.parse_args(["--lr", "1", flag])


@pytest.mark.parametrize("module", MODULES)
def test_a_row_of_your_own(module, monkeypatch):
    """An unknown key is refused by name. A flag wins over the row, and the row over the default."""
    row = dict(module.SIZES["tiny"])
    for rows in (module.SIZES, getattr(module, "RECIPES", module.SIZES)):
        monkeypatch.setitem(rows, "mine", row)
    for key in ("weight-decay", "grad_clipp"):
        row[key] = 1.0
        with pytest.raises(UserError, match=f"mine .* {key}"):
            flags_of(module, ["--size", "mine"])
        del row[key]
    row["weight_decay"] = 0.05
    for flags, decay in (([], 0.1), (["--size", "mine"], 0.05),
                         (["--size", "mine", "--weight-decay", "0.01"], 0.01)):
        assert flags_of(module, flags).weight_decay == decay


@pytest.mark.parametrize("module, flags, error, named", [
    *((train_hrm, f"{flag} 100000000", ConfigError, "[0-9,]+ blocks.*--n-layer.*100,000")
      for flag in ("--h-cycles 4:", "--l-cycles", "--eval-cycles", "--n-layer")),
    *((module, "--n-layer 100000000", ConfigError, "--n-layer") for module in (train_gpt2, train_mlm)),
    (train_gpt2, "--d-model 33", ConfigError, "--d-model 33"),
    (train_gpt2, "--global-batch 100000000", UserError, "--global-batch"),
    (train_gpt2, "--batch 4 --grad-accum 100000000", UserError, "--grad-accum"),
    (train_gpt2, "--global-batch 1000000000000 --batch 1000000000000", UserError, "--batch")])
def test_values_that_no_machine_can_serve(module, flags, error, named, shards, tmp_path):
    """They are refused at once: not after hours of building or adding up."""
    with pytest.raises(error, match=named):
        module.main([*flags.replace(": ", ":").split(), "--data", str(shards), "--out", str(tmp_path)])
    assert error is UserError or not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------ the process

FAULTS = """
import resource
import torch
import ddp_utils
for kept in (False, True):
    if kept:
        ddp_utils.init(device="cpu")
    for i in range(60):
        if i == 50:  # until then small blocks can take what a tensor has freed
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10**7)  # 40 MB, freed at once; glibc itself keeps blocks up to 32 MiB
    print("faults:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_kept_for_the_next_tensors(tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    without, kept = map(int, re.findall(r"faults: (\d+)", fork(0, tmp_path / "faults.py").out))
    assert 10 * kept < without


def test_compiled_blocks_use_the_libdevice_of_triton(tmp_path, monkeypatch):
    """Otherwise torch warns four times a run, and nodes with a CUDA toolkit may round otherwise."""
    path = tmp_path / "backends/nvidia/lib/libdevice.10.bc"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(os, "environ", {})
    for installed in (None, SimpleNamespace(origin=str(tmp_path / "__init__.py"))):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=installed: found)
        device.use_libdevice_of_triton()
        assert os.environ == ({"TRITON_LIBDEVICE_PATH": str(path)} if installed else {})


# ---------------------------------------------------------------------------------- memory that is estimated

@pytest.mark.parametrize("model_class, example, mode, queries", [  # attention in blocks, and at once
    (GPT2, {}, "none", 32), (GPT2, {}, "block", 256), (MLM, {}, "selective", 32), (MLM, {}, "none", 256),
    (HRM, {"bp_steps": 3}, "block", 32), (HRM, {"bp_steps": 3}, "selective", 256)])
def test_what_autograd_really_keeps_is_counted(model_class, example, mode, queries, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", queries)
    shape = {"vocab_size": 500, "padded_vocab": 512, "seq_len": 64, "n_layer": 2, "n_head": 2, "d_model": 32}
    model = model_class(model_class.Config(**shape))
    inputs = model.dummy_inputs(4, "cpu", **example)
    counted = dry_run.kept_for_backward(model_class, model.config, CPU, torch.bfloat16, mode, inputs,
                                        compiled=False)
    use_device(model, CPU, torch.bfloat16, mode)
    kept = dry_run.activation_bytes(lambda: model(**inputs)[0], [*model.parameters(), *model.buffers()])
    assert counted == kept > 4 * 64 * 32 * 2


OF = ("--size", "gpt2", "--n-layer", "2", "--no-compile", "--tokenizer")


def test_what_fits_is_said():
    """With the size of a checkpoint and the precision of the device."""
    texts = [TRAINERS["gpt2"].here(*OF, "bpe:4096", "--data", "c4", "--dry-run", *asked).out
             for asked in (["8x0.1"], ["8x0.7"], ["8x80"], ["--device", "cpu"], ["8"])]
    last = [text.splitlines()[-1] for text in texts[:3]]
    assert [line.endswith("ddp fits.") for line in last] == [False, False, True]
    assert ["--batch" in line for line in last] == [False, True, False] and "8x141" in texts[4]
    parameters = int(re.search(r"\n +parameters +([\d,]+)", texts[2])[1].replace(",", ""))
    here = str(compute_dtype("auto", CPU)).removeprefix("torch.")
    for text, precision in zip(texts[2:4], ("bfloat16", here)):
        assert f" {12 * parameters / 1e9:.2f} GB" in text and f"precision   {precision}\n" in text


def test_fragmentation_takes_more_on_a_cpu():
    fit = [dry_run.fits({"together": 0.9e9}, 1.0, torch.device(device)) for device in ("cuda", "cpu")]
    assert fit == [True, False]


def run_of(*flags: str, device: str = "cuda") -> SimpleNamespace:
    world = SimpleNamespace(is_rank0=True, device=torch.device(device))
    return SimpleNamespace(args=flags_of(train_gpt2, [*flags]), model_class=GPT2, world=world)


@pytest.mark.parametrize("gigabytes, mode, fitting, advised", [
    (80, "selective", ": none, selective", "fits"), (0.5, "selective", ": selective", ""),
    (0.5, "none", ": selective", "--batch or --checkpoint-activations selective"),
    (0.01, "none", "", "zero3 with --checkpoint-activations block")])
def test_each_recomputation_that_fits_is_named(monkeypatch, gigabytes, mode, fitting, advised):
    """With 1 GB of activations without any, 0.1 with `selective`; `block` cannot be counted."""
    kept, said = {"none": 1e9, "selective": 1e8}, []
    monkeypatch.setattr(dry_run, "kept_for_backward", lambda *given: kept[given[4]])
    monkeypatch.setattr(dry_run, "machine", lambda *_: (1, gigabytes))
    flags = "--data stdlib --tokenizer bytes --checkpoint-activations".split()
    dry_run.dry_run(GPT2, run_of(*flags, mode).args, said.append)
    assert said[-2].endswith(fitting) and advised in said[-1]


def test_memory_is_asked_before_data_are_prepared(monkeypatch, tmp_path, corpus, capsys):
    """On GPUs alone. What fits is said; only what is far from it is refused, never if the data are there."""
    monkeypatch.chdir(tmp_path)
    flags = ("--size", "tiny", "--no-compile", "--tokenizer", "bytes", "--data", f"text:{corpus}")

    def ask(share: float, *more, device: str = "cuda") -> str:
        monkeypatch.setattr(dry_run, "machine", lambda *_: (1, needed / share))
        assert dry_run.before_data(run_of(*flags, *more, device=device), {}) > 20e5
        return capsys.readouterr().out

    monkeypatch.setattr(dry_run, "machine", lambda *_: (1, 100))
    needed = dry_run.dry_run(GPT2, run_of(*flags).args) * 100
    assert capsys.readouterr()
    assert not ask(0.5) and "120%" in ask(1.2)
    with pytest.raises(UserError, match="140%.* --batch"):
        ask(1.4)
    assert not ask(1.4, device="cpu") and not ask(1.4, "--eval-only") and not ask(1.4, "--batch", "1")
    with monkeypatch.context() as patch:  # one of your own has other arguments
        patch.setattr(GPT2, "dummy_inputs", lambda self, batch, device, weights: None)
        assert not ask(9) and not (tmp_path / "shards").exists()
    prepare(f"text:{corpus}", None, "bytes")
    capsys.readouterr()
    assert not ask(9)


def test_a_trainer_asks_before_it_prepares(monkeypatch, tmp_path, corpus):
    monkeypatch.setattr(startup.run, "before_data", mock.Mock(side_effect=UserError("asked")))
    monkeypatch.chdir(tmp_path)
    done = TRAINERS["gpt2"].train(0, f"text:{corpus}", "run", tokenizer="bytes")
    assert done.code == 2 and "asked" in done.out and not [*tmp_path.iterdir()], done.out


# ------------------------------------------------------------------------------ the plan and the last lines

@pytest.mark.parametrize("loss, warned", [("all", True), ("response", False)])
def test_the_plan_of_a_run(world, loss, warned):
    """A small text is warned of, but not small pairs: a few learned tokens need many passes."""
    said, state = [], make_state(world)
    unused = "precision checkpoint_activations strategy compile fast backend epochs".split()
    settings = dict.fromkeys(unused) | {"size": "tiny", "seq_len": 8, "eval_batches": 0, "eval_batch": 16,
                                        "warmup": 30}
    train = SimpleNamespace(rows=60, num_tokens=480)
    dataset = SimpleNamespace(train=train, val={}, val_splits=set(), short={}, manifest={}, name="d" * 90,
                              loss=loss)
    run = SimpleNamespace(world=world, dataset=dataset, say=said.append, size_defaults={},
                          steps=300, global_batch=16, batch=8, grad_accum=2)
    state.model.__class__ = type("FSDPHRM", (HRM,), {})  # as in shards
    say_plan(run, state, SimpleNamespace(settings=settings, val_tokens=0, entropy=3.0), "run directory",
             Counter(["a GPU"]), True)
    plan, *after = said
    assert any(" 80 times" in text for text in after) == warned
    for row in ("size        HRM tiny", "parameters  7,680, 5,632 of them in 2 blocks",
                "batch       8 x accumulation 2 x processes 1 = 16 sequences",
                "steps       300, 3.8 an epoch", "tokens      128 a step, 38,400 in all"):
        assert f"\n  {row}" in plan
    assert [line for line in plan.splitlines() if len(line) > 80] == [14 * " " + "d" * 90]


@pytest.mark.parametrize("trainer, args, pairs, vocab_size, use", [
    ("train_gpt2.py", {}, -1, None, "--prompt The"), ("train_gpt2.py", {}, 256, None, "--chat"),
    ("train_mlm.py", {"fill": None}, -1, None, "--fill 'The [MASK] sat.'"),
    ("mine/train_own.py", {}, -1, 64, "--eval-only")])
def test_the_end_of_a_run_names_what_comes_next(tmp_path, monkeypatch, trainer, args, pairs, vocab_size,
                                                use):
    """Commands for this model that can be pasted into this directory."""
    monkeypatch.chdir(tmp_path)
    dataset = SimpleNamespace(marker_ids={"response": pairs}, vocab_size=vocab_size)
    run = SimpleNamespace(out=Path("my runs/one"), trainer=tmp_path / trainer, command="torchrun again",
                          dataset=dataset, args=argparse.Namespace(**args))
    for again in ([], ["  torchrun again"]):
        assert what_next(run, bool(again)).splitlines()[1:] == [
            f"  python {trainer} --out 'my runs/one' {use}", *again]
