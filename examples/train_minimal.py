"""GPT-2 on one page, with one process or many. On CPUs, the same bits as train_gpt2.py, also after a kill.

    python data.py prepare --dataset stdlib                   # once: turns text into shards of tokens
    torchrun --nproc_per_node=2 examples/train_minimal.py     # or python; after a kill, run it again
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
import data
from cli.errors import end_python, owns_python
from cli.files import cpu_count
from model import GPT2, GPT2Config, learning_rate, make_optimizers, pad_vocab, use_device
from ops.device import compute_dtype

SHARDS, CHECKPOINT = Path("shards/stdlib-bpe4096"), Path("runs/minimal.pt")
SHAPE = dict(n_layer=4, n_head=2, d_model=128, seq_len=256)
BATCH, GLOBAL_BATCH = 8, 16  # sequences in a forward pass, and in a step of all processes
STEPS, EVERY = 300, 100  # EVERY: steps between evaluations, each with a checkpoint
LR, WARMUP, BETAS, WEIGHT_DECAY, CLIP, SEED = 3e-3, 30, (0.9, 0.95), 0.1, 1.0, 0

rank, local_rank = (int(os.environ.get(name) or 0) for name in ("RANK", "LOCAL_RANK"))  # from torchrun
world_size = int(os.environ.get("WORLD_SIZE") or 1)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
world = SimpleNamespace(rank=rank, world_size=world_size, device=device)
if world_size > 1:
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(max(1, cpu_count() // int(os.environ["LOCAL_WORLD_SIZE"])))  # torchrun sets 1

def over_all(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes, in float64."""
    total = value.double()
    if world_size > 1:
        torch.distributed.all_reduce(total)
    return total

# Data, model, optimizer, and the state of a killed run
dataset = data.Dataset([SHARDS], SHAPE["seq_len"])  # memory-mapped files as rows of tokens
torch.manual_seed(SEED)  # all processes begin with the same weights
n = dataset.tokenizer.vocab_size
model = GPT2(GPT2Config(vocab_size=n, padded_vocab=pad_vocab(n), **SHAPE, **dataset.marker_ids)).to(device)
use_device(model, device, compute_dtype("auto", device))  # bfloat16 if that's fast; weights stay float32
optimizer, = make_optimizers(model, "adamw", LR, BETAS, WEIGHT_DECAY)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
wrapped = torch.nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
for _ in range(2):  # after its first backward pass DDP sums in another order, so a resumed run would differ
    wrapped(**model.dummy_inputs(BATCH, device))[0].backward()

accumulation = GLOBAL_BATCH // (BATCH * world_size)
while step < STEPS:
    torch.manual_seed(SEED + step * world_size + rank)  # so no checkpoint needs random states
    batches = []
    for i in range(accumulation):  # the rows depend only on the seed and the position in the run
        position = step * GLOBAL_BATCH + (i * world_size + rank) * BATCH
        rows = data.shuffled(np.arange(position, position + BATCH), dataset.train.rows, SEED)
        arrays = data.read_rows(dataset.train, np.sort(rows))
        batches.append([torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays])
    labels = over_all(sum((y >= 0).sum() for _, y in batches))  # y is −1 at tokens that aren't learned
    optimizer.zero_grad()
    loss_sum = 0
    for i, (x, y) in enumerate(batches):  # (B, T) each
        wrapped.require_backward_grad_sync = i == accumulation - 1  # DDP communicates once per step
        objective, sums = wrapped(x, y)  # both are sums over labels
        (objective * (world_size / labels)).backward()  # DDP divides the sum over processes by world_size
        loss_sum += sums["loss"]
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, STEPS, LR, WARMUP, "cosine", 0.1)
    optimizer.step()
    step += 1
    loss = over_all(loss_sum / labels).item()
    if rank == 0:
        print(f"step {step} | loss {loss}", flush=True)
    if step % EVERY == 0 or step == STEPS:
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for x, y in data.validation_batches(dataset.val[""], BATCH, world):
                sums += torch.stack([model(x, y)[1]["loss"], (y >= 0).sum()])
        model.train()
        loss, labels = over_all(sums).tolist()
        if rank == 0:
            print(f"step {step} | validation loss {loss / labels}", flush=True)
            CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, f"{CHECKPOINT}.tmp")
            os.replace(f"{CHECKPOINT}.tmp", CHECKPOINT)  # a kill leaves the old file or the new one, whole
if owns_python():  # Python's own end sometimes aborts, because threads of torch are still running
    end_python(0)
