"""--dry-run (startup/dry_run.py): what blocks keep for the backward pass, and what fits a machine."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from many_runs import TRAINERS
from states import flags_of
from tiny_models import BUILDS

import startup.run
import train_gpt2
import train_hrm
from cli.errors import UserError
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2, HRM, use_device
from ops import attention
from ops.device import compute_dtype
from prepare.pipeline import prepare
from startup import dry_run
from startup.run import resolve_flags

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # the GPU is not touched
LARGER = {"seq_len": 64, "n_head": 4, "d_model": 64}


def counted(model, device, mode: str, compiled=False) -> int:
    inputs = model.dummy_inputs(4, CPU)
    return dry_run.kept_for_backward(type(model), model.config, device, torch.bfloat16, mode, inputs,
                                     compiled)


@pytest.mark.parametrize("name, mode, queries", [  # attention in blocks, and at once
    ("gpt2", "none", 32), ("gpt2", "block", 256), ("mlm", "selective", 32), ("mlm", "none", 256),
    ("hrm", "block", 32), ("hrm", "selective", 256)])
def test_what_autograd_really_keeps_is_counted(name, mode, queries, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", queries)
    model = BUILDS[name](**LARGER)
    found, inputs = counted(model, CPU, mode), model.dummy_inputs(4, CPU)
    use_device(model, CPU, torch.bfloat16, mode)
    kept = dry_run.activation_bytes(lambda: model(**inputs)[0], [*model.parameters(), *model.buffers()])
    assert found == kept > 4 * 64 * 64 * 2


@pytest.mark.full
@pytest.mark.parametrize("name, mode", [("hrm", "none"), ("gpt2", "selective"), ("mlm", "block")])
def test_compiled_blocks_keep_what_is_counted(name, mode):
    """Against what autograd saves in blocks that Inductor has compiled."""
    model = BUILDS[name](**LARGER)
    use_device(model, CPU, torch.bfloat16, mode, dynamic=False)
    sizes, known = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def seen(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        model(**model.dummy_inputs(4, CPU))[0]
    torch.compiler.reset()  # Dynamo gives up on a block of which it has compiled many variants
    assert counted(model, CPU, mode, True) == pytest.approx(sum(sizes.values()), rel=0.1)
    torch.compiler.reset()


@pytest.mark.full
@pytest.mark.parametrize("size", ["350m", "1b"])
def test_the_sizes_have_the_fastest_checkpointing_that_fits_into_80_gb(size):
    text = TRAINERS["hrm"].here("--size", size, "--dry-run", "8x80").out
    assert re.search(r"recompute +(\w+)", text)[1] == re.search(r"fastest first: (\w+)", text)[1], text


def test_dropout_does_not_count_what_only_a_cpu_keeps():
    without, with_dropout = ([counted(BUILDS["gpt2"](dropout=dropout), GPU, mode)
                              for mode in ("none", "selective", "block")] for dropout in (0.0, 0.1))
    assert without == with_dropout == sorted({*without}, reverse=True)


def test_what_fits_is_said():
    """With the size of a checkpoint and the precision of the device."""
    texts = [TRAINERS["gpt2"].here("--size", "gpt2", "--n-layer", "2", "--no-compile", "--tokenizer",
                                   "bpe:4096", "--data", "c4", "--dry-run", *asked).out
             for asked in (["8x0.1"], ["8x0.7"], ["8x80"], ["--device", "cpu"])]
    last = [text.splitlines()[-1] for text in texts[:3]]
    assert [line.endswith("ddp fits.") for line in last] == [False, False, True]
    assert ["--batch" in line for line in last] == [False, True, False]
    parameters = int(re.search(r"\n +parameters +([\d,]+)", texts[2])[1].replace(",", ""))
    here = str(compute_dtype("auto", CPU)).removeprefix("torch.")
    for text, precision in zip(texts[2:], ("bfloat16", here)):
        assert f" {12 * parameters / 1e9:.2f} GB" in text and f"precision   {precision}\n" in text


def test_fragmentation_takes_more_on_a_cpu():
    assert [dry_run.fits({"together": 0.9e9}, 1.0, device) for device in (GPU, CPU)] == [True, False]


@pytest.mark.parametrize("gigabytes, mode, fitting, advised", [
    (80, "selective", ": none, selective", "fits"), (0.5, "selective", ": selective", ""),
    (0.5, "none", ": selective", "--batch 2 or --checkpoint-activations selective"),
    (80, "auto", ": none, selective", "fits"), (0.5, "auto", ": selective", "fits"),
    (0.12, "auto", "", "--batch 4 or"), (0.01, "none", "", "zero3 with --checkpoint-activations block")])
def test_each_recomputation_that_fits_is_named(monkeypatch, gigabytes, mode, fitting, advised):
    """With 1 GB of activations without any, 0.1 with `selective`; `block` cannot be counted."""
    kept, said = {"none": 1e9, "selective": 1e8}, []
    monkeypatch.setattr(dry_run, "kept_for_backward", lambda *given: kept[given[4]])
    monkeypatch.setattr(dry_run, "machine", lambda *_: (1, gigabytes))
    flags = f"--data stdlib --tokenizer bytes --dry-run 1x1 --checkpoint-activations {mode}"
    flags = flags_of(train_gpt2, flags.split())
    dry_run.dry_run(GPT2, flags, said.append)
    assert said[-2].endswith(fitting) and advised in said[-1]
    assert mode != "auto" or flags.checkpoint_activations == ("none" if gigabytes == 80 else "selective")


@pytest.mark.parametrize("gigabytes, mode", [(24, "block"), (40, "block"), (80, "block"), (141, "selective"),
                                             (200, "none")])
def test_a_run_takes_the_fastest_that_fits(monkeypatch, gigabytes, mode):
    """HRM 1b with 64 activations at a time, of 153, 96 and 27 GB. Without GPUs it's that of the size."""
    kept = {"none": 134e9, "selective": 77e9, "block": 9e9}
    monkeypatch.setattr(dry_run, "kept_for_backward", lambda *given: kept[given[4]])
    run = SimpleNamespace(model_class=HRM, world=SimpleNamespace(device=GPU))
    flags = "--size 1b --data stdlib --tokenizer bytes".split()
    assert flags_of(train_hrm, flags).checkpoint_activations == "block"
    for module in (dry_run, startup.run):
        monkeypatch.setattr(module, "uses_gpus", lambda args: True)
    monkeypatch.setattr(dry_run, "machine", lambda *_: (8, 0))
    run.args = flags_of(train_hrm, flags)
    _, taken, needs = dry_run.before_data(run, {}, gigabytes)
    assert taken == mode and re.fullmatch("none needs .* GB, selective needs .* GB, block needs .* GB", needs)


