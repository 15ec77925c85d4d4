"""What a run says before its first step, and what gets its records."""

from collections import Counter
from dataclasses import replace

import torch

from cli.flags import flag_fields, flags_of_model
from loggers.machine import begin_curves
from loggers.picture import History
from loggers.tensorboard import EventFile
from loggers.wandb import WandbRun
from model import blocks_of, num_params
from monitor import NO_BYTES
from prepare.pipeline import LARGER_SPLIT


def too_short(dataset) -> str:
    """A sentence about the validation sets that fill no row, of which there are some."""
    listed = " and ".join(f"{name or 'val'} ({n} tokens)" for name, n in dataset.short.items())
    text = (f"an evaluation leaves out the validation set {listed}, which fills no row of "
            f"{dataset.train.seq_len}")
    longest = min(dataset.short.values()) - 1
    if longest > 0:
        text += f"; --seq-len {longest} would hold it, in a new run or with --eval-only"
    return text


def loggers_of(run, log) -> list:
    """What gets the records of a run beside metrics.jsonl, see monitor.RunLog."""
    begin_curves(log.say)
    loggers = [EventFile(log, run.dataset.train.rows * run.args.seq_len)]
    if run.args.wandb:
        loggers.append(WandbRun(log))
    return [*loggers, History(log)]


def say_plan(run, state, log, machines: Counter, compiled: bool):
    """Prints what will be trained, where, how and on what. `machines` counts the processes by what
    loggers.machine.hardware says of theirs; `compiled` is whether blocks are.
    """
    world, dataset = run.world, run.dataset
    settings = log.settings
    model = state.model
    c = model.config
    blocks = blocks_of(model)
    row = run.row
    usual = replace(c, **{field.name: row.get(field.name, field.default) for field in flag_fields(type(c))})
    shape = [f"{name} {value}" for name, value in flags_of_model(type(c), c).items()
             if value != getattr(usual, name) or name == "attention"]  # which the data may choose
    parameters = (f"{num_params(model):,} parameters, {sum(map(num_params, blocks)):,} of them in "
                  f"{len(blocks)} blocks")
    ids = f"vocabulary {c.vocab_size:,}, padded to {c.padded_vocab:,}"
    name = type(model).__name__.removeprefix("FSDP")  # which has shards
    run.say("; ".join([f"{name} {settings['size']}: {parameters}", *shape, ids]))
    trained = []
    for inner, optimizer in zip(state.inner, state.optimizers):
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        trained.append(f"{type(inner).__name__} trains {count:,}")
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    run.say(f"of these parameters {', '.join(trained)}, and {frozen:,} are frozen")
    if not blocks:
        run.say(f"WARNING: no layer of {name} inherits Block of model.py, so none is "
                "compiled, recomputed by --checkpoint-activations or sharded by itself")

    hosts = ", ".join(f"{count} x {name}" for name, count in machines.items())
    processes = (f"processes {world.world_size}, nodes {world.nodes}, backend {world.backend} "
                 f"(--backend {settings['backend']}, on {world.device.type})")
    scaler = f"GradScaler {'on' if state.scaler.is_enabled() else 'off'}"
    compiling = f"compile {'on' if compiled else 'off'}"
    saving = f"activation checkpointing {settings['checkpoint_activations']}, strategy {settings['strategy']}"
    fast = ", --fast: a resumed run differs in the last bits" if settings["fast"] else ""
    run.say(f"{processes}, {hosts}, threads per process {torch.get_num_threads()}; activations "
            f"{settings['precision']}, no autocast, {scaler}, {compiling}, {saving}{fast}")

    rows = dataset.train.rows
    read = (f"{dataset.train.num_tokens:,} training tokens, {rows:,} rows of {settings['seq_len']}, loss "
            f"{dataset.loss}")
    validation = (f"{log.val_tokens:,} validation tokens of unigram entropy {log.entropy:.4f} (losses "
                  "are in nats per token; a model without any context reaches none below that)")
    held_out = [shards.rows for shards in dataset.val.values()]
    limit = settings["eval_batches"] * settings["eval_batch"] or max(held_out, default=0)
    evaluated = sum(min(limit, rows) for rows in held_out)
    run.say(f"data {dataset.name}: {read}; {validation}; an evaluation reads {evaluated:,} of "
            f"{sum(held_out):,} rows")

    sequences = run.global_batch
    passes = run.steps * sequences / rows
    batch = f"{run.batch} x accumulation {run.grad_accum} x processes {world.world_size}"
    tokens = f"{sequences * settings['seq_len']:,} tokens a step"
    run.say(f"batch {batch} = {sequences} sequences, {tokens}; {run.steps} steps, "
            f"{rows / sequences:.1f} an epoch")
    if passes > 20 and not settings["epochs"] and dataset.loss == "all":  # pairs need many passes
        run.say(f"WARNING: the run reads this text {passes:,.0f} times: for a small one give --epochs 3 and "
                "a smaller --global-batch, or start with --init-from")
    if settings["epochs"] and run.steps < 100:
        run.say(f"WARNING: {run.steps} steps are too few to learn much: try --steps 300, more "
                "--epochs or a smaller --global-batch")
    warmup = settings["warmup"] if settings["warmup"] >= 1 else settings["warmup"] * run.steps
    if warmup > run.steps / 3:
        run.say(f"WARNING: the learning rate rises in {warmup:.0f} of {run.steps} steps: give a smaller "
                "--warmup or more steps")
    if not all(getattr(rows, "byte_ratio", 1) > 0 for rows in dataset.val.values()):  # it may be NaN
        run.say(NO_BYTES)
    if len(dataset.val_splits) > 1:
        run.say(f"WARNING: the directories hold out unlike parts ({', '.join(sorted(dataset.val_splits))}): "
                "a document that two of them have may be evaluated on through one and trained on through the "
                "other; if they share any, prepare all with the same --val-split, such as hash:0.1")
    if dataset.short:
        run.say(f"WARNING: {too_short(dataset)}")
    elif not dataset.val:
        run.say("WARNING: the data have no validation set, so there is no evaluation and no best.pt: prepare "
                f"them with {LARGER_SPLIT} in another directory")
