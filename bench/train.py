"""Training speed of one model, ours against a peer: in turn, on the same batches, from the same weights.

    python bench/train.py gpt2 --peer hf                                      # GPT2LMHeadModel, a plain loop
    python bench/train.py gpt2 --peer nanogpt --peer-source DIR               # where nanoGPT's model.py lies
    python bench/train.py hrm --size 25m --peer hf                            # HrmTextForCausalLM
    python bench/train.py mlm --size 17m --peer hf                            # ModernBertForMaskedLM
    python bench/train.py hrm --size 1b --batch 24 --checkpoint-activations selective

Each contestant is a process of its own that keeps its model; a round is `--steps` steps of one, then of the
other, and the ratio is taken round by round. CPU seconds (user + system, all threads) stand beside the wall
clock, because other processes slow that down. nanoGPT's source is fetched by whoever measures:

    git clone https://github.com/karpathy/nanoGPT

How each trains: ours as its trainer does, with Loader left out (batches lie in memory, for all alike);
nanoGPT as its train.py does, in its precision (float32 on a CPU, where its autocast is off) or with
--peer-precision bf16 under autocast; the Hugging Face classes in a plain loop with autocast, SDPA, fused
AdamW, and ModernBERT with sparse_prediction. On GPUs all are compiled. All clip gradients to 1.0.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TRAINERS = {"gpt2": "train_gpt2", "hrm": "train_hrm", "mlm": "train_mlm"}
# nanoGPT's configuration for a CPU, of which its README says how it is run
BABY = {"n_layer": 4, "n_head": 4, "d_model": 128, "seq_len": 64, "batch": 12, "padded_vocab": 128}
BP_STEPS, MASK_RATE, LR, BETAS, DECAY = 5, 0.3, 1e-4, (0.9, 0.95), 0.1


def settings(args) -> dict:
    """Shape and batch: the preset's, then what the command line says."""
    import importlib
    sizes = importlib.import_module(TRAINERS[args.model]).SIZES
    row = {"padded_vocab": 4096 if args.size == "tiny" else 50304}
    row |= BABY if args.size == "baby" else sizes[args.size]
    chosen = {"batch": args.batch, "seq_len": args.seq_len, "n_layer": args.n_layer,
              "padded_vocab": args.vocab_size}
    return row | {key: value for key, value in chosen.items() if value}


def make_model(args, row: dict):
    """Ours, on the CPU, of float32, the same for all contestants."""
    import torch

    import model
    model_class = {"gpt2": model.GPT2, "hrm": model.HRM, "mlm": model.MLM}[args.model]
    shape = {k: row[k] for k in ("n_layer", "n_head", "d_model", "seq_len", "ff", "padded_vocab") if k in row}
    special = {"eot": row["padded_vocab"] - 2} if args.model == "mlm" else {}
    torch.manual_seed(0)
    return model_class(model_class.Config(**shape, vocab_size=row["padded_vocab"], **special))


class Batches:
    """Batch i of text, the bytes of Python's own source, as (inputs …) on a device: a function of i alone.

    For the MLM x has masks; with it come positions and labels (B, K), or labels (B, T) as others want them.
    """

    def __init__(self, args, row: dict, device):
        import sysconfig

        import numpy as np
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)
        self.tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int32).clip(max=row["padded_vocab"] - 3)
        self.args, self.row, self.device = args, row, device

    def __call__(self, i: int, dense_labels: bool = False):
        import numpy as np
        import torch
        B, T = self.row["batch"], self.row["seq_len"]
        random = np.random.default_rng(i)
        begin = random.integers(0, len(self.tokens) - T - 1, B)[:, None]
        rows = torch.from_numpy(self.tokens[begin + np.arange(T + 1)].astype(np.int64))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.args.model == "mlm":
            k = round(MASK_RATE * T)
            positions = torch.from_numpy(np.sort(random.random((B, T)).argsort(1)[:, :k], axis=1))
            labels = x.gather(1, positions)
            x = x.scatter(1, positions, self.row["padded_vocab"] - 1)
            if dense_labels:
                y = torch.full_like(x, -100).scatter(1, positions, labels)
            else:
                return [t.to(self.device) for t in (x, positions, labels)]
        return [t.to(self.device) for t in (x, y)]


