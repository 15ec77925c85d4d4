"""bench/gpu.sh: its tables are complete, or left out and named, whatever stops a measurement."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.full
# stands for python: it makes the tables, and instead of a measurement leaves what MEASURED says
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1] == "-":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
lines, code = json.loads(os.environ["MEASURED"]).get(os.path.basename(sys.argv[1]), [[], 0])
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\\n")
sys.exit(code)
"""
RESULTS = {"precision": "bfloat16", "seconds": 0.5, "host": None, "cpu": 1.0, "tokens_per_sec": 100.0,
           "gb": 1.0, "loss": 4.5, "mfu": None, "first_step": 9.0, "steps": 3, "rounds": [], "flops": 1.0,
           "peak_flops": None}
RUN = {"kind": "result", "command": "bench/train.py hrm", "model": "hrm", "size": "tiny", "batch": 2,
       "seq_len": 32, "checkpoint_activations": "block", "contestants": {"ours": RESULTS}, "ratios": {}}
ROW = {"kind": "attention", "shape": [2, 2, 64, 64], "strict": True, "backend": "FLASH", "chosen": True,
       "equal": True, "forward_ms": 1.0, "both_ms": 2.0}
PEERS = {"ours": RESULTS, "nanogpt": {"error": "AttributeError: nothing"}}


@pytest.mark.parametrize("train, kernels, rows, left_out, absent", [
    (([RUN], 0), ([ROW], 0),
     ["| hrm tiny block | 2 x 32 | ours | 500.0 |", "| FLASH * | 1.000 | 2.000 |"], [], []),
    # cut short
    (([RUN | {"kind": "round"}], 137), ([ROW], 1), [],
     ["bench/train.py hrm", "bench/kernels.py attention"], ["| ours |", "FLASH"]),
    # a contestant that failed
    (([RUN | {"contestants": PEERS}], 1), ([], 0), ["| ours | 500.0 |"], ["nanogpt: AttributeError: no"],
     ["| nanogpt |"])])
def test_what_is_whole_is_in_a_table_and_the_rest_is_named(tmp_path, train, kernels, rows, left_out, absent):
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o700)
    measured = json.dumps({"train.py": train, "kernels.py": kernels})
    env = {"PYTHON": str(python), "TRY": "1", "MEASURED": measured}
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", "B", tmp_path / "out"], env=os.environ | env,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "out" / "partB.md").read_text()
    named = found.partition("fully measured")[2].partition("Commands:")[0]
    assert all(row in found for row in rows) and all(what in named for what in left_out), found
    assert not any(what in found for what in absent), found
