"""Compares nanoGPT with train_gpt2.py on the same text and cores, for README's table.

    git clone https://github.com/karpathy/nanoGPT
    python bench/nanogpt.py nanoGPT shakespeare.txt     # five minutes; nothing else should run

Runs in turn nanoGPT's recipe for CPUs (from its README, and stretched to a longer time) and our README's
recipe for your own text. Prints the time of each command, start included, and its validation loss. Both hold
out the last tenth of the text and evaluate in nats per character; nanoGPT evaluates on as many random pieces
as cover it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli.files import cpu_count
from cli.parser import ArgumentParser, local_path

ROOT = Path(__file__).resolve().parent.parent
THEIRS = ("--device=cpu --compile=False --log_interval=200 --block_size=64 --batch_size=12 --n_layer=4 "
          "--n_head=4 --n_embd=128 --dropout=0.0 "
          "--eval_iters=145")  # 145 * 12 * 64 characters, a tenth of the text
OURS = "--modern --optimizer muon --lr 1e-2 --tokenizer bytes --max-new-tokens 5"


def run(command: list, folder: Path) -> tuple[float, str]:
    begun = time.perf_counter()
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - begun, done.stdout


def nanogpt(where: Path, iterations: int) -> tuple[float, float]:
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *THEIRS.split(),
               f"--max_iters={iterations}", f"--lr_decay_iters={iterations}", f"--eval_interval={iterations}"]
    seconds, text = run(command, where)
    return seconds, float(re.findall(r"val loss ([\d.]+)", text)[-1])


def ours(text: Path, steps: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={min(2, cpu_count())}",
                   ROOT / "train_gpt2.py", *OURS.split(), "--data", f"text:{text}", "--steps", steps,
                   "--eval-every", steps, "--out", "run"]
        seconds, printed = run(command, Path(folder))
    return seconds, float(re.findall(r"validation loss ([\d.]+)", printed)[-1])


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=local_path, help="a clone of karpathy/nanoGPT")
    parser.add_argument("text", type=local_path, help="a text, such as nanoGPT's Shakespeare")
    parser.add_argument("--iterations", default="2000,3600", help="nanoGPT's iterations (its README: 2000)")
    parser.add_argument("--steps", default="320,600", help="steps of train_gpt2.py, for about the same times")
    args = parser.parse_args()
    if not (args.nanogpt / "train.py").exists():
        raise SystemExit(f"error: {args.nanogpt} is not a clone of nanoGPT: git clone "
                         "https://github.com/karpathy/nanoGPT")
    folder = args.nanogpt / "data" / "shakespeare_char"
    shutil.copyfile(args.text, folder / "input.txt")
    run([sys.executable, "prepare.py"], folder)
    print("| | seconds | validation loss per character |\n|---|---|---|", flush=True)
    for iterations, steps in zip(args.iterations.split(","), args.steps.split(",")):
        seconds, loss = nanogpt(args.nanogpt, int(iterations))
        print(f"| nanoGPT, {iterations} iterations | {seconds:.0f} | {loss:.3f} |", flush=True)
        seconds, loss = ours(args.text.resolve(), int(steps))
        print(f"| train_gpt2.py, {steps} steps | {seconds:.0f} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
