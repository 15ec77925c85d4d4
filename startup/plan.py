"""The plan of a run: its batches and loggers, and what it shows at its start and at its end."""

import math
import os
import shlex
import textwrap
from collections import Counter
from dataclasses import replace

import torch
from tqdm import tqdm  # comes with datasets

from cli.errors import UserError, from_launcher
from cli.flags import flag_fields, flags_of_model
from ddp_utils import process
from loggers.machine import begin_curves
from loggers.picture import History
from loggers.tensorboard import EventFile
from loggers.wandb import WandbRun
from model import blocks_of, num_params
from prepare.pipeline import HOLD_OUT_MORE


def micro_batch_of(share: int, batch: int | None, grad_accum: int | None, largest: int) -> int:
    """The micro-batch size for a process's `share` of a global batch, or 0 if --batch and --grad-accum do not
    divide it. A flag that is not given is None. With neither, it is the largest divisor of the share up to
    `largest`.
    """
    if grad_accum:
        batch = batch or share // grad_accum
        return batch if batch * grad_accum == share else 0
    if batch:
        return batch if share % batch == 0 else 0
    return max(b for b in range(1, min(share, largest) + 1) if share % b == 0)


def plan_batch(world_size: int, global_batch: int | None, batch: int | None, grad_accum: int | None,
               wanted: int, largest: int) -> tuple[int, int, int]:
    """Returns (global batch, micro-batch, accumulation steps), in sequences; global batch = micro-batch ×
    accumulation steps × world size. Flags that are not given are None.

    A given global batch is used, or refused with a UserError that names the nearest fit. Otherwise it is
    `wanted`, the number of the recipe or of the run so far. If the world size does not divide that, it is the
    multiple of the world size within 5 % of `wanted` that allows the largest micro-batch, up to `largest`.

    With a range of nodes (see cluster/ddp_launch.sh) it stays the same, so each number of them divides it: it
    is the nearest such number.
    """
    unit = world_size
    fewest, _, most = os.environ.get("NNODES", "").partition(":")
    if most:
        if batch and grad_accum:
            raise UserError("--batch and --grad-accum together fit only one number of nodes: leave "
                            "--grad-accum out.")
        unit = math.lcm(*range(int(fewest), int(most) + 1)) * from_launcher("LOCAL_WORLD_SIZE", 1)
        unit *= batch or grad_accum or 1
        global_batch = global_batch or max(1, round(wanted / unit)) * unit
    elif global_batch is None and batch and grad_accum:
        global_batch = batch * grad_accum * world_size
    elif global_batch is None and wanted % world_size == 0:
        global_batch = wanted
    elif global_batch is None:
        exact = wanted / world_size  # sequences per process
        fitting = {}  # micro-batch by share, for shares within 5 %
        for share in range(math.ceil(0.95 * exact), math.floor(1.05 * exact) + 1):
            if micro := micro_batch_of(share, batch, grad_accum, largest):
                fitting[share] = micro
        unit = batch or grad_accum or 1
        share = max(1, round(exact / unit)) * unit
        if fitting:
            share = max(fitting, key=lambda share: (fitting[share], -abs(share - exact)))
        global_batch = share * world_size
    if global_batch % unit:
        low = global_batch // unit * unit
        fits = " or ".join(str(n) for n in (low, low + unit) if n > 0)
        raise UserError(f"a global batch of {global_batch} sequences is not a multiple of {unit}, so it "
                        f"cannot be divided among the processes: use --global-batch {fits}.")
    share = global_batch // world_size
    micro = micro_batch_of(share, batch, grad_accum, largest)
    if not micro:
        wish = batch or share // grad_accum
        nearest = min((b for b in range(1, share + 1) if share % b == 0), key=lambda b: abs(b - wish))
        given = f"--grad-accum {grad_accum}" if grad_accum else f"--batch {batch}"
        raise UserError(f"{given} does not fit: {global_batch} sequences are {share} for each of "
                        f"{world_size} processes. Use --batch {nearest} --grad-accum {share // nearest}, "
                        f"or --global-batch {(batch or 1) * (grad_accum or 1) * world_size}.")
    return global_batch, micro, share // micro


def loggers_of(run, log) -> list:
    """The loggers that get the records of a run, see monitor.RunLog."""
    begin_curves(log.say)
    loggers = [EventFile(log)]
    if run.args.wandb:
        loggers.append(WandbRun(log, process))
    return [*loggers, History(log)]


# for the lines of a table; a long word, such as a path, stays whole on its own line
WRAPPER = textwrap.TextWrapper(80, subsequent_indent=14 * " ", break_long_words=False, break_on_hyphens=False)

NEXT_VALUE = "\n              "  # below the first


def wrap_lines(table: str) -> str:
    return "\n".join(map(WRAPPER.fill, table.splitlines()))


def describe_shape(model) -> str:
    """A model's shape in one line."""
    get = vars(model.config).get
    return (f"layers {get('n_layer', '-')}, heads {get('n_head', '-')}, width {get('d_model', '-')}, "
            f"context {get('seq_len')}, parameters {tqdm.format_sizeof(num_params(model))}")


