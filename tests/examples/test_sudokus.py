"""examples/sudokus.py: its commands, on fewer sudokus."""

import json
import re
import shlex
from pathlib import Path

import sudokus
from runs import Trainer

import data
from prepare import command


def test_sudokus_hold_out_whole_levels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sudokus, "SAMPLES", {"trained": 300, "untrained": 60})
    sudokus.main()
    every = [*sudokus.solutions([0] * 16)]
    assert len(every) == 288  # as is known
    for name, count in sudokus.SAMPLES.items():
        rows = [json.loads(line) for line in open(f"sudokus/{name}.jsonl")]
        assert len(rows) == count
        for row in rows:
            cells, solved = ([*map(int, row[key].replace("\n", ""))] for key in ("prompt", "response"))
            assert [grid for grid in every if all(a in (0, b) for a, b in zip(cells, grid))] == [solved]
            assert row["level"] == f"{name}-{cells.count(0)}" and cells.count(0) in sudokus.BLANKS[name]
    lines = [line.strip() for line in sudokus.__doc__.splitlines() if line.startswith("    ")]
    fields = re.search('fields="(.*)"', sudokus.__doc__)[1]
    for line in lines[2:4]:
        monkeypatch.setattr("sys.argv", shlex.split(line.replace("$fields", fields))[1:])
        command.main()
    flags = shlex.split(lines[-1])[2:]
    hrm = Trainer("train_hrm.py", seq_len=None, steps=1, ff=32, h_cycles=1, bp_cycles=1, max_new_tokens=1)
    done = hrm.here(*hrm.flags(None, "run"), *flags)
    assert done.code == 0 and "untrained-9" in done.out, done.out
    manifest = data.read_manifest(Path("shards/untrained-bytes"))
    assert all(shard["split"].startswith("val_") for shard in manifest["shards"])