def test_a_resumed_run_keeps_what_it_recomputes(monkeypatch, shards, tmp_path):
    """Also where another mode would be faster by now, because compiled modes round differently on GPUs."""
    done = TRAINERS["hrm"].train(0, shards, tmp_path, steps=1, checkpoint_activations="selective")
    assert done.code == 0, done.out
    path, = list_checkpoints(tmp_path)
    monkeypatch.setattr(startup.run, "uses_gpus", lambda args: True)
    for given, mode in ("", "selective"), ("auto", "selective"), ("none", "none"):
        flags = ["--checkpoint-activations", given] if given else []
        command = train_hrm.parse_args(flags)
        saved = read_checkpoint(path) | {"path": str(path), "tokenizer_flag": None}
        assert resolve_flags(command, saved).checkpoint_activations == mode
        assert resolve_flags(command).checkpoint_activations == (given or "auto")


def test_memory_is_asked_before_data_are_prepared(monkeypatch, tmp_path, corpus, capsys):
    """On GPUs alone. What fits is said; only what is far from it is refused,
    but not if the data are there."""
    monkeypatch.chdir(tmp_path)
    data = f"text:{corpus}"
    flags = ("--size", "tiny", "--no-compile", "--tokenizer", "bytes", "--data", data)

    def ask(share: float, *more, device=GPU) -> str:
        run = SimpleNamespace(args=flags_of(train_gpt2, [*flags, *more]), model_class=GPT2,
                              world=SimpleNamespace(device=device))
        assert dry_run.before_data(run, {}, needed / share)[0] > 20e5
        return capsys.readouterr().out

    needed = dry_run.dry_run(GPT2, flags_of(train_gpt2, [*flags]), str, 100)[0] * 100
    assert not ask(0.5) and "120%" in ask(1.2)
    with pytest.raises(UserError, match="140%.* --batch"):
        ask(1.4)
    assert not ask(1.4, device=CPU) and not ask(1.4, "--eval-only") and not ask(1.4, "--batch", "1")
    prepare(data, None, "bytes")
    capsys.readouterr()
    assert "900%" in ask(9) and not ask(0.5)


def test_a_trainer_asks_before_it_prepares(monkeypatch, tmp_path, corpus):
    monkeypatch.setattr(startup.run, "before_data", mock.Mock(side_effect=UserError("asked")))
    monkeypatch.chdir(tmp_path)
    done = TRAINERS["gpt2"].train(0, f"text:{corpus}", "run", tokenizer="bytes")
    assert "asked" in done.out and not [*tmp_path.iterdir()], done.out
