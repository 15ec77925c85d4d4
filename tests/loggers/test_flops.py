"""FLOPs per token are those of a formula."""

import pytest
from states import flags_of

import train_gpt2
import train_hrm
import train_mlm
from cli.flags import flags_of_model
from loggers.mfu import flops_per_token
from model import GPT2, HRM, MLM

MODELS = {HRM: train_hrm, GPT2: train_gpt2, MLM: train_mlm}


@pytest.mark.parametrize("family, size, changes, example, expected", [
    (HRM, "tiny", {}, {"bp_steps": 3}, 55_148_544), (HRM, "tiny", {}, {"bp_steps": 8}, 66_945_024),
    # the first call with a graph starts from a constant: its first product needs one gradient less
    (HRM, "tiny", {}, {"bp_steps": 2}, 52_789_248 - 2 * 4 * 128**2),
    (HRM, "puzzle", {}, {"cycles": 4}, 48_070_656),
    (HRM, "tiny", {"halt": True}, {"cycles": 1}, 52_789_248), (GPT2, "tiny", {}, {}, 44_924_928),
    (GPT2, "tiny", {"modern": True}, {}, 45_711_360), (MLM, "tiny", {}, {"mask_rate": 0.25}, 13_811_712),
    pytest.param(MLM, "base", {}, {"mask_rate": 0.25}, 824_426_496, marks=pytest.mark.full)], ids=str)
def test_flops_are_those_of_a_formula(family, size, changes, example, expected):
    """By hand: 2 for each weight and token in each stack call, twice that again in calls with a graph, and
    attention as full T x T, in local layers too.
    """
    args = flags_of(MODELS[family], ["--size", size])
    config = family.Config(**flags_of_model(family.Config, args) | {"seq_len": args.seq_len} | changes)
    assert flops_per_token(family, config, **example) == pytest.approx(expected, rel=1e-4 * config.halt
                                                                       if family is HRM else 0)
