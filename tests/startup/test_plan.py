"""The batches of a run."""

import re

import pytest

from cli.errors import UserError
from startup.plan import plan_batch


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
