"""What a checkpoint costs training: the stall of a save beside a step and a copy; bytes a second beside dd.

    python bench/checkpoint.py tiny                 # GPT-2 of 1.4 M parameters
    python bench/checkpoint.py gpt2 --rounds 5      # 124 M: files of 1.5 GB, --directory chooses where

A round is a step, a save, and, while that is being written, the steps until it is done; then the same tensors
copied once (what a snapshot cannot do without), and dd, which writes as many bytes and syncs them.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import ddp_utils
import train_gpt2
from model import GPT2, GPT2Config, make_optimizers


def clock(function) -> tuple[float, float]:
    """(wall, CPU) seconds that this thread waited and worked."""
    wall, cpu = time.perf_counter(), time.thread_time()
    function()
    return time.perf_counter() - wall, time.thread_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("tiny", "gpt2"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write (that of temporary files)")
    args = parser.parse_args()
    world = ddp_utils.init()
    flags = train_gpt2.parse_args(["--size", args.size, "--seq-len", "256"])
    vocab, batch = (4096, 16) if args.size == "tiny" else (50304, 4)
    config = GPT2Config(vocab_size=vocab, padded_vocab=vocab, **ddp_utils.flags_of_model(GPT2Config, flags))
    model = ddp_utils.build_model(GPT2, config, world)
    model.load_state_dict(GPT2(config).state_dict())
    optimizers = make_optimizers(model, "adamw", 1e-3, (0.9, 0.95), 0.1)
    ddp_utils.set_modes(model, flags, world, {}, print)
    state = ddp_utils.TrainState(model, optimizers, world)
    x = torch.randint(vocab, (batch, config.seq_len), device=world.device)

    def step():
        state.wrapped(x, x)[0].backward()
        state.optimizer_step(1e-3, state.clip_gradients(1.0))
        world.synchronize()

    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        Path(directory, "checkpoints").mkdir()
        checkpoints = ddp_utils.Checkpoints(Path(directory), world, 1, print)
        write, writes = checkpoints._write, []

        def timed(*job):
            writes.append(clock(lambda: write(*job))[0])

        checkpoints._write = timed  # runs in a thread of its own
        found = {name: [] for name in ("step", "save", "copy", "busy", "write", "dd")}
        for round_ in range(args.rounds + 1):
            alone = clock(step)
            save = clock(lambda: checkpoints.save(round_, state, {"loss": 1.0, "settings": {"steps": 0}}))
            busy = []
            while not all(job.done() for job in checkpoints.unwritten):
                busy.append(clock(step)[0])
            tensors = [tensor for _, _, tensor, _ in state.tensors()]
            if not round_:  # pages that were never touched cost more
                copies = [t.detach().cpu().clone() for t in tensors]
            copy = clock(lambda: [c.copy_(t) for c, t in zip(copies, tensors)])
            path = next(Path(directory, "checkpoints").glob("step_*.pt"))
            size = path.stat().st_size
            dd = clock(lambda: subprocess.run(
                ["dd", "if=/dev/zero", f"of={directory}/dd", "bs=1M", "conv=fsync", f"count={size}",
                 "iflag=count_bytes"], check=True, capture_output=True))
            if round_:
                for name, value in (("step", alone[0]), ("save", save[0]), ("copy", copy[0]),
                                    ("busy", statistics.median(busy) if busy else alone[0]),
                                    ("write", writes[-1]), ("dd", dd[0])):
                    found[name].append(value)
        checkpoints.close()
    ms = {name: 1000 * statistics.median(values) for name, values in found.items()}

    def ratio(a, b):
        each = [x / y for x, y in zip(found[a], found[b])]
        return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"

    print(f"{args.size}: {sum(p.numel() for p in model.parameters()):,} parameters, {size / 1e6:.1f} MB a "
          f"checkpoint, {args.rounds} rounds, {world.device.type} with {torch.get_num_threads()} threads")
    print(f"a save stalls training for {ms['save']:.1f} ms; a step takes {ms['step']:.1f} ms, "
          f"{ms['busy']:.1f} ms while a checkpoint is being written; a copy of the tensors takes "
          f"{ms['copy']:.1f} ms")
    print(f"stall / step {ratio('save', 'step')}; stall / copy {ratio('save', 'copy')}")
    print(f"the thread writes {size / ms['write'] / 1e6:.3f} GB/s beside the training, dd "
          f"{size / ms['dd'] / 1e6:.3f} GB/s alone; ratio {ratio('dd', 'write')}")


if __name__ == "__main__":
    ddp_utils.launch(main)
