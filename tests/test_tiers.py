"""Each test is in one of three tiers: that of `pytest tests`, of `--full`, or of `--long`."""

import re
import shutil
import sys
from types import SimpleNamespace

import conftest
import pytest
from conftest import ROOT, finish, start

pytestmark = pytest.mark.full
GOOD = """
import pytest
def test_first(): pass
@pytest.mark.full
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.long)])
def test_full(n): pass
@pytest.mark.long
def test_long(): pass
"""
BAD = {
    "test_misspelt.py": "import pytest\n@pytest.mark.ful\ndef test_a(): pass\n",
    "test_replaced.py": "def test_a(): pass\ndef test_a(): pass\n",
    "test_no_case.py": "import pytest\n@pytest.mark.parametrize('n', [])\ndef test_a(n): pass\n"}


def run_pytest(directory, files: dict[str, str], *flags):
    """pytest with the settings of this repository on other tests."""
    (directory / "tests").mkdir()
    shutil.copy(ROOT / ".pytest.ini", directory)
    shutil.copy(ROOT / "tests" / "conftest.py", directory / "tests")
    for name, text in files.items():
        (directory / "tests" / name).write_text(text)
    return finish(start([sys.executable, "-m", "pytest", "-n0", *flags], cwd=directory))


@pytest.mark.parametrize("flags, passed", [
    ([], 1), (["--full"], 2), (["--long"], 4), (["--full", "-m", "full"], 1)])
def test_a_tier_runs_those_before_it(tmp_path, flags, passed):
    """And -m full, which CI gives, leaves out the first."""
    done = run_pytest(tmp_path, {"test_good.py": GOOD}, *flags)
    assert done.code == 0 and re.search(rf"\b{passed} passed", done.out), done.out
    assert "skipped" not in done.out  # which looks as if something were missing


def test_a_test_in_no_tier_fails(tmp_path):
    done = run_pytest(tmp_path, BAD | {"test_good.py": GOOD})
    assert done.code == 2 and "test_good.py" not in done.out, done.out
    assert all(f"ERROR tests/{name}" in done.out for name in BAD), done.out


def test_what_is_skipped_is_said_in_one_line_with_the_packages():
    lines = []
    reasons = ["Skipped: could not import 'wandb': No module named 'wandb'",
               "Skipped: could not import 'tensorboard.backend': No module named 'tensorboard'",
               "Skipped: could not import 'wandb': No module named 'wandb'", "Skipped: needs two GPUs",
               "Skipped: module 'transformers' has __version__ '4.0', required is: '5.23'",
               "Skipped: could not import 'pynvml': …", "Skipped: pip install lm_eval accelerate peft",
               "Skipped: no wheel of llama.cpp fits this machine: pip install xllamacpp"]
    reports = [SimpleNamespace(longrepr=("a.py", 1, reason)) for reason in reasons]
    for skipped in (reports, reports[3:4], []):
        conftest.pytest_terminal_summary(SimpleNamespace(stats={"skipped": skipped}, write_line=lines.append))
    packages = "accelerate lm_eval nvidia-ml-py peft tensorboard transformers wandb xllamacpp"
    assert lines == [f"8 skipped, 7 of them need packages: pip install {packages}; pytest -rs says "
                     "why", "1 skipped; pytest -rs says why"]
