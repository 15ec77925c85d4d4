"""From `torchrun` to the first step of `tiny` on prepared data, against what nobody can avoid, in turn.

    python bench/startup.py [train_gpt2.py --nproc 1 --rounds 5]

Against: torchrun starting the same number of processes that do nothing but `import torch`, and that also make
an optimizer, for which torch imports its compiler: the floor of all that trains with torch.optim. Also a
single `python -c "import torch"`. The first step is there when its log line is printed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def until(command: list, text: str | None) -> tuple[float, float]:
    """Seconds until a command prints a text, or ends; and the CPU seconds of it and its children."""
    before, begun = os.times(), time.perf_counter()
    process = subprocess.Popen([str(c) for c in command], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    seconds, said = None, ""
    for line in process.stdout:
        said += line
        if text and text in line and seconds is None:
            seconds = time.perf_counter() - begun
    code = process.wait()
    if code or text and seconds is None:
        sys.exit(said[-3000:])
    after = os.times()
    return seconds or time.perf_counter() - begun, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", default="train_gpt2.py")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={args.nproc}"]
    found = {"first step": [], "torchrun optimizer": [], "torchrun import": [], "import": []}
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        subprocess.run([sys.executable, "data.py", "prepare", "--dataset", "stdlib", "--tokenizer", "bytes",
                        "--out", directory / "data", "--max-tokens", "2M"], cwd=ROOT, check=True,
                       capture_output=True)
        nothing, optimizer = directory / "nothing.py", directory / "optimizer.py"
        nothing.write_text("import torch\n")
        optimizer.write_text("import torch\ntorch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])\n")
        for round_ in range(args.rounds + 1):
            out = directory / f"run{round_}"
            one = [*torchrun, args.script, "--data", directory / "data", "--out", out, "--steps", 1,
                   "--eval-batches", 1, "--max-new-tokens", 1]
            kinds = {"first step": (one, " step 1/1 "), "torchrun optimizer": ([*torchrun, optimizer], None),
                     "torchrun import": ([*torchrun, nothing], None),
                     "import": ([sys.executable, nothing], None)}
            for name, (command, text) in list(kinds.items())[:: 1 if round_ % 2 else -1]:
                spent = until(command, text)
                if round_:
                    found[name].append(spent)
    for name, values in found.items():
        wall, cpu = (statistics.median(v) for v in zip(*values))
        print(f"{name:18} {wall:6.2f} s" + (f", {cpu:.2f} s of CPU time" if name != "first step" else ""))
    for other in [*found][1:]:
        each = [a[0] / b[0] for a, b in zip(found["first step"], found[other])]
        print(f"first step / {other}: {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
