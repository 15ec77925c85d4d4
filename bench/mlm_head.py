"""What it saves that the MLM multiplies the vocabulary with the masked positions only.

    python bench/mlm_head.py [--d-model 256 --layers 7 --batch 8 --seq-len 512 --rate 0.3 --pairs 5]

Forward and backward of the same model with the same K labels, once as train_mlm.py does it, once with logits
for all positions and cross-entropy on top, in turn; each in a process of its own, so that its peak memory is
its own. Prints medians and the ratio full / masked.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def measure(args) -> dict:
    import torch
    import torch.nn.functional as F

    from model import MLM, MLMConfig
    torch.manual_seed(0)
    config = MLMConfig(vocab_size=50258, padded_vocab=50304, seq_len=args.seq_len, n_layer=args.layers,
                       n_head=4, d_model=args.d_model, ff=args.d_model * 3 // 2, eot=50256)
    model = MLM(config)
    x = torch.randint(50000, (args.batch, args.seq_len))
    k = round(args.rate * args.seq_len)
    positions = torch.rand(args.batch, args.seq_len).argsort(dim=1)[:, :k]
    labels = torch.randint(50000, (args.batch, k))

    def loss():
        if args.variant == "masked":
            return model(x, positions, labels)[0] / labels.numel()
        logits = model(x)  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1)[(positions + args.seq_len * torch.arange(
            args.batch)[:, None]).flatten(), :config.vocab_size], labels.flatten())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        value = loss()
        value.backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"loss": value.item(), "seconds": min(seconds), "gb": (peak - before) * 1024 / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"--d-model": 256, "--layers": 7, "--batch": 8, "--seq-len": 512, "--pairs": 5}
    for flag, default in defaults.items():
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--variant", choices=("masked", "full"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        return print(json.dumps(measure(args)))
    results = {"masked": [], "full": []}
    for _ in range(args.pairs):
        for variant, found in results.items():
            out = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--variant", variant], check=True,
                                 capture_output=True, text=True).stdout
            found.append(json.loads(out.splitlines()[-1]))
    for what in ("loss", "seconds", "gb"):
        masked, full = (statistics.median(r[what] for r in results[v]) for v in ("masked", "full"))
        print(f"{what:8} masked {masked:8.4f}   full {full:8.4f}   full / masked {full / masked:6.2f}")


if __name__ == "__main__":
    main()
