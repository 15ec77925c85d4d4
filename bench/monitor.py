"""What the log of a run costs: steps with everything that RunLog does, and steps without, in turn.

    python bench/monitor.py [--pairs 20 --steps 10 --batch 8 --log-every 10]

The model is `train_gpt2.py --size tiny`, on a GPU if there is one. A pair is `steps` steps of each kind, in
one process, with one model, in an order that changes from pair to pair. With RunLog, a step advances the bar,
and every `log-every` steps a record goes to metrics.jsonl, to the screen and, with the use of CPU and RAM, to
TensorBoard, if the extras are installed. Prints median and quartiles over the pairs of the ratio with /
without, of wall-clock and of CPU time, and what RunLog's calls took by themselves.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from model import GPT2, GPT2Config, make_optimizers
from monitor import RunLog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("--pairs", 20), ("--steps", 10), ("--batch", 8), ("--log-every", 10)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = GPT2Config(vocab_size=4096, padded_vocab=4096, seq_len=256, n_layer=4, n_head=2, d_model=128)
    x = torch.randint(4096, (args.batch, config.seq_len), device=device)
    directory = Path(tempfile.mkdtemp())
    log = RunLog(directory, True, "[Rank 0/1]")
    log.begin(0, {"lr": 1e-3, "steps": 10**6})
    log.facts = {"sync": "OK"}
    spent, steps = 0.0, {True: 0, False: 0}
    model = GPT2(config).to(device)
    optimizers = make_optimizers(model, "adamw", 1e-3, (0.9, 0.95), 0.1)

    def block(instrumented: bool) -> tuple[float, float]:
        """Seconds of wall clock and of CPU, in all threads, for `steps` steps."""
        def report(call, *arguments):
            nonlocal spent
            if instrumented:
                begun = time.perf_counter()
                call(*arguments)
                spent += time.perf_counter() - begun

        begun = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            loss, _ = model(x, x)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps[instrumented] += 1
            report(log.tick, steps[instrumented])
            if steps[instrumented] % args.log_every == 0:  # both wait for the loss, as the trainers do
                record = {"step": steps[instrumented], "loss": loss.item(), "lr": 1e-3,
                          "grad_norm": 1.0, "tokens": 1, "tokens_per_sec": 1.0, "mfu": 0.1,
                          "mem_gb": 1.0, "time": time.time()}
                report(log.write, record)
                report(log.step_line, record, 1.0)
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    found = {True: [], False: []}
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        for instrumented in (True, False):  # warms up
            block(instrumented)
        spent = 0.0
        for pair in range(args.pairs):
            for instrumented in (pair % 2 == 0, pair % 2 == 1):
                found[instrumented].append(block(instrumented))
        drawn = time.perf_counter()
        log.save_history(last=True)
        drawn = time.perf_counter() - drawn
    wall = sum(seconds for seconds, _ in found[True])
    count = args.pairs * args.steps
    print(f"{args.pairs} pairs of {args.steps} steps on {device.type}, {wall / count * 1000:.1f} ms a step, "
          f"a record every {args.log_every}")
    for i, clock in enumerate(("wall clock", "CPU time")):
        ratios = [a[i] / b[i] for a, b in zip(found[True], found[False])]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{clock:10} with / without: median {median:.4f}, quartiles {low:.4f} to {high:.4f}")
    print(f"in RunLog's calls: {spent / count * 1e6:.0f} us a step, {spent / wall:.3%} of the time; a picture"
          f" takes {drawn:.2f} s, and is left out where that is over 0.5 % of the time")


if __name__ == "__main__":
    main()
