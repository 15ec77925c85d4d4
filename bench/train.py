"""Trains our model and a peer's in turn, on the same batches, from the same weights: which is faster?

    python bench/train.py gpt2 --peer hf                                      # GPT2LMHeadModel, a plain loop
    python bench/train.py gpt2 --batch 4 --peer trainer                       # transformers' own Trainer
    python bench/train.py gpt2 --peer nanogpt --peer-source DIR               # where nanoGPT's model.py lies
    python bench/train.py hrm --size 25m --peer hf                            # HrmTextForCausalLM
    python bench/train.py mlm --size 17m --peer hf                            # ModernBertForMaskedLM
    python bench/train.py hrm --size 1b --batch 24 --also="--checkpoint-activations block"    # ours twice
    python bench/train.py gpt2 --also="--code ../before"      # ours, and another checkout of this repository

Each contestant is a process that keeps its model. All start and compile at the same time. A round is
`--steps` steps of each in turn, and gives one ratio. The table has the wall clock and CPU seconds (user +
system, all threads), because other processes slow down the wall clock. On a GPU it also has

* the medians of the SM clock and of the power while the contestant trains, and the power limit
* how long Python takes to launch a step that begins with an empty queue
* with --profile, how much of that goes into how many calls of CUDA. A call takes some microseconds, unless
  the queue is full and it waits for the GPU.

Fetch nanoGPT's source yourself:

    git clone https://github.com/karpathy/nanoGPT

How each one trains:

* Ours as its trainer does, without Loader: the batches of all contestants are on the device.
* nanoGPT as its train.py does, which reads the loss every tenth step. On a CPU it trains in float32, because
  its autocast is off there; --peer-precision bf16 turns it on.
* The Hugging Face classes in a plain loop with autocast, SDPA and fused AdamW. ModernBERT has
  sparse_prediction.
* transformers' Trainer with its own defaults and those of the classes.

On GPUs all are compiled. All clip gradients to 1.0.

--json gets a line after each round, with the medians so far, and one at the end. So a run that is cut short
leaves its numbers, too.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TRAINERS = {"gpt2": "train_gpt2", "hrm": "train_hrm", "mlm": "train_mlm"}
# nanoGPT's configuration for a CPU, from its README
BABY = {"n_layer": 4, "n_head": 4, "d_model": 128, "seq_len": 64, "batch": 12, "padded_vocab": 128}
BP_STEPS, MASK_RATE, LR, BETAS, DECAY = 5, 0.3, 1e-4, (0.9, 0.95), 0.1
STAGED = 16  # batches, used again and again
ATTENTION = {"cudnn": r"cudnn.*sdpa", "flash": r"flash_(fwd|bwd)|FlashAttn", "efficient": r"fmha_cutlass",
             "flex": r"flex_attention"}  # by the names of their kernels
LAUNCH = r"cu(da)?Launch"  # calls of the CUDA runtime and driver


def in_home(text: str) -> Path:
    """A type for argparse: a path. A shell leaves the ~ in --json=~/x."""
    return Path(text).expanduser()


def settings(args) -> dict:
    """Shape and batch, from the preset and the command line."""
    import importlib
    sizes = importlib.import_module(TRAINERS[args.model]).SIZES
    row = {"padded_vocab": 4096 if args.size == "tiny" else 50304}
    row |= BABY if args.size == "baby" else sizes[args.size]
    chosen = {"batch": args.batch, "seq_len": args.seq_len, "n_layer": args.n_layer,
              "padded_vocab": args.vocab_size}
    return row | {key: value for key, value in chosen.items() if value}


def make_model(args, row: dict, device):
    """Makes our model in float32 on the device, with the same weights for all contestants."""
    import torch

    import model
    model_class = {"gpt2": model.GPT2, "hrm": model.HRM, "mlm": model.MLM}[args.model]
    shape = {k: row[k] for k in ("n_layer", "n_head", "d_model", "seq_len", "ff", "padded_vocab") if k in row}
    special = {"eot": row["padded_vocab"] - 2} if args.model == "mlm" else {}
    torch.manual_seed(0)
    with device:
        return model_class(model_class.Config(**shape, vocab_size=row["padded_vocab"], **special))


def stage(args, row: dict, device, dense_labels: bool = False) -> list:
    """Makes batches (inputs …) of the bytes of Python's own source on the device, the same for all.

    For the MLM, x has masks. Positions and labels (B, K) come with it, or labels (B, T) for peers.
    """
    import sysconfig

    import numpy as np
    import torch
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64).clip(max=row["padded_vocab"] - 3)
    B, T, staged = row["batch"], row["seq_len"], []
    for i in range(STAGED):
        random = np.random.default_rng(i)
        begin = random.integers(0, len(tokens) - T - 1, B)[:, None]
        rows = torch.from_numpy(tokens[begin + np.arange(T + 1)])
        batch = [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]
        if args.model == "mlm":
            x, k = batch[0], round(MASK_RATE * T)
            positions = torch.from_numpy(np.sort(random.random((B, T)).argsort(1)[:, :k], axis=1))
            labels = x.gather(1, positions)
            masked = x.scatter(1, positions, row["padded_vocab"] - 1)
            batch = ([masked, torch.full_like(x, -100).scatter(1, positions, labels)] if dense_labels
                     else [masked, positions, labels])
        staged.append([t.to(device) for t in batch])
    return staged


# -----------------------------------------------------------------------------------------------------------
# Contestants. Each returns a function step(i), which trains on a batch and returns the loss, and facts.


def ours(args, row, device):
    """Trains as our trainers do."""
    import ddp_utils
    import train_gpt2
    from loggers.mfu import flops_per_token
    from model import make_optimizers
    from startup.run import resolve_flags
    from training.step import TrainState
    from training.strategies import build_model, copy_weights
    world = ddp_utils.init(device=device.type, fast=args.fast)
    made = make_model(args, row, world.device)
    model_class = type(made)
    model = build_model(model_class, made.config, world)
    copy_weights(model, made.state_dict(), world)
    del made
    command = train_gpt2.parse_args([  # all trainers have the flags that TrainState reads
        "--precision", args.precision, "--checkpoint-activations", args.checkpoint_activations,
        "--compile" if args.compile else "--no-compile", *(["--fast"] if args.fast else [])])
    run = SimpleNamespace(args=resolve_flags(command), world=world, say=print, saved=None)
    state = TrainState(model, make_optimizers(model, "adamw", LR, BETAS, DECAY), run)
    batches = stage(args, row, world.device)
    vote = ddp_utils.StopVote(world)
    extra = {"bp_steps": BP_STEPS} if args.model == "hrm" else {}

    def step(i):
        ddp_utils.seed_step(0, i, 0)
        batch = batches[i % STAGED]
        labels = ddp_utils.async_sum(batch[-1].numel(), world)
        objective, sums = state.wrapped(*batch, **extra)
        state.scaler.scale(objective * (world.world_size / labels())).backward()
        norm = state.clip_gradients(1.0, vote)
        state.optimizer_step(LR, norm)
        vote.vote()
        return sums["loss"] / batch[-1].numel()

    example = {"gpt2": {}, "hrm": {"bp_steps": BP_STEPS}, "mlm": {"mask_rate": MASK_RATE}}[args.model]
    flops = flops_per_token(model_class, model.config, **example)
    return step, {"precision": str(model.compute_dtype).removeprefix("torch."), "flops": flops}


def autocast(args, device):
    import torch
    if args.peer_precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def class_of_transformers(args, row, device, **options):
    """The same model as a class of transformers, in training mode."""
    import tempfile

    import transformers

    from vocab.tokenizer import load_tokenizer
    from weights.huggingface import to_hf
    made = make_model(args, row, device)
    names = {"gpt2": "GPT2LMHeadModel", "hrm": "HrmTextForCausalLM", "mlm": "ModernBertForMaskedLM"}
    if args.model == "hrm":
        options |= {"L_bp_cycles": [0, BP_STEPS - 2]}
    with tempfile.TemporaryDirectory() as directory:
        to_hf(made, directory, load_tokenizer("bytes"))
        model = getattr(transformers, names[args.model]).from_pretrained(
            directory, attn_implementation="sdpa", **options)
    del made
    return model.to(device).train()


def hf(args, row, device):
    """The class of transformers in a plain loop."""
    import torch
    sparse = {"sparse_prediction": True} if args.model == "mlm" else {}
    model = class_of_transformers(args, row, device, **sparse)
    if args.checkpoint_activations != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                                   {"params": others, "weight_decay": 0.0}], lr=LR, betas=BETAS, fused=True)
    run = torch.compile(model) if args.compile else model
    batches = stage(args, row, device, dense_labels=True)

    def step(i):
        x, y = batches[i % STAGED]
        causal = {} if args.model == "mlm" else {"shift_labels": y, "use_cache": False}
        with autocast(args, device):
            loss = run(input_ids=x, labels=y, **causal).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, {"precision": args.peer_precision}


def trainer(args, row, device):
    """transformers' own Trainer with its defaults. Its loop runs in a thread, and waits before each step
    until it's asked for one.
    """
    import tempfile

    import torch
    import transformers
    model = class_of_transformers(args, row, device)
    batches = stage(args, row, torch.device("cpu"), dense_labels=True)
    asked, done, losses = threading.Semaphore(0), threading.Semaphore(0), []

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                for x, y in batches:  # a causal model shifts its labels itself
                    for ids, labels in zip(x, y if args.model == "mlm" else x):
                        yield {"input_ids": ids, "labels": labels}

    class Waiting(transformers.Trainer):
        def training_step(self, *inputs, **more):
            asked.acquire()
            losses.append(super().training_step(*inputs, **more))
            return losses[-1]

    class Say(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            done.release()

    given = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=10**6, per_device_train_batch_size=row["batch"], learning_rate=LR,
        lr_scheduler_type="constant", weight_decay=DECAY, bf16=args.peer_precision == "bf16",
        use_cpu=device.type == "cpu", optim="adamw_torch_fused", torch_compile=args.compile,
        save_strategy="no", report_to=[], disable_tqdm=True)
    waiting = Waiting(model, given, train_dataset=Rows(), callbacks=[Say()])
    threading.Thread(target=waiting.train, daemon=True).start()

    def step(i):
        asked.release()
        done.acquire()
        return losses[-1].detach()

    return step, {"precision": args.peer_precision}


def nanogpt(args, row, device):
    """nanoGPT's model and the loop of its train.py, which reads the loss every tenth step."""
    import importlib.util

    import torch

    from weights.huggingface import as_theirs
    spec = importlib.util.spec_from_file_location("nanogpt", Path(args.peer_source) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = module
    spec.loader.exec_module(module)
    made, shape = make_model(args, row, device), {k: row[k] for k in ("n_layer", "n_head")}
    with device:
        model = module.GPT(module.GPTConfig(block_size=row["seq_len"], vocab_size=row["padded_vocab"],
                                            n_embd=row["d_model"], dropout=0.0, bias=False, **shape))
        theirs = as_theirs(made)
        transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        with torch.no_grad():
            for name, p in model.named_parameters():  # biases start as 0, and nanoGPT's default has none
                p.copy_(theirs[name].T if name.endswith(transposed) else theirs[name])
        del made
        optimizer = model.configure_optimizers(DECAY, LR, BETAS, device.type)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    run, batches = torch.compile(model) if args.compile else model, stage(args, row, device)

    def step(i):
        x, y = batches[i % STAGED]
        with autocast(args, device):
            _, loss = run(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if i % 10 == 0:
            loss.item()
        return loss.detach()

    return step, {"precision": args.peer_precision}


# -----------------------------------------------------------------------------------------------------------
# One process for each contestant, which does what it reads from stdin: `train 5` or `profile 3`, in steps


def synchronize(device):
    import torch
    if device.type == "cuda":
        torch.cuda.synchronize()


def train(step, steps, device) -> dict:
    """What one of these steps took; `host` is how long Python took to launch the first, which finds the queue
    of the GPU empty.
    """
    import torch
    on_gpu = device.type == "cuda"
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    if on_gpu:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    losses = [step(steps[0])]
    host = time.perf_counter() - wall if on_gpu else None
    losses += [step(i) for i in steps[1:]]
    if on_gpu:
        end.record()
    synchronize(device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    seconds = begin.elapsed_time(end) / 1000 if on_gpu else wall
    peak = (torch.cuda.max_memory_allocated() if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"seconds": seconds / len(steps), "host": host, "cpu": cpu / len(steps), "gb": peak / 2**30,
            "losses": [loss.item() for loss in losses]}


def profile(step, steps, device) -> dict:
    """The 15 kernels (on a CPU: operations) that take most of these steps, which attention they are, and the
    calls that launched them: how many a step has, and their seconds. Each step begins with an empty queue.
    """
    import torch
    from torch.profiler import ProfilerActivity
    name = device.type.upper()
    with torch.profiler.profile(activities=[getattr(ProfilerActivity, name)]) as found:
        losses = []
        for i in steps:
            losses.append(step(i))
            synchronize(device)
    clock = f"self_{'device' if name == 'CUDA' else 'cpu'}_time_total"
    averages = found.key_averages()
    launches = [e for e in averages if re.match(LAUNCH, e.key)]
    kernels = [(e.key, e.count / len(steps), getattr(e, clock) / 1000 / len(steps))
               for e in averages if e.device_type.name == name and not e.is_user_annotation]
    kernels.sort(key=lambda kernel: -kernel[2])
    total = sum(ms for _, _, ms in kernels) or 1
    attention = [name for name, pattern in ATTENTION.items()
                 if any(re.search(pattern, kernel) for kernel, _, _ in kernels)]
    return {"kernels": [{"name": name[:100], "calls": calls, "ms": ms, "share": ms / total}
                        for name, calls, ms in kernels[:15]],
            "launches": sum(e.count for e in launches) / len(steps),
            "launching": sum(e.self_cpu_time_total for e in launches) / 1e6 / len(steps),
            "losses": [loss.item() for loss in losses]} | (
                {"attention": " ".join(attention)} if attention else {})


def contestant(args) -> None:
    """Prints its facts after the first step, then reads lines, does what they ask, and prints the result."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stderr
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    device = torch.device(args.device)

    def say(**message):
        print(json.dumps(message), file=answers, flush=True)

    try:
        step, facts = {"ours": ours, "hf": hf, "trainer": trainer, "nanogpt": nanogpt}[args.contestant](
            args, settings(args), device)
        first = step(0).item()
        from loggers.mfu import peak_flops
        facts |= {"first_step": time.time() - args.started, "peak_flops": peak_flops(device)}
        say(losses=[first], **facts)
        done = 1
        for line in sys.stdin:
            what, count = line.split()
            steps = range(done, done + int(count))
            say(**{"train": train, "profile": profile}[what](step, steps, device))
            done = steps.stop
    except Exception as error:
        say(error=f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}")
        if not isinstance(error, torch.OutOfMemoryError):
            raise


@contextlib.contextmanager
def gpu_readings(args):
    """Yields a dict that ends up with the medians of the GPU's SM clock (MHz), power and power limit (W).
    They are None if the GPU doesn't tell, or without nvidia-ml-py. A thread of this process reads them every
    20 ms, so it doesn't disturb the contestants.
    """
    import torch
    found, over, medians = {"sm_mhz": [], "watts": [], "watts_limit": []}, threading.Event(), {}

    def read():
        with contextlib.suppress(Exception):  # NVMLError, ImportError …: no reason to end a measurement
            import pynvml
            gpu = torch.cuda._get_pynvml_handler(0)  # the first of CUDA_VISIBLE_DEVICES
            queries = {
                "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
                "watts": lambda: power_now(pynvml, gpu),
                "watts_limit": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000}
            while not over.wait(0.02):
                for name, query in queries.items():
                    with contextlib.suppress(Exception):
                        found[name].append(query())

    thread = threading.Thread(target=read)
    if args.device == "cuda":
        thread.start()
    try:
        yield medians
    finally:
        over.set()
        if args.device == "cuda":
            thread.join()
    medians |= {name: statistics.median(values) if values else None for name, values in found.items()}


def power_now(pynvml, gpu) -> float:
    """Watts at this moment, or the mean that nvidia-smi shows if the GPU tells only that."""
    field = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
    if field.nvmlReturn == pynvml.NVML_SUCCESS:
        return field.value.uiVal / 1000
    return pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000


def of_checkout(flags: list[str]) -> tuple[Path, list[str]]:
    """This script in the checkout that the flags of --also name, and the remaining flags."""
    of = argparse.ArgumentParser(prog="--also", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    of.add_argument("--code", metavar="DIR", type=in_home, default=ROOT)
    found, flags = of.parse_known_args(flags)
    script = found.code / "bench" / "train.py"
    if not script.is_file():
        sys.exit(f"error: --also='--code {found.code}': there is no {script}.")
    return script, flags


class Process:
    """A contestant, seen from outside. `error` says why it dropped out, if it did."""

    def __init__(self, args, name: str, kind: str, script: Path, flags: list[str]):
        command = [sys.executable, script, *sys.argv[1:], *flags, "--contestant", kind,
                   "--device", args.device, "--started", str(time.time())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=None if args.verbose else subprocess.DEVNULL)
        self.name, self.facts, self.rounds, self.losses, self.error = name, {}, [], [], None

    def listen(self) -> dict:
        line = self.process.stdout.readline()
        try:
            message = json.loads(line)
        except ValueError:  # nothing or half a line
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            message = {"error": f"died with exit code {self.process.poll()}; --verbose shows what it printed"}
        self.error = message.get("error")
        self.losses += message.pop("losses", [])
        return message

    def do(self, what: str, steps: int) -> dict:
        with contextlib.suppress(BrokenPipeError):
            print(what, steps, file=self.process.stdin, flush=True)
        return self.listen()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def summary(args, contestants: list[Process]) -> dict:
    """All numbers so far, as plain data."""
    row, found, ratios = settings(args), {}, {}
    tokens, flops = row["batch"] * row["seq_len"], contestants[0].facts.get("flops")
    for c in contestants:
        found[c.name] = c.facts | ({"error": c.error} if c.error else {})
        if not c.rounds:
            continue
        medians = {}
        for key in ("seconds", "host", "cpu", "sm_mhz", "watts", "watts_limit"):
            values = [r[key] for r in c.rounds if r[key] is not None]
            medians[key] = statistics.median(values) if values else None
        speed, peak = tokens / medians["seconds"], c.facts["peak_flops"]
        found[c.name] |= {**medians, "tokens_per_sec": speed, "gb": c.rounds[-1]["gb"],
                          "first_loss": c.losses[0], "loss": c.losses[-1],
                          "mfu": flops * speed / peak if flops and peak else None,
                          "steps": len(c.losses), "rounds": c.rounds}
        each = {clock: [b[clock] / a[clock] for a, b in zip(contestants[0].rounds, c.rounds)]
                for clock in ("seconds", "cpu")}
        if c is not contestants[0] and each["cpu"]:
            ratios[c.name] = {clock: [min(r), statistics.median(r), max(r)] for clock, r in each.items()}
    import torch
    return {"command": shlex.join(["bench/train.py", *sys.argv[1:]]), "time": time.strftime("%F %T"),
            "python": platform.python_version(), "torch": torch.__version__, "model": args.model,
            "size": args.size, "batch": row["batch"], "seq_len": row["seq_len"], "compile": args.compile,
            "checkpoint_activations": args.checkpoint_activations, "contestants": found, "ratios": ratios}


def append(args, kind: str, result: dict) -> None:
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps({"kind": kind} | result) + "\n")


def measure(args) -> dict:
    """Runs rounds in turn, of contestants that haven't failed."""
    contestants = [Process(args, name, "ours", *started) for name, started in args.ours.items()]
    contestants += [Process(args, args.peer, args.peer, Path(__file__), [])] if args.peer else []

    def running() -> list[Process]:
        return [c for c in contestants if not c.error]

    for c in contestants:
        c.facts = c.listen()
    for c in running():
        c.do("train", args.warmup)
    for round_ in range(args.pairs):
        for c in running() if round_ % 2 == 0 else running()[::-1]:
            with gpu_readings(args) as medians:
                found = c.do("train", args.steps)
            c.rounds += [] if c.error else [found | medians]
        append(args, "round", summary(args, contestants))
    for c in running() if args.profile else []:
        c.facts |= c.do("profile", args.profile)
    for c in contestants:
        c.close()
    return summary(args, contestants)


def report(args, result: dict) -> None:
    print(f"{result['model']} {result['size']}, batch {result['batch']} x {result['seq_len']}, compile "
          f"{'on' if result['compile'] else 'off'}, activation checkpointing "
          f"{result['checkpoint_activations']}; medians of {args.pairs} rounds of {args.steps} steps\n")
    columns = ["", "precision", "attention", "tokens/s", "ms a step", "host ms, empty queue",
               "ms in launches", "CPU ms a step", "SM MHz", "W of limit", "MFU", "peak GB", "s to first step",
               "loss", "after steps"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, r in result["contestants"].items():
        if "seconds" in r:
            mfu = f"{r['mfu']:.1%}" if r["mfu"] else "-"
            host = f"{1000 * r['host']:,.1f}" if r["host"] else "-"
            launching = f"{1000 * r['launching']:,.1f} in {r['launches']:,.0f}" if r.get("launches") else "-"
            mhz = f"{r['sm_mhz']:,.0f}" if r["sm_mhz"] else "-"
            watts = f"{r['watts']:.0f} of {r['watts_limit'] or math.nan:.0f}" if r["watts"] else "-"
            print(f"| {name} | {r['precision']} | {r.get('attention') or '-'} | {r['tokens_per_sec']:,.0f} | "
                  f"{1000 * r['seconds']:,.1f} | {host} | {launching} | {1000 * r['cpu']:,.1f} | {mhz} | "
                  f"{watts} | {mfu} | {r['gb']:.2f} | {r['first_step']:.1f} | {r['loss']:.4f} | "
                  f"{r['steps']} |")
    for name, r in result["contestants"].items():
        if "error" in r:
            print(f"\n{name}: {r['error']}")
    for name, clocks in result["ratios"].items():
        for clock, (low, median, high) in clocks.items():
            what = "wall clock" if clock == "seconds" else "CPU time"
            print(f"\n{what}: ours is {median:.2f} x as fast as {name} ({low:.2f} to {high:.2f})")
    for name, r in result["contestants"].items():
        if "kernels" in r:
            print(f"\n{name}, a step:\n\n| kernel | calls | ms | share |\n|---|---|---|---|")
            for k in r["kernels"]:
                print(f"| {k['name']} | {k['calls']:g} | {k['ms']:.2f} | {k['share']:.1%} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=TRAINERS)
    parser.add_argument("--size", help="one of the trainer's sizes, or baby: nanoGPT's for a CPU "
                        "(gpt2, 25m, 17m)")
    parser.add_argument("--peer", choices=("hf", "trainer", "nanogpt"))
    parser.add_argument("--also", action="append", default=[], metavar="FLAGS", help="ours again, with "
                        "flags such as --also=--fast or --also='--checkpoint-activations block', or from "
                        "another checkout: --also='--code DIR'")
    parser.add_argument("--peer-source", type=in_home, metavar="DIR", help="directory of nanoGPT's model.py")
    parser.add_argument("--peer-precision", choices=("fp32", "bf16"), help="(what ours has; nanogpt "
                        "on a CPU: fp32)")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    for flag in ("--batch", "--seq-len", "--n-layer", "--vocab-size", "--threads"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--steps", type=int, default=2, help="steps of a round (2)")
    parser.add_argument("--pairs", type=int, default=5, help="number of rounds (5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round (2)")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="afterwards, profile "
                        "this many steps and show the slowest kernels (0)")
    parser.add_argument("--fast", action="store_true", help="ours without deterministic algorithms")
    parser.add_argument("--checkpoint-activations", choices=("none", "block", "selective"), default="none")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile (default: on GPUs)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=in_home, help="append the numbers to this file as a line")
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
        from ops.device import compute_dtype
        dtype = compute_dtype(args.precision, torch.device(args.device))
        fp32 = dtype == torch.float32 or args.peer == "nanogpt" and args.device == "cpu"
        args.peer_precision = "fp32" if fp32 else "bf16"
    if args.peer == "nanogpt" and (args.model != "gpt2" or not args.peer_source):
        parser.error("--peer nanogpt is for gpt2 and needs --peer-source.")
    args.ours = {"ours": (Path(__file__), [])}
    if not args.contestant:
        args.ours |= {f"ours {flags}": of_checkout(shlex.split(flags)) for flags in args.also}
    return args


def main() -> None:
    args = parse_args()
    if args.contestant:
        return contestant(args)
    import torch
    print(f"python {platform.python_version()}, torch {torch.__version__}, {args.device}", flush=True)
    result = measure(args)
    append(args, "result", result)
    report(args, result)
    if failed := [name for name, r in result["contestants"].items() if "error" in r]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
