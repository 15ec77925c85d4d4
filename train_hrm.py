"""Trains a Hierarchical Reasoning Model for text (arXiv 2605.20613), on one process or on many.

    torchrun --nproc_per_node=2 train_hrm.py                 # tiny, Python's own source: minutes on a laptop
    torchrun --nproc_per_node=8 train_hrm.py --size 1b       # eight GPUs, FineWeb-Edu
    torchrun --nproc_per_node=2 train_hrm.py --data 'text:books/*.txt' --tokenizer bpe:4096

Run the same command again and it goes on where it stopped. Without torchrun it is one process:

    python train_hrm.py --prompt "def main("                 # the newest checkpoint continues a text
    python train_hrm.py --export                             # and becomes a directory for transformers
"""

import argparse
import json
import math
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch

import data
import monitor
from data import UserError
from ddp_utils import (ArgumentParser, Checkpoints, Outer, StopVote, add_common_flags, add_sampling_flags,
                       assert_in_sync, assert_same_flags, check_resumable, claim, clip_gradients, compiles,
                       compute_dtype, dry_run, evaluate, init, load_data, load_to_resume, no_sync, number,
                       on_main, optimizer_step, positive, reduce_sum, restore, restore_local, run, seed_step,
                       settings_of, shard_optimizers, share, start_model, table_of, tokenizer_id,
                       use_defaults, use_text_model, warm_up, wrap)
from model import (EMA, HRM, Block, HRMConfig, continue_text, learning_rate, make_optimizers, num_params,
                   pad_vocab, reshard)

# Only `tiny` has been tuned, on two CPU cores; 1b has the learning rate and batch of the paper.
COLUMNS = ("d_model", "n_head", "n_layer", "ff", "seq_len", "global_batch", "batch", "lr", "warmup", "steps",
           "eval_every", "save_every", "eval_batches", "checkpoint_activations", "data")
SIZES = {name: dict(zip(COLUMNS, row)) for name, row in {
    "tiny": (128, 2, 2, 384, 256, 16, 8, 3e-3, 30, 300, 100, 100, 0, "none", "stdlib"),
    "25m": (320, 5, 3, 1024, 1024, 256, 32, 1e-3, 200, 2000, 250, 250, 20, "none", "fineweb-edu"),
    "100m": (640, 10, 6, 1792, 1024, 1024, 64, 6e-4, 200, 2000, 250, 250, 10, "none", "fineweb-edu"),
    "350m": (1024, 8, 11, 2816, 1024, 1024, 32, 3e-4, 500, 7000, 500, 500, 10, "block", "fineweb-edu"),
    "1b": (1536, 12, 16, 4096, 1024, 768, 24, 2.2e-4, 1000, 27000, 500, 500, 10, "block", "fineweb-edu"),
}.items()}
MODEL_FLAGS = ("n_layer", "n_head", "d_model", "ff", "seq_len", "h_cycles", "l_cycles", "tie", "dropout",
               "inject_input", "halt", "max_cycles")
RAMP = 0.2  # share of the run over which bp_steps and the ponder cost grow

# -----------------------------------------------------------------------------------------------------------
# Command line


