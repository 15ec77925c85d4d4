"""Memory of one process with each --strategy: what it holds between steps, and its peak, in GB.

    python bench/strategies.py --ranks 2 4          # GPT-2 124M, on CPUs with gloo

Held are the bytes of the tensors themselves: parameters, gradients, AdamW's state. The peak is that of the
process (VmHWM) above what it had before the model was built, with an allocator that returns what is freed;
beside it stands what --dry-run says. On CPUs, offloading moves nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")  # this process should not import torch
BATCH, SEQ_LEN = 1, 128


def resident(kind: str) -> int:
    """Bytes of this process now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def measure(strategy: str) -> None:
    import torch

    import ddp_utils
    import train_gpt2
    from ddp_utils import local_shard, memory_of
    from model import GPT2, GPT2Config, make_optimizers
    from test_ddp import empty_model, kept_for_backward
    world = ddp_utils.init(timeout=300)
    config, x = GPT2Config(seq_len=SEQ_LEN), torch.zeros((BATCH, SEQ_LEN), dtype=torch.long)
    inputs = {name: torch.zeros(BATCH, config.seq_len, dtype=torch.long) for name in ("idx", "targets")}
    said = kept_for_backward(GPT2, config, torch.float32, "none", inputs, compiled=False)
    args = train_gpt2.parse_args(["--size", "gpt2", "--precision", "fp32", "--strategy", strategy])
    said = sum(memory_of(empty_model(GPT2, args), strategy, args, world.world_size, said).values())
    before = resident("VmRSS")
    model = ddp_utils.build_model(GPT2, config, world, strategy)
    for p in model.parameters():  # weights do not matter here, and rank 0 should not hold a second copy
        torch.nn.init.constant_(local_shard(p), 0.01)
    optimizers = make_optimizers(model, "adamw", 1e-3, train_gpt2.BETAS, train_gpt2.WEIGHT_DECAY)
    state = ddp_utils.TrainState(model, optimizers, world, strategy)
    for _ in range(3):
        state.wrapped(x, x)[0].backward()
        norm = state.clip_gradients(1.0)
        gradients = sum(local_shard(p.grad).nbytes for p in model.parameters())
        state.optimizer_step(1e-3, norm)
    found = [sum(local_shard(p).nbytes for p in model.parameters()), gradients,
             sum(local_shard(t).nbytes for t in state.optimizer_tensors().values())]
    numbers = [*found, sum(found), resident("VmHWM") - before, said]
    numbers = torch.tensor(numbers, dtype=torch.float64)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    if world.is_rank0:
        print("RESULT", json.dumps((numbers / 1e9).tolist()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    print("The fullest process, GB; GPT-2 124M, fp32\n")
    columns = "ranks", "strategy", "parameters", "gradients", "optimizer", "held", "peak", "--dry-run"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for ranks in args.ranks:
        for strategy in STRATEGIES:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc-per-node={ranks}", __file__, "--strategy", strategy]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                                  env=environment)
            line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
            if line is None:
                sys.exit(done.stderr)
            numbers = json.loads(line[len("RESULT"):])
            print(f"| {ranks} | {strategy} | " + " | ".join(f"{n:.2f}" for n in numbers) + " |", flush=True)


if __name__ == "__main__":
    if "--strategy" in sys.argv:
        from ddp_utils import launch
        launch(lambda: measure(sys.argv[-1]))
    else:
        main()
