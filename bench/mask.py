"""What it costs that a prompt sees all of itself: a step with --attention prefix against one with causal.

    OMP_NUM_THREADS=1 python bench/mask.py

Forward and backward pass of the two models on rows of pairs. The two take turns, each pair gives one ratio of
their times (CPU time on a CPU), and the table has the median and the second lowest and highest of twelve.
"""

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import data  # noqa: E402
from model import GPT2, HRM, Block, GPT2Config, HRMConfig  # noqa: E402

START, RESPONSE, IDS = 4094, 4096, 4097
PAIRS = 12


def pairs(batch: int, seq_len: int) -> torch.Tensor:
    """Rows (B, T) of pairs: prompts of 20 to 60 tokens, responses of 20 to 80, and padding."""
    some, rows = random.Random(0), []

    def text(shortest: int, longest: int) -> list[int]:
        return [some.randrange(4000) for _ in range(some.randint(shortest, longest))]

    for _ in range(batch):
        row = []
        while len(row) < seq_len - 60:
            row += [START, *text(20, 60), RESPONSE, *text(20, 80)]
        rows.append((row + [START] * seq_len)[:seq_len])
    return torch.tensor(rows)


def build(kind: str, seq_len: int, attention: str, dtype: torch.dtype, device: torch.device):
    torch.manual_seed(0)
    common = dict(vocab_size=IDS, padded_vocab=4160, seq_len=seq_len, attention=attention,
                  start=START, response=RESPONSE, d_model=128, n_head=2)
    model = (HRM(HRMConfig(n_layer=2, ff=384, **common)) if kind == "HRM" else
             GPT2(GPT2Config(n_layer=4, **common))).to(device)
    model.compute_dtype = dtype
    for block in model.modules():
        if isinstance(block, Block):
            block.plain_attention = device.type == "cpu"
            if device.type == "cuda":
                block.compile()
    return model


def seconds(model, x: torch.Tensor, y: torch.Tensor) -> float:
    """Of a micro-batch, forward and backward."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    torch.get_device_module(x.device).synchronize()
    begun = clock()
    model(x, y, **({"bp_steps": 5} if isinstance(model, HRM) else {}))[0].backward()
    torch.get_device_module(x.device).synchronize()
    model.zero_grad(set_to_none=True)
    return clock() - begun


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = ((256, 8), (1024, 2)) if device.type == "cpu" else ((1024, 64),)
    types = (torch.bfloat16, torch.float32) if device.type == "cpu" else (torch.bfloat16,)
    print("| model | tokens in a row | type | prefix / causal |\n|---|---|---|---|")
    for kind in ("HRM", "GPT-2"):
        for seq_len, batch in shapes:
            for dtype in types:
                models = {name: build(kind, seq_len, name, dtype, device) for name in ("causal", "prefix")}
                x, ratios = pairs(batch, seq_len), []
                roles = {"start": START, "response": RESPONSE, "end": -1}
                y = x.roll(-1, 1)
                y[torch.from_numpy(~data.learned(x.numpy(), roles, "response"))] = -1
                x, y = x.to(device), y.to(device)
                for i in range(-1, PAIRS):  # the first pair warms up
                    names = sorted(models, reverse=i % 2 > 0)
                    took = {name: seconds(models[name], x, y) for name in names}
                    ratios += [took["prefix"] / took["causal"]][:i + 1]
                ratios.sort()
                print(f"| {kind} | {seq_len} | {str(dtype)[6:]} | {statistics.median(ratios):.3f} "
                      f"[{ratios[1]:.3f}, {ratios[-2]:.3f}] |", flush=True)


if __name__ == "__main__":
    main()