def say_plan(run, state, log, heading: str, machines: Counter, compiled: bool):
    """Prints `heading` and the plan of a run as a table, then warnings about the plan. `machines` counts the
    processes on each kind of hardware. `compiled` says whether blocks are compiled.
    """
    world, dataset = run.world, run.dataset
    settings = log.settings
    model = state.model
    c = model.config
    blocks = blocks_of(model)
    usual = replace(c, **{field.name: run.size_defaults.get(field.name, field.default)
                          for field in flag_fields(type(c))})
    name = type(model).__name__.removeprefix("FSDP")  # sharded models have that prefix
    flags = "".join(f", {name} {value}" for name, value in flags_of_model(type(c), c).items()
                    if value != getattr(usual, name) or name == "attention")  # depends on the data
    parts = []
    for inner, optimizer in zip(state.inner, state.optimizers):
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        parts.append(f"{type(inner).__name__} trains {count:,}")
    rows = dataset.train.rows
    held_out = [shards.rows for shards in dataset.val.values()]
    limit = settings["eval_batches"] * settings["eval_batch"] or max(held_out, default=0)
    batch = run.global_batch
    run.say(heading + "\n" + wrap_lines(f"""machine
  world size  {world.world_size}, nodes {world.nodes}
  hardware    {NEXT_VALUE.join(f"{count} x {name}" for name, count in machines.items())}
  threads     {torch.get_num_threads()} per process
  backend     {world.backend} (--backend {settings["backend"]}, on {world.device.type})
  strategy    {settings["strategy"]}
  precision   {settings["precision"]}, no autocast, GradScaler {"on" if state.scaler.is_enabled() else "off"}
  compile     {"on" if compiled else "off"}{", --fast: resumes aren't exact" if settings["fast"] else
              "; --fast: 5 to 8 % faster on an H200, resumes aren't exact" * (world.device.type == "cuda")}
  recompute   {settings["checkpoint_activations"]} (--checkpoint-activations{run.needs and f"; {run.needs}"})
model and data
  model       {describe_shape(model)}
  size        {name} {settings["size"]}{flags}
  parameters  {num_params(model):,}, {sum(map(num_params, blocks)):,} of them in {len(blocks)} blocks
  optimizer   {", ".join(parts)}; {sum(p.numel() for p in model.parameters() if not p.requires_grad):,} frozen
  vocabulary  {c.vocab_size:,}, padded to {c.padded_vocab:,}
  data        {dataset.name}
  training    {dataset.train.num_tokens:,} tokens, {rows:,} rows of {settings["seq_len"]}, loss {dataset.loss}
  validation  {log.val_tokens:,} tokens, unigram entropy {log.entropy:.4f} nats per token
  evaluation  {sum(min(limit, rows) for rows in held_out):,} of {sum(held_out):,} rows
steps and batches
  batch       {run.batch} x accumulation {run.grad_accum} x processes {world.world_size} = {batch} sequences
  steps       {run.steps:,}, {rows / batch:.1f} an epoch
  tokens      {batch * settings["seq_len"]:,} a step, {run.steps * batch * settings["seq_len"]:,} in all"""))

    passes = run.steps * batch / rows
    if passes > 20 and not settings["epochs"] and dataset.loss == "all":  # pairs need many passes
        run.say(f"WARNING: the run reads this text {passes:,.0f} times: for a small text give --epochs 3 and "
                "a smaller --global-batch, or start with --init-from")
    warmup = settings["warmup"] if settings["warmup"] >= 1 else settings["warmup"] * run.steps
    if warmup > run.steps / 3:
        run.say(f"WARNING: the learning rate rises in {warmup:.0f} of {run.steps} steps: give a smaller "
                "--warmup or more --steps")
    if len(dataset.val_splits) > 1:
        run.say("WARNING: the data directories hold out different parts "
                f"({', '.join(sorted(dataset.val_splits))}), so a document in two of them can be in training "
                "and in validation: if they share documents, prepare all with the same --val-split, such as "
                "hash:0.1")
    if dataset.short:
        run.say(f"WARNING: {dataset.too_short()}")
    elif not dataset.val:
        run.say(f"WARNING: the data have no validation set: to evaluate, prepare them again {HOLD_OUT_MORE}")


def what_next(run, stopped: bool) -> str:
    """The command that uses a run, and if it has `stopped` the one that resumes it."""
    use = "--chat" if run.dataset.marker_ids["response"] >= 0 else "--prompt The"
    if "fill" in run.args:
        use = "--fill 'The [MASK] sat.'"
    if run.dataset.vocab_size:  # its ids aren't text
        use = "--eval-only"
    start = f"python {shlex.quote(os.path.relpath(run.trainer))} --out {shlex.quote(str(run.out))}"
    resume = f"\n  {run.command}" if stopped else ""
    return f"next:\n  {start} {use}{resume}"
