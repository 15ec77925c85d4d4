"""Times training with 1, 2, 4 and 8 processes. Each row of the table has the same size and global batch.

    python bench/scaling.py train_gpt2.py                                  # tiny on CPUs, with gloo
    python bench/scaling.py train_gpt2.py --processes 1,2 -- --seq-len 128
    python bench/scaling.py train_gpt2.py --device cuda -- --size gpt2     # on a machine with 8 GPUs

Flags after -- go to the trainer. The speed is the median over the logged steps, without the first five. The
efficiency compares the tokens per second of a process with the first row's; don't compare it between tables.
On CPUs all processes share the cores. A row says so if it has more processes than cores.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from cli.files import cpu_count  # noqa: E402


def train(args: argparse.Namespace, processes: int, out: Path) -> tuple[float, str]:
    """Tokens per second of all processes, and how the batch was divided."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
               args.trainer, "--out", out, "--device", args.device, "--steps", args.steps, "--log-every", 1,
               "--eval-every", 10**6, "--save-every", 10**6, "--eval-batches", 1, *args.flags]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {processes} processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    speeds = [record["tokens_per_sec"] for record in records if "tokens_per_sec" in record]
    settings = json.loads((out / "config.json").read_text())["settings"]
    batch = " x ".join(str(settings[name]) for name in ("batch", "grad_accum", "world_size"))
    return statistics.median(speeds[min(5, len(speeds) - 1):]), f"{batch} | {settings['precision']}"


def processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    found = Path("/proc/cpuinfo").is_file() and re.search(r"model name\s*: (.*)",
                                                          Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", help="train_gpt2.py, for example")
    parser.add_argument("--processes", default="1,2,4,8", help="of the rows of the table (1,2,4,8)")
    parser.add_argument("--steps", type=int, default=25, help="training steps for each row (25)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.flags = sys.argv[end + 1:]
    where = processor(args.device)
    print(f"{time.strftime('%F')}, {where}, {cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch "
          f"{torch.__version__}, python {platform.python_version()}; {Path(args.trainer).name} "
          f"{' '.join(args.flags)}\n")
    print("| processes | batch x accumulation x processes | precision | tokens/s | tokens/s/process | "
          "efficiency | |\n" + "|---" * 7 + "|", flush=True)
    first = None
    for processes in map(int, args.processes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            speed, batch = train(args, processes, Path(folder, "run"))
        each = speed / processes
        first = first or each
        note = "more processes than cores" if args.device == "cpu" and processes > cpu_count() else ""
        print(f"| {processes} | {batch} | {speed:,.0f} | {each:,.0f} | {each / first:.0%} | {note} |",
              flush=True)


if __name__ == "__main__":
    main()
