"""loggers/mfu.py: the peaks of GPUs, and the FLOPs of a step."""

from types import SimpleNamespace

import pytest
import torch
from states import flags_of

import train_gpt2
import train_hrm
import train_mlm
from cli.flags import flags_of_model
from loggers.mfu import MFU, examples_of, flops_per_token, peak_flops
from model import GPT2, HRM, MLM

MODELS = {HRM: train_hrm, GPT2: train_gpt2, MLM: train_mlm}


@pytest.mark.parametrize("name, tflops", [
    ("A100-SXM4-80GB", 312), ("H100 80GB HBM3", 989), ("H100 PCIe", 756), ("H100 NVL", 835), ("H200", 989),
    ("H200 NVL", 835), ("B200", 2250), ("GeForce RTX 4090", 165.2), ("GeForce RTX 3090", 71),
    ("GeForce RTX 4090 Laptop GPU", None), ("GeForce RTX 3090 Ti", None), ("RTX A1000", None),
    ("GH200 480GB", None)])
def test_peaks(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {name}")
    said = []
    assert peak_flops(torch.device("cuda", 0), said.append) == (tflops and pytest.approx(tflops * 1e12))
    assert [name in text for text in said] == [True] * (tflops is None)
    assert peak_flops(torch.device("cpu"), said.append) is None


@pytest.mark.parametrize("family, changes, example, expected", [
    (HRM, {}, {"bp_steps": 3}, 55_148_544),
    # the first call with a graph starts from a constant: its first product needs one gradient less
    (HRM, {}, {"bp_steps": 2}, 52_789_248 - 2 * 4 * 128**2),
    (HRM, {"halt": True}, {"cycles": 1}, pytest.approx(52_789_248, 1e-4)), (GPT2, {}, {}, 44_924_928),
    (GPT2, {"modern": True}, {}, 45_711_360), (MLM, {}, {"mask_rate": 0.25}, 13_811_712)], ids=str)
def test_flops_are_those_of_a_formula(family, changes, example, expected):
    """By hand: 2 for each weight and token in each stack call, twice that again in calls with a graph, and
    attention as full T x T, in local layers too.
    """
    args = flags_of(MODELS[family], ["--size", "tiny"])
    config = family.Config(**flags_of_model(family.Config, args) | {"seq_len": args.seq_len} | changes)
    assert flops_per_token(family, config, **example) == expected


def test_the_mfu_of_a_record(monkeypatch):
    """It is the mean over the depths that a record stands for; what cannot be counted is said once."""
    hrm = HRM(HRM.Config(n_layer=1, n_head=1, d_model=16, ff=16, least_cycles=1, h_cycles=3))
    assert examples_of(hrm, {"bp_steps": 5}) == [{"bp_steps": 5, "cycles": n} for n in (1, 2, 3)]
    said = []
    run = SimpleNamespace(world=SimpleNamespace(device=None, world_size=2), say=said.append, model_class=HRM,
                          flops_factor=3.0)
    monkeypatch.setattr("loggers.mfu.peak_flops", lambda device, say: 600.0)
    mfu = MFU(run, hrm, {"bp_steps": 5})
    mfu._count = lambda bp_steps, cycles: 10.0 * cycles
    assert mfu({"tokens_per_sec": 40.0}) == 20 * 3 * 20 / 600
    mfu._count = None
    assert mfu({"tokens_per_sec": 40.0}) is mfu({"tokens_per_sec": 40.0}) is None and len(said) == 1
