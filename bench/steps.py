"""Times a step of two versions of the code, in turn: is the new one slower?

    git worktree add ../before f47d5ff && python bench/steps.py ../before .      # all trainers, on idle cores
    python bench/steps.py ../before . --trainer gpt2 --ranks 2 --rounds 20 -- --log-every 1 --save-every 5

Each round trains `tiny` with one version, then with the other; every second round swaps them. A run's time is
the median time of a step between two logged steps, without the first five. Prints the mean over rounds of the
ratio after / before, with its 95 % interval (Student's t). Flags after -- go to both trainers.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 45
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom
T95 = {1: 12.706, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 29: 2.045}


def seconds_of_a_step(code: Path, data: Path, trainer: str, ranks: int, flags: list[str]) -> float:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"train_{trainer}.py", "--data", data, "--out", out, "--steps", STEPS, "--log-every", 5,
                   "--eval-every", 1000, "--save-every", 1000, "--eval-batches", 1, "--device", "cpu"]
        command += [] if trainer == "mlm" else ["--max-new-tokens", 2]
        done = subprocess.run([*map(str, command), *flags], cwd=code, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        records = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
        steps = [record for record in records if "loss" in record and record["step"] >= 5]
    return statistics.median((b["time"] - a["time"]) / (b["step"] - a["step"])
                             for a, b in itertools.pairwise(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--trainer", nargs="+", default=["hrm", "mlm", "gpt2"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, choices=[n + 1 for n in T95], default=10)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    flags = sys.argv[end + 1:]
    versions = [args.before.resolve(), args.after.resolve()]
    with tempfile.TemporaryDirectory() as root:
        data = Path(root, "stdlib")
        subprocess.run([sys.executable, "data.py", "prepare", "--dataset", "stdlib", "--tokenizer", "bytes",
                        "--max-tokens", "2M", "--out", data], cwd=versions[0], check=True, stdout=sys.stderr)
        load = os.getloadavg()[0]
        print(f"{args.ranks} processes on {os.cpu_count()} cores, load {load:.1f}, tiny, {flags}")
        for trainer in args.trainer:
            ratios, seconds = [], ([], [])
            for turn in range(args.rounds):
                for i in (0, 1) if turn % 2 else (1, 0):
                    seconds[i].append(seconds_of_a_step(versions[i], data, trainer, args.ranks, flags))
                ratios.append(seconds[1][-1] / seconds[0][-1])
            mean = statistics.mean(ratios)
            half = T95[args.rounds - 1] * statistics.stdev(ratios) / math.sqrt(args.rounds)
            before, after = (1000 * statistics.median(s) for s in seconds)
            print(f"{trainer}: {before:.1f} ms before, {after:.1f} after; ratio {mean:.3f}, 95 % interval "
                  f"{mean - half:.3f} to {mean + half:.3f}", flush=True)


if __name__ == "__main__":
    main()
