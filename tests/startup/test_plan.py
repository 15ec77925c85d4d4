"""The batches of a run, and the plan that it shows."""

import re

import pytest
from copies import changed

from cli.errors import UserError
from model import GPT2, hidden_matrices
from startup.plan import plan_batch
from weights.use import load_run


@pytest.mark.parametrize("given, plan", [
    ((1, None, None, None, 16, 8), (16, 8, 2)), ((2, 12, None, None, 16, 5), (12, 3, 2)),
    ((2, 12, None, 6, 16, 4), (12, 1, 6)), ((3, None, 2, 4, 16, 8), (24, 2, 4)),
    ((3, None, None, None, 1024, 64), (1062, 59, 6)), ((5, None, None, None, 16, 8), (15, 3, 1)),
    ((5, None, 4, None, 48, 8), (40, 4, 2)), ((64, None, None, None, 16, 8), (64, 1, 1))])
def test_batches_divide_a_step(given, plan):
    """Without flags into the largest micro-batches, within 5 % of what is wanted."""
    assert plan_batch(*given) == plan


@pytest.mark.parametrize("given, ways", [
    ((8, None, 32, None, 16, 8), ["2", "1", "256"]), ((4, 3, None, None, 16, 8), ["4"]),
    ((2, 11, None, None, 16, 8), ["10"]), ((1, 12, None, 5, 16, 8), ["2", "6", "5"]),
    ((1, 12, 4, 2, 16, 8), ["4", "3", "8"])])
def test_a_batch_that_does_not_fit_names_one_that_does(given, ways):
    with pytest.raises(UserError) as problem:
        plan_batch(*given)
    assert re.findall(r"--[a-z-]+ (\d+)", str(problem.value))[-len(ways):] == ways


def test_the_plan_says_who_trains_what(shards, tmp_path):
    muon = changed(tmp_path / "train_muon.py", ("model.embed.weight.requires_grad_(False)", "example = "))
    done = muon.train(0, shards, tmp_path / "run", optimizer="muon", steps=1)
    assert done.code == 0, done.out

    def number(text: str) -> int:
        return int(text.replace(",", ""))

    said = re.search(r"optimizer +(.*); ([\d,]+) frozen", done.out)
    counts = {name: number(count) for name, count in re.findall(r"(\w+) trains ([\d,]+\d)", said[1])}
    whole = number(re.search(r"\n +parameters +([\d,]+), ", done.out)[1])
    model, _ = load_run(GPT2, tmp_path / "run")
    matrices = sum(p.numel() for p in hidden_matrices(model))
    frozen = model.embed.weight.numel()
    assert counts == {"AdamW": whole - matrices - frozen, "Muon": matrices}
    assert number(said[2]) == frozen
