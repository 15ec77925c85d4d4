"""examples/reasoning_gym.py with the package, which has the same name."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from conftest import ROOT


def test_levels_are_held_out_whole(tmp_path):
    try:
        metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        pytest.skip("pip install reasoning-gym")

    def run(*arguments):
        command = [sys.executable, ROOT / "examples" / "reasoning_gym.py", *arguments]
        return subprocess.run([*command, "--trained", "1:3", "--untrained", "4:5"], cwd=tmp_path,
                              capture_output=True, text=True, timeout=60, check=False)

    done = run("chain_sum", "min_digits=N", "max_digits=N", "max_terms=2", "--samples", "300")
    assert done.returncode == 0, done.stderr
    for name, levels, count in ("trained", {1, 2, 3}, 300), ("untrained", {4, 5}, 1000):
        rows = [json.loads(line) for line in open(tmp_path / f"chain_sum-{name}.jsonl")]
        assert len(rows) == count
        assert {row["level"] for row in rows} == {f"{name}-{level}" for level in levels}
        for row in rows:
            first, sign, second = row["prompt"].removesuffix(" =").split()[-3:]
            assert f"{name}-{len(first)}" == f"{name}-{len(second)}" == row["level"]
            assert int(row["response"]) == int(first) + int(sign + second)
    for arguments in (["chain_sums"], ["chain_sum", "digits=N"], ["chain_sum", "min_digits"]):
        done = run(*arguments)
        assert done.returncode == 2 and "error: " in done.stderr, arguments
