"""What it costs to be two processes: 2 with gloo and 1 thread each against 1 with 2 threads, in turn.

    python bench/ddp.py                           # GPT-2 tiny, accumulation 8
    python bench/ddp.py --size gpt2 --seq-len 256 --batch 2 --steps 1

Both do the same optimizer step: `batch` sequences in each of 2 x 8 micro-batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def worker(args) -> None:
    """Takes numbers of steps from rank 0's stdin, through the process group, and says what they took."""
    import torch
    import torch.distributed as dist

    import ddp_utils
    import train_gpt2
    from model import GPT2, GPT2Config, make_optimizers
    world = ddp_utils.init(timeout=300)
    flags = train_gpt2.parse_args(["--size", args.size])
    flags.seq_len = args.seq_len or flags.seq_len
    vocab = 4096 if args.size == "tiny" else 50304
    config = GPT2Config(vocab_size=vocab, padded_vocab=vocab, **ddp_utils.flags_of_model(GPT2Config, flags))
    model = ddp_utils.build_model(GPT2, config, world)
    torch.manual_seed(0)
    ddp_utils.copy_weights(model, GPT2(config).state_dict() if world.is_rank0 else {}, world)
    optimizers = make_optimizers(model, "adamw", 1e-3, (0.9, 0.95), 0.1)
    ddp_utils.set_modes(model, flags, world, {}, print)
    state = ddp_utils.TrainState(model, optimizers, world)
    vote, x = ddp_utils.StopVote(world), torch.randint(vocab, (args.batch, config.seq_len))
    accumulation = 2 * args.accumulation // world.world_size

    def step():
        for i in range(accumulation):
            with state.no_sync(i < accumulation - 1):
                (state.wrapped(x, x)[0] / accumulation).backward()
        norm = state.clip_gradients(1.0)
        state.optimizer_step(1e-3, norm)
        vote.vote(state.skipped)

    state.warm_up({"idx": x, "targets": x}, {"idx": x, "targets": x})
    go = Path(args.directory)
    for round_ in range(-1, args.rounds):  # files say who may run, since torchrun has no stdin
        turn = go / f"go{round_}-{world.world_size}"
        while not turn.exists():
            time.sleep(0.01)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            step()
        spent = [(time.perf_counter() - wall) / args.steps, (time.process_time() - cpu) / args.steps]
        spent = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(spent)
        if world.is_rank0:
            seconds = [float(spent[0]) / world.world_size, float(spent[1])]
            (go / f"tmp-{world.world_size}").write_text(json.dumps(seconds))
            os.replace(go / f"tmp-{world.world_size}", go / f"done{round_}-{world.world_size}")
    vote.read()


def main() -> None:
    import tempfile
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "gpt2"), default="tiny")
    for flag, default in (("--batch", 8), ("--seq-len", 0), ("--accumulation", 8), ("--steps", 3),
                          ("--rounds", 7)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.directory:
        return worker(args)
    found = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory:
        processes = [subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", __file__,
             *sys.argv[1:], "--directory", directory], env=os.environ | {"OMP_NUM_THREADS": str(2 // n)})
            for n in found]
        for round_ in range(-1, args.rounds):
            for n in list(found)[:: 1 if round_ % 2 else -1]:
                Path(directory, f"go{round_}-{n}").touch()
                done = Path(directory, f"done{round_}-{n}")
                while not done.exists():
                    if any(p.poll() for p in processes):
                        sys.exit("a process has died")
                    time.sleep(0.01)
                if round_ >= 0:
                    found[n].append(json.loads(done.read_text()))
        for process in processes:
            process.wait()
    print(f"GPT-2 {args.size}, 2 x {args.accumulation} micro-batches of {args.batch} sequences a step")
    for n, numbers in found.items():
        wall, cpu = (1000 * statistics.median(x) for x in zip(*numbers))
        print(f"{n} process{'es' if n > 1 else ''} x {2 // n} threads: {wall:.1f} ms a step, "
              f"{cpu:.1f} of CPU time")
    for i, clock in enumerate(("wall clock", "CPU time")):
        each = [one[i] / two[i] for one, two in zip(found[1], found[2])]
        print(f"{clock}: 2 processes are {statistics.median(each):.2f} x as fast ({min(each):.2f} to "
              f"{max(each):.2f})")


if __name__ == "__main__":
    if "--directory" in sys.argv:
        from ddp_utils import launch
        launch(main)
    else:
        main()