def bp_range(text: str) -> tuple[int, int]:
    """'2:5' → (2, 5), and '5' → (5, 5)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match or not 2 <= int(match[1]) <= int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 2 on nor a ramp such as 2:5")
    return int(match[1]), int(match[2] or match[1])


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, epilog=table_of(SIZES))
    parser.add_argument("--size", choices=SIZES, default="tiny", help="the row of defaults below (tiny)")
    add_common_flags(parser)
    g = parser.add_argument_group("model")
    g.add_argument("--n-layer", type=positive, help="blocks in each of the two stacks")
    g.add_argument("--n-head", type=positive, help="attention heads")
    g.add_argument("--d-model", type=positive, help="channels")
    g.add_argument("--ff", type=positive, help="hidden units of the MLP")
    g.add_argument("--vocab-size", type=positive, help="rows of the embedding table (default: the ids of the "
                   "tokenizer, rounded up to a multiple of 64)")
    g.add_argument("--h-cycles", type=positive, default=2, help="calls of the slow stack H (2)")
    g.add_argument("--l-cycles", type=positive, default=3, help="calls of the fast stack L for each of H (3)")
    g.add_argument("--bp-steps", type=bp_range, help="last stack calls that backpropagation goes through: a "
                   "number, or a ramp A:B over the first fifth of the run (2:5; with --untie at least "
                   "--h-cycles + 1)")
    g.add_argument("--tie", action="store_true", default=True, help="output head = embedding table (default)")
    g.add_argument("--untie", dest="tie", action="store_false", help="give the output head its own weights")
    g.add_argument("--dropout", type=share, default=0.0, help="(0)")
    g.add_argument("--inject-input", action="store_true", help="add the embedded input to every input of L, "
                   "as the first HRM paper does")
    g.add_argument("--halt", action="store_true", help="let each token choose its number of H-cycles")
    g.add_argument("--max-cycles", type=positive, default=4, help="most H-cycles with --halt (4)")
    g.add_argument("--ponder-cost", type=number(0), default=0.01, help="weight of the cost of cycles with "
                   "--halt, after a warm-up from 0 over the first fifth of the run (0.01)")
    add_sampling_flags(parser)
    args = parser.parse_args()
    use_defaults(args, {k: v for k, v in SIZES[args.size].items() if k not in ("global_batch", "batch")})
    cycles = args.max_cycles if args.halt else args.h_cycles
    low = 2 if args.tie else cycles + 1  # so far back the embedding, untied, gets its gradient
    args.bp_steps = args.bp_steps or (low, max(low, 5))
    calls = cycles * (args.l_cycles + 1)
    if args.bp_steps[1] > max(calls, 5):
        raise UserError(f"--bp-steps {args.bp_steps[1]} is more than the {calls} stack calls that there are.")
    return args


# -----------------------------------------------------------------------------------------------------------
# Pieces of a run


def bp_steps_at(step: int, steps: int, bp_range: tuple[int, int]) -> int:
    low, high = bp_range
    return low + int(min(1.0, step / (RAMP * steps)) * (high - low))


# -----------------------------------------------------------------------------------------------------------
# The run


def main() -> None:
    args = parse_args()
    if args.dry_run:
        return dry_run(HRM, args, MODEL_FLAGS, SIZES[args.size], lambda model, x: model(
            x, x, bp_steps=args.bp_steps[1], ponder_weight=1.0, fixed_depth=True)[0])
    world = init(args.backend, args.device, args.timeout)
    assert_same_flags(world, vars(args))
    directory = data.directory_of(args.data, args.tokenizer)
    out = args.out or Path("runs", f"hrm-{args.size}-{directory.name}")
    if args.export or args.prompt is not None:
        return use_text_model(HRM, args, world, out)

    # ------------------------------------------------------------------------------------------------- data
    with torch.device("meta"):
        nominal = num_params(HRM(HRMConfig(**{flag: getattr(args, flag) for flag in MODEL_FLAGS})))
    dataset = load_data(args, world, directory, nominal)
    tokenizer, rows = dataset.tokenizer, dataset.train.rows
    preset = SIZES[args.size]
    global_batch, batch, grad_accum = data.plan_batch(
        world.world_size, args.global_batch, args.batch, args.grad_accum,
        preset["global_batch"], preset["batch"])
    steps = math.ceil(args.epochs * rows / global_batch) if args.epochs else args.steps

    # ------------------------------------------------------------------- model, optimizer, state to resume
    lock = claim(out, world)
    log = monitor.RunLog(out, world.main, world.prefix, steps, args.wandb, args.profile)
    saved = load_to_resume(out, args.resume, world, log.say)
    config = HRMConfig(vocab_size=tokenizer.vocab_size,
                       padded_vocab=args.vocab_size or pad_vocab(tokenizer.vocab_size),
                       **{flag: getattr(args, flag) for flag in MODEL_FLAGS})
    model = start_model(HRM, config, args, tokenizer, world, saved, log.say)
    dtype = model.compute_dtype = compute_dtype(args.precision, world.device)
    optimizers = make_optimizers(model, args.optimizer, args.lr, (args.beta1, args.beta2), args.weight_decay)
    optimizers = shard_optimizers(optimizers, args.strategy)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    ema = EMA(model, args.ema) if args.ema else None
    outer = args.outer_every and Outer(model, args.outer_every, args.outer_start, args.outer_lr,
                                       args.outer_momentum)

    settings = settings_of(args) | {
        "steps": steps, "global_batch": global_batch, "batch": batch, "grad_accum": grad_accum,
        "world_size": world.world_size, "precision": str(dtype).removeprefix("torch.")}
    identity = {"family": "HRM", "model_config": asdict(model.config), "seq_len": args.seq_len,
                "tokenizer": tokenizer_id(tokenizer), "data": dataset.fingerprint, "seed": args.seed,
                "settings": settings}
    assert_same_flags(world, settings)  # now with all defaults and --precision auto resolved
    step = samples = 0
    ends_epoch = False  # whether the samples of the last step reached into the next pass over the data
    epoch = {"loss": 0.0, "steps": 0, "seconds": 0.0}  # of the steps since the last epoch ended
    if saved:
        check_resumable(saved, identity, log.say)
        restore(saved, world, model, optimizers, ema, scaler, outer)
        step, samples = saved["step"], saved["samples"]
        epoch, ends_epoch = saved["epoch"], saved["ends_epoch"]

    def is_logged():
        return step == 1 or step % args.log_every == 0 or step >= steps or ends_epoch or evaluates()

    def evaluates():
        due = step % args.eval_every == 0 or step >= steps or ends_epoch
        return due and dataset.val is not None

    logged = on_main(world, lambda: log.begin(
        step, settings, lambda record: record["val_loss"] is not None or not evaluates()))
    if world.main:
        data.write_atomically(out / "config.json", json.dumps(identity, indent=2).encode())
        data.write_atomically(out / "tokenizer.json", tokenizer.to_json().encode())

    compiled = compiles(world.device) if args.compile is None else args.compile
    for block in (m for m in model.modules() if isinstance(m, Block)):
        block.checkpointing = args.checkpoint_activations
        if compiled:
            block.compile()  # one graph serves every depth
    wrapped = wrap(model, world, args.comm, args.warmup)

    # -------------------------------------------------------------------------- say what is going to happen
    c = model.config
    entropy = data.unigram_entropy(dataset.val or dataset.train)
    log.say(f"HRM {args.size}: {num_params(model):,} parameters; d_model {c.d_model}, {c.n_head} heads, "
            f"{c.n_layer} blocks in each of 2 stacks, {c.cycles} x {c.l_cycles} cycles"
            f"{' at most' if c.halt else ''}, bp_steps {args.bp_steps[0]} to {args.bp_steps[1]}, "
            f"{c.vocab_size} ids in {c.padded_vocab} rows")
    log.say(f"{world.world_size} processes on {world.nodes} nodes, backend {world.backend} "
            f"({world.backend_reason}), device {world.device.type} with {torch.get_num_threads()} threads; "
            f"activations {settings['precision']}, no autocast, GradScaler "
            f"{'on' if scaler.is_enabled() else 'off'}, compile {'on' if compiled else 'off'}, "
            f"activation checkpointing {args.checkpoint_activations}, strategy {args.strategy}")
    log.say(f"data {dataset.name}: {dataset.train.num_tokens:,} training tokens, {rows:,} rows of "
            f"{args.seq_len}; {dataset.val.num_tokens if dataset.val else 0:,} validation tokens of unigram "
            f"entropy {entropy:.4f}")
    log.say(f"batch {batch} x accumulation {grad_accum} x {world.world_size} processes = {global_batch} "
            f"sequences, {global_batch * args.seq_len:,} tokens a step; {steps} steps, "
            f"{rows / global_batch:.1f} an epoch")
    log.say(f"run directory {out}" + (f", resuming after step {step} from {saved['path']}" if saved else ""))

    # --------------------------------------------------------------------------------------------- get going
    # `record` describes the last step as long as something is to be done about it: after a step that is due,
    # and after a resume unless it was done before the run was stopped.
    record = None if logged or not saved else saved["record"]
    if step >= steps and record is None:
        log.say(f"this run is complete after {step} steps: raise --steps to go on, give another --out to "
                "train anew, or try --prompt or --export")
        return log.close()
    if logged and ends_epoch:
        epoch = dict.fromkeys(epoch, 0)
    epoch_loss = torch.tensor(epoch["loss"] if world.main else 0, dtype=torch.float64, device=world.device)
    epoch_begun = time.perf_counter() - epoch["seconds"]
    val_losses = [r["val_loss"] for r in log.records if r["val_loss"] is not None]
    evaluations = on_main(world, lambda: len(val_losses))  # only rank 0 has read the log
    peak = monitor.peak_flops(world.device, log.say)

    example = torch.zeros((batch, args.seq_len), dtype=torch.long, device=world.device)
    warm_up(wrapped, *(
        lambda bp=bp: wrapped(example, example, bp_steps=bp, ponder_weight=1.0, fixed_depth=True)[0]
        for bp in args.bp_steps))
    powersgd = getattr(wrapped, "powersgd", None)
    if powersgd:
        powersgd.iter = step
    if saved:
        restore_local(saved, world, model, optimizers, outer, powersgd, args.comm, log.say)
        del saved["tensors"]
    loader = data.Loader(dataset.train, batch, world.rank, world.world_size, args.seed, world.device, samples)
    resumed_here = saved and Path(saved["path"]).parent == out / "checkpoints"
    checkpoints = Checkpoints(out, world, args.keep_last, log.say, saved_step=step if resumed_here else None,
                              best=min(val_losses, default=math.inf))

    def save():
        log.phase("save")
        position = {"samples": samples, "record": record, "epoch": epoch, "ends_epoch": ends_epoch}
        checkpoints.save(step, record["loss"], identity | position, model, optimizers, ema, scaler, outer,
                         powersgd)
        log.phase("other")

    def show_sample():  # on all ranks, each of which may hold a shard
        if ema:
            ema.swap()
        text = continue_text(model, tokenizer, world.device, args.sample_prompt, args.max_new_tokens,
                             args.temperature, args.top_k, args.top_p, args.seed)
        log.sample(args.sample_prompt + "".join(text), step)
        if ema:
            ema.swap()

    # ---------------------------------------------------------------------------------------------- training
    vote, stopping = StopVote(world), 0
    apart = False  # whether the processes have parted since they last had the same parameters
    assert_in_sync(model.state_dict())
    checked, first, begun = step, step, time.perf_counter()
    window = begun, step  # tokens per second are counted from here to the next record
    while True:
        if record:  # save before evaluating, which can take long
            saves = step % args.save_every == 0 or step >= steps or evaluates() or stopping
            # a skipped update has changed nothing: no reason to push out an older checkpoint, but at the end
            saves = saves and (not record["skipped"] or step >= steps or stopping)
            if saves or step - checked >= 200 and not apart:
                assert_in_sync(model.state_dict())
                checked = step
            if saves and checkpoints.saved_step != step:
                save()
            if evaluates() and not stopping:
                log.phase("evaluation")
                batches = data.validation_batches(dataset.val, batch, world.rank, world.world_size,
                                                  world.device, args.eval_batches * global_batch or None)
                means, stopping = evaluate(model, ema, batches, world, vote)
                record["val_loss"] = None if stopping else means["loss"]
            if ends_epoch or step >= steps:
                record["epoch_loss"] = epoch["loss"] / epoch["steps"]
                record["epoch_seconds"] = epoch["seconds"]
            if is_logged() and not (evaluates() and record["val_loss"] is None):  # else after a resume
                log.write(record)
                log.step_line(record, (steps - step) * (time.perf_counter() - begun) / max(step - first, 1),
                              "apart" if apart else "OK" if args.strategy in ("ddp", "zero1") else "shards")
            if record["val_loss"] is not None:
                log.say(f"step {step} | validation loss {record['val_loss']:.4f} | unigram entropy "
                        f"{entropy:.4f}")
                if checkpoints.saved_step == step:
                    checkpoints.mark_best(record["val_loss"])
                log.save_history()
                evaluations += 1
                if args.sample_every and evaluations % args.sample_every == 0 and step < steps:
                    show_sample()
            if ends_epoch and not stopping:
                log.say(f"epoch {samples // rows} | training loss {epoch['loss'] / epoch['steps']:.4f} | "
                        f"validation loss {record['val_loss'] or math.nan:.4f} | "
                        f"{monitor.human_time(epoch['seconds'])}")
                epoch = dict.fromkeys(epoch, 0)
                epoch_loss.zero_()
                epoch_begun = time.perf_counter()
            record, window = None, (time.perf_counter(), step)
        if step >= steps or stopping:
            break

        apart = outer and outer.apart(step)
        seed_step(args.seed, step, world.rank)
        lr = learning_rate(step, steps, args.lr, args.warmup, args.schedule, args.min_lr_ratio)
        bp_steps = bp_steps_at(step, steps, args.bp_steps)
        ponder_weight = args.ponder_cost * min(1.0, step / (RAMP * steps))
        sums = torch.zeros(3, device=world.device)  # loss, cycles and ponder cost of this rank
        for micro_batch in range(grad_accum):
            log.phase("data")
            x, y = next(loader)  # (B, T) each
            log.phase("forward")
            with no_sync(wrapped, micro_batch < grad_accum - 1 or apart):
                objective, stats = wrapped(x, y, bp_steps=bp_steps, ponder_weight=ponder_weight)
                log.phase("backward")
                scaler.scale(objective / grad_accum).backward()
            sums += torch.stack((stats["loss"], stats["cycles"], stats["ponder"]))
        log.phase("optimizer")
        reshard(model)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = lr
        norm = clip_gradients(model.parameters(), args.grad_clip)
        optimizer_step(optimizers, scaler, norm, powersgd)
        wrapped.zero_grad(set_to_none=True)
        if ema:
            ema.update()

        ends_epoch = (samples + global_batch) // rows > samples // rows
        step, samples = step + 1, samples + global_batch
        sums /= grad_accum * world.world_size
        epoch_loss += sums[0]
        epoch["steps"] += 1
        vote.count(norm, scaler)
        stopping = vote.read()
        vote.start()
        if apart and (outer.meets(step) or evaluates() or step % args.save_every == 0 or step >= steps
                      or stopping):  # a checkpoint needs the same parameters on all ranks
            log.phase("other")
            outer.meet()
            apart = False
        log.tick(step)

        if is_logged() or ends_epoch or step % args.save_every == 0 or stopping:
            loss, cycles, ponder, epoch["loss"], skipped = reduce_sum(
                [*sums, epoch_loss, ~norm.isfinite()], world)
            now = time.perf_counter()
            epoch["seconds"] = now - epoch_begun
            tokens_per_sec = (step - window[1]) * global_batch * args.seq_len / (now - window[0])
            modes = ("none", args.checkpoint_activations)
            flops = [tokens_per_sec * model.flops_per_token(bp_steps, cycles, mode) for mode in modes]
            mfu, hfu = (f / (peak * world.world_size) if peak else None for f in flops)
            record = {"step": step, "loss": loss, "val_loss": None, "lr": lr, "grad_norm": norm.item(),
                      "skipped": int(skipped), "tokens": samples * args.seq_len,
                      "tokens_per_sec": round(tokens_per_sec, 1), "mfu": mfu, "hfu": hfu,
                      "mem_gb": round(monitor.memory_gb(world.device), 3), "bp_steps": bp_steps,
                      "cycles": cycles, "time": round(time.time(), 3)}
            record |= {"ponder": ponder} if args.halt else {}

    # ----------------------------------------------------------------------------------------------- the end
    loader.close()
    if not stopping:
        show_sample()
    checkpoints.close()
    vote.close()
    if stopping:
        log.say(f"stopped by {signal.Signals(stopping).name} after step {step}, with a checkpoint of step "
                f"{checkpoints.saved_step}: the same command goes on")
        return log.close()
    log.close()
    log.say(f"training complete: {step} steps, {samples * args.seq_len:,} tokens, the parameters "
            f"{'of all ranks were in sync' if args.strategy in ('ddp', 'zero1') else 'are in shards'}; "
            f"the run lies in {out}")
    lock.close()


if __name__ == "__main__":
    run(main)