# -----------------------------------------------------------------------------------------------------------
# Contestants. Each makes a function step(i) that trains on batch i and returns the loss, a tensor.


def ours(args, row, device):
    """As the trainers do it; the numbers of the last step are read a step late, by StopVote."""
    import ddp_utils
    import train_gpt2
    world = ddp_utils.init(device=device.type)
    made = make_model(args, row)
    model = ddp_utils.build_model(type(made), made.config, world)
    ddp_utils.copy_weights(model, made.state_dict(), world)
    del made
    flags = train_gpt2.parse_args([  # what TrainState reads of them is common to all trainers
        "--precision", args.precision, "--checkpoint-activations", args.checkpoint_activations,
        "--lr", f"{LR}", "--weight-decay", f"{DECAY}", "--beta1", f"{BETAS[0]}", "--beta2", f"{BETAS[1]}",
        "--compile" if args.compile else "--no-compile"])
    state, batches = ddp_utils.TrainState(model, flags, world), Batches(args, row, device)
    vote = ddp_utils.StopVote(world)
    extra = {"bp_steps": BP_STEPS} if args.model == "hrm" else {}

    def step(i):
        ddp_utils.seed_step(0, i, 0)
        loss, _ = state.wrapped(*batches(i), **extra)
        loss.backward()
        norm = state.clip_gradients(1.0)
        state.optimizer_step(LR, norm)
        vote.count(norm, state.scaler)
        vote.read()
        vote.start()
        return loss.detach()

    flops = {"gpt2": lambda: model.flops_per_token(), "hrm": lambda: model.flops_per_token(BP_STEPS),
             "mlm": lambda: model.flops_per_token(MASK_RATE)}[args.model]()
    return step, str(model.compute_dtype).removeprefix("torch."), flops


def autocast(args, device):
    import torch
    if args.peer_precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def hf(args, row, device):
    """The class of transformers in a plain loop."""
    import tempfile

    import torch
    import transformers

    from data import load_tokenizer
    from model import to_hf
    made = make_model(args, row)
    names = {"gpt2": "GPT2LMHeadModel", "hrm": "HrmTextForCausalLM", "mlm": "ModernBertForMaskedLM"}
    options = {"mlm": {"sparse_prediction": True}, "hrm": {"L_bp_cycles": [0, BP_STEPS - 2]}, "gpt2": {}}
    with tempfile.TemporaryDirectory() as directory:
        to_hf(made, directory, load_tokenizer("bytes"))
        model = getattr(transformers, names[args.model]).from_pretrained(
            directory, attn_implementation=args.peer_attention, **options[args.model])
    del made
    model.to(device).train()
    if args.checkpoint_activations != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                                   {"params": others, "weight_decay": 0.0}], lr=LR, betas=BETAS, fused=True)
    run = torch.compile(model) if args.compile else model
    batches = Batches(args, row, device)

    def step(i):
        x, y = batches(i, dense_labels=True)
        causal = {} if args.model == "mlm" else {"shift_labels": y, "use_cache": False}
        with autocast(args, device):
            loss = run(input_ids=x, labels=y, **causal).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, args.peer_precision, None


