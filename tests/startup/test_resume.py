"""What a run keeps when it resumes, takes from the new command, and refuses."""

import re
from argparse import Namespace
from dataclasses import asdict

import pytest

import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from cli.flags import flag_fields
from model import HRMConfig
from startup.resume import (
    FIXED,
    FREE_FIELDS,
    LIMITS,
    NEW,
    PLANNED,
    compare_with_saved,
    shape_from_record,
)

SETTINGS = {"data": "text:a", "init_from": "base", "trainer": "train_gpt2.py", "optimizer": "adamw",
            "ema": 0.9, "seed": 0, "lr": 1.0, "batch": 4, "out": "run",
            "max_samples": None, "steps": 4, "BETA": 1, "log_every": 1}
IDENTITY = {"tokenizer": "bytes (111111)", "data": "1" * 64, "loss_on": "all", "seq_len": 8, "torch": "2"}


def compared(branch: bool = False, saved=(), settings=(), step: int = 2, given=(),
             **identity) -> list[tuple]:
    """The name, value and old value of what a resume says, which changes `settings` or the `identity`."""
    said = []
    before = {"path": "run/step.pt", "step": step, "settings": SETTINGS | dict(saved)} | IDENTITY
    now = IDENTITY | {"settings": before["settings"] | dict(settings)} | identity
    compare_with_saved(before, now, branch, said.append, given)
    return [re.fullmatch(r"resuming with (\S+) (\S+)(?: \(was (.*)\)|.*)", text).groups() for text in said]


@pytest.mark.parametrize("change, said", [
    ({}, None), ({"settings": {"lr": 2.0}}, ("lr", "2.0", "1.0")),
    ({"settings": {"init_from": "base/"}}, ("init_from", "base/", "base")),
    ({"settings": {"max_samples": 9}}, ("max_samples", "9", "None")),
    ({"saved": {"max_samples": 150}}, ("max_samples", "150,", None)),  # said again
    ({"settings": {"out": "other", "new_flag": 1}}, None),
    ({"settings": {"trainer": "mine.py"}, "branch": True}, ("trainer", "mine.py", "train_gpt2.py")),
    ({"tokenizer": "another name (111111)"}, None)])
def test_what_may_change_is_said(change, said):
    assert compared(**change) == ([said] if said else [])


@pytest.mark.parametrize("change, named", [
    ({"tokenizer": "gpt2 (222222)"}, ["bytes (111111)", "gpt2 (222222)", "--out"]),
    ({"data": "2" * 64, "settings": {"data": "text:b"}}, ["text:a (111111111111)", "text:b (222222222222)"]),
    ({"settings": {"ema": 0.0}}, ["ema 0.9", " 0.0"]), ({"seq_len": 16}, ["seq_len 8", " 16"]),
    ({"settings": {"seed": 1}}, ["seed 0", " 1"]),
    ({"loss_on": "response"}, ["loss_on all"]),
    ({"saved": {"init_from": None}, "settings": {"init_from": "base"}}, ["init_from None", "base"]),
    ({"settings": {"trainer": "mine.py"}}, ["mine.py", "--resume run/step.pt"])])
def test_what_may_not_change_is_named_with_a_way_on(change, named):
    """--init-from is no way to another tokenizer."""
    with pytest.raises(UserError) as problem:
        compared(**change)
    text = str(problem.value)
    assert all(part in text for part in named) and "run/step.pt" in text, text
    assert ("--init-from run/step.pt" in text) == ("tokenizer" not in change), text


@pytest.mark.parametrize("name, named", [
    ("lr", "--lr 2"), ("BETA", "BETA 2"), ("log_every", None), ("steps", None)])
def test_a_finished_run_refuses_what_it_can_no_longer_learn_with(name, named):
    change = {"settings": {name: 2}, "given": [name]}
    assert compared(**change, step=1)
    if not named:
        assert compared(**change, step=4)
        return
    with pytest.raises(UserError, match=f"{named}.*--out.*--steps 8"):
        compared(**change, step=4)


HRM = asdict(HRMConfig(vocab_size=257, padded_vocab=320, seq_len=32, d_model=32, n_head=2, n_layer=1, ff=64,
                       h_cycles="2:3", l_cycles=1, init="published"))


def shape(config: dict, resumed: bool = True, **given) -> dict:
    command = Namespace(config_class=HRMConfig, given=given)
    return shape_from_record(command, {"path": "run", "model_config": config}, resumed)


@pytest.mark.parametrize("name, value", [("d_model", 64), ("h_cycles", "3"), ("init", "identity")])
def test_a_shape_that_is_contradicted_is_named(name, value):
    with pytest.raises(UserError, match=f"^run .*{name} {HRM[name]}.* {value}:"):
        shape(HRM, **{name: value})


def test_a_run_keeps_its_shape():
    """Weights to start from keep it, too, but take another --attention and --init."""
    kept = shape(HRM, dropout=0.5, bp_cycles=2, d_model=32, h_cycles="2:3", init="published")
    assert (kept["d_model"], kept["h_cycles"], kept["init"]) == (32, 3, "published")
    fields = {field.name for field in flag_fields(HRMConfig)}
    assert kept.keys() == fields - {*FREE_FIELDS, "seq_len"}
    assert shape(HRM, False, init="identity", attention="causal").keys() == kept.keys() - {
        "init", "attention"}
    without = {name: value for name, value in HRM.items() if name != "qk_norm"}  # as older weights
    assert "qk_norm" in shape(without) and "qk_norm" not in shape(without, False)


def test_each_flag_that_has_a_kind_exists():
    """A name that isn't listed has a kind, too, so a misspelt one would go unnoticed."""
    known = {name for module in (train_gpt2, train_hrm, train_mlm) for name in module.parse_args([]).defaults}
    assert {*NEW, *PLANNED, *FIXED, *FREE_FIELDS, *LIMITS} - known == {
        "wanted_batch", "largest_batch", "loss_on", "trainer"}
