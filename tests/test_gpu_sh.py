"""bench/gpu.sh: its tables are complete, or left out and named, whatever stops a measurement."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parent.parent
# stands for python: it makes the tables, and instead of a measurement leaves what MEASURED says
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1] == "-":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
measured = json.loads(os.environ["MEASURED"]).get(os.path.basename(sys.argv[1]), {{"lines": [], "code": 0}})
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "a") as file:
        for line in measured["lines"]:
            file.write(json.dumps(line) + "\\n")
sys.exit(measured["code"])
"""
RESULTS = {"precision": "bfloat16", "seconds": 0.5, "host": None, "cpu": 1.0, "tokens_per_sec": 100.0,
           "gb": 1.0, "loss": 4.5, "mfu": None, "first_step": 9.0, "steps": 3, "rounds": [], "flops": 1.0,
           "peak_flops": None}
RUN = {"kind": "result", "command": "bench/train.py hrm", "model": "hrm", "size": "tiny", "batch": 2,
       "seq_len": 32, "checkpoint_activations": "block", "contestants": {"ours": RESULTS}, "ratios": {}}
ROW = {"kind": "attention", "shape": [2, 2, 64, 64], "strict": True, "backend": "FLASH", "chosen": True,
       "equal": True, "forward_ms": 1.0, "both_ms": 2.0}


def tables(tmp_path, part, **measured):
    """The tables of a part in which each script has left (lines, exit code)."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o700)
    given = {f"{name}.py": {"lines": lines, "code": code} for name, (lines, code) in measured.items()}
    environment = os.environ | {"PYTHON": str(stand_in), "TRY": "1", "MEASURED": json.dumps(given)}
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", part, tmp_path / "out"], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "out" / f"part{part}.md").read_text()


def test_without_a_part_it_says_what_each_needs():
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert all(f"bench/gpu.sh {part} " in done.stdout for part in "ABCDE")


def test_what_is_whole_is_in_a_table(tmp_path):
    found = tables(tmp_path, "B", train=([RUN], 0), kernels=([ROW], 0))
    assert "| hrm tiny block | 2 x 32 | ours | 500.0 |" in found
    assert "| FLASH * | 1.000 | 2.000 |" in found


def test_what_is_cut_short_is_named_and_in_no_table(tmp_path):
    found = tables(tmp_path, "B", train=([RUN | {"kind": "round"}], 137), kernels=([ROW], 1))
    assert "| ours |" not in found and "FLASH" not in found
    left_out = found.partition("Not or not fully measured")[2].partition("Commands:")[0]
    assert "bench/train.py hrm" in left_out and "bench/kernels.py attention" in left_out


def test_a_contestant_that_failed_is_named_with_its_error(tmp_path):
    peers = {"ours": RESULTS, "nanogpt": {"error": "AttributeError: nothing there"}}
    found = tables(tmp_path, "B", train=([RUN | {"contestants": peers}], 1))
    assert "| ours | 500.0 |" in found
    assert "| nanogpt |" not in found and "nanogpt: AttributeError: nothing there" in found


def test_each_size_has_its_own_flags(tmp_path):
    """Those of `--also`, too, of which the command holds all, and what the loss was five steps before."""
    mine, other = "--size 350m --batch 4 --checkpoint-activations selective", "--size 25m --batch 8 {} block"
    other = f"ours {other.format('--checkpoint-activations')}"
    run = RUN | {"command": f"bench/train.py hrm {mine} '--also={other.removeprefix('ours ')}'"}
    first = {"ours": RESULTS | {"loss": 5.5}, other: RESULTS | {"loss": 3.5}}
    lines = [run | {"kind": "round", "contestants": first},
             run | {"contestants": dict.fromkeys(first, RESULTS)}]
    found = tables(tmp_path, "E", train=(lines, 0))
    assert "| hrm 350m 4 selective | 256 | 500.0 |  | 5.5000 to 4.5000 | yes |" in found
    assert "| hrm 25m 8 block | 512 | 500.0 |  | 3.5000 to 4.5000 | NO |" in found