def nanogpt(args, row, device):
    """nanoGPT's model, and the loop of its train.py, which reads the loss after every step."""
    import importlib.util

    import torch
    spec = importlib.util.spec_from_file_location("nanogpt", Path(args.peer_source) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = module
    spec.loader.exec_module(module)
    made, shape = make_model(args, row), {k: row[k] for k in ("n_layer", "n_head")}
    with contextlib.redirect_stdout(sys.stderr):
        model = module.GPT(module.GPTConfig(block_size=row["seq_len"], vocab_size=row["padded_vocab"],
                                            n_embd=row["d_model"], dropout=0.0, bias=False, **shape))
        import model as models
        theirs = models._as_theirs(made)
        transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        with torch.no_grad():
            for name, p in model.named_parameters():  # biases start as 0, and nanoGPT's default has none
                p.copy_(theirs[name].T if name.endswith(transposed) else theirs[name])
        del made
        model.to(device)
        optimizer = model.configure_optimizers(DECAY, LR, BETAS, device.type)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    run, batches = torch.compile(model) if args.compile else model, Batches(args, row, device)

    def step(i):
        x, y = batches(i)
        with autocast(args, device):
            _, loss = run(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return loss.detach()

    return step, args.peer_precision, None


# -----------------------------------------------------------------------------------------------------------
# One process for each contestant, which does what it reads from stdin: a number of steps


def synchronize(device):
    import torch
    if device.type == "cuda":
        torch.cuda.synchronize()


def contestant(args) -> None:
    """Says {"ready"} after the first step, then for each line with a number of steps what they took."""
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
    os.dup2(2, 1)
    import torch
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    device = torch.device(args.device)
    row = settings(args)

    def say(**message):
        print(json.dumps(message), file=answers, flush=True)

    try:
        begin_with = {"ours": ours, "hf": hf, "nanogpt": nanogpt}[args.contestant]
        step, precision, flops = begin_with(args, row, device)
        first = step(0).item()
        synchronize(device)
        say(first_step=time.time() - args.started, precision=precision, flops=flops, losses=[first])
        done = 1
        for line in sys.stdin:
            count = int(line)
            synchronize(device)
            wall, cpu, losses = time.perf_counter(), time.process_time(), []
            if device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            for i in range(done, done + count):
                losses.append(step(i))
            if device.type == "cuda":
                end.record()
            synchronize(device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            seconds = begin.elapsed_time(end) / 1000 if device.type == "cuda" else wall
            done += count
            peak = (torch.cuda.max_memory_allocated() if device.type == "cuda"
                    else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            say(seconds=seconds / count, cpu=cpu / count, gb=peak / 2**30,
                losses=[loss.item() for loss in losses])
    except torch.OutOfMemoryError as error:
        say(error=str(error).splitlines()[0])


class Process:
    def __init__(self, args, name: str):
        command = [sys.executable, __file__, *sys.argv[1:], "--contestant", name, "--device", args.device,
                   "--started", str(time.time())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=None if args.verbose else subprocess.DEVNULL)
        self.name, self.rounds, self.losses = name, [], []
        self.facts = self.listen()

    def listen(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} has died; --verbose shows what it said")
        message = json.loads(line)
        if "error" in message:
            sys.exit(f"{self.name}: {message['error']}")
        self.losses += message.pop("losses")
        return message

    def train(self, steps: int) -> dict:
        print(steps, file=self.process.stdin, flush=True)
        return self.listen()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(args) -> dict:
    """Rounds in turn. Returns all numbers as plain data."""
    row = settings(args)
    tokens = row["batch"] * row["seq_len"]
    names = ["ours", args.peer] if args.peer else ["ours"]
    contestants = [Process(args, name) for name in names]
    for contestant in contestants:
        contestant.train(args.warmup)
    for round_ in range(args.pairs):
        for contestant in contestants if round_ % 2 == 0 else contestants[::-1]:
            contestant.rounds.append(contestant.train(args.steps))
    found = {}
    for c in contestants:
        c.close()
        seconds = statistics.median(r["seconds"] for r in c.rounds)
        found[c.name] = {**c.facts, "seconds": seconds, "cpu": statistics.median(r["cpu"] for r in c.rounds),
                         "tokens_per_sec": tokens / seconds, "gb": c.rounds[-1]["gb"],
                         "loss": c.losses[-1], "steps": len(c.losses), "rounds": c.rounds}
    flops = found["ours"]["flops"]
    if args.device == "cuda":
        import torch

        import monitor
        peak = monitor.peak_flops(torch.device("cuda"))
        for result in found.values():
            result["mfu"] = peak and flops * result["tokens_per_sec"] / peak
    ratios = {}
    if args.peer:
        for clock in ("seconds", "cpu"):
            each = [b[clock] / a[clock] for a, b in zip(*(c.rounds for c in contestants))]
            ratios[clock] = [min(each), statistics.median(each), max(each)]
    return {"model": args.model, "size": args.size, "batch": row["batch"], "seq_len": row["seq_len"],
            "compile": args.compile, "checkpoint_activations": args.checkpoint_activations,
            "contestants": found, "ratios": ratios}


def report(args, result: dict) -> None:
    print(f"{result['model']} {result['size']}, batch {result['batch']} x {result['seq_len']}, compile "
          f"{'on' if result['compile'] else 'off'}, activation checkpointing "
          f"{result['checkpoint_activations']}; medians of {args.pairs} rounds of {args.steps} steps\n")
    columns = ["", "precision", "tokens/s", "ms a step", "CPU ms a step", "MFU", "peak GB", "s to first step",
               "loss", "after steps"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, r in result["contestants"].items():
        mfu = f"{r['mfu']:.1%}" if r.get("mfu") else "-"
        print(f"| {name} | {r['precision']} | {r['tokens_per_sec']:,.0f} | {1000 * r['seconds']:,.1f} | "
              f"{1000 * r['cpu']:,.1f} | {mfu} | {r['gb']:.2f} | {r['first_step']:.1f} | {r['loss']:.4f} | "
              f"{r['steps']} |")
    for clock, (low, median, high) in result["ratios"].items():
        what = "wall clock" if clock == "seconds" else "CPU time"
        print(f"\n{what}: ours is {median:.2f} x as fast as {args.peer} ({low:.2f} to {high:.2f})")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=TRAINERS)
    parser.add_argument("--size", help="of the trainer's presets, or baby: nanoGPT's for a CPU "
                        "(gpt2, 25m, 17m)")
    parser.add_argument("--peer", choices=("hf", "nanogpt"))
    parser.add_argument("--peer-source", metavar="DIR", help="where nanoGPT's model.py lies")
    parser.add_argument("--peer-precision", choices=("fp32", "bf16"), help="(what ours has; nanogpt "
                        "on a CPU: fp32)")
    parser.add_argument("--peer-attention", default="sdpa", help="of transformers (sdpa)")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    for flag in ("--batch", "--seq-len", "--n-layer", "--vocab-size", "--threads"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--steps", type=int, default=2, help="of a round (2)")
    parser.add_argument("--pairs", type=int, default=5, help="rounds (5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted (2)")
    parser.add_argument("--checkpoint-activations", choices=("none", "block", "selective"), default="none")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="(on GPUs)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="append the numbers to this file, a line")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.size = args.size or {"gpt2": "gpt2", "hrm": "25m", "mlm": "17m"}[args.model]
    import torch
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.compile is None:
        args.compile = args.device == "cuda"
    if args.peer_precision is None:
        import ddp_utils
        dtype = ddp_utils.compute_dtype(args.precision, torch.device(args.device))
        fp32 = dtype == torch.float32 or args.peer == "nanogpt" and args.device == "cpu"
        args.peer_precision = "fp32" if fp32 else "bf16"
    if args.peer == "nanogpt" and (args.model != "gpt2" or not args.peer_source):
        parser.error("--peer nanogpt is for gpt2 and needs --peer-source.")
    return args


def main() -> None:
    args = parse_args()
    if args.contestant:
        return contestant(args)
    import torch
    print(f"python {platform.python_version()}, torch {torch.__version__}, {args.device}", flush=True)
    result = measure(args)
    report(args, result)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
