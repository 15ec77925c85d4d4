"""Trains a masked language model (ModernBERT's architecture), on one process or on many.

    torchrun --nproc_per_node=2 train_mlm.py                                # tiny, Python's own source
    torchrun --nproc_per_node=8 train_mlm.py --size base                    # 22 x 768, FineWeb-Edu
    python train_mlm.py --list-presets                                      # and the command for each
    torchrun --nproc_per_node=8 train_mlm.py --preset h200_8gpu_standard --data imdb

Run the same command again and it goes on where it stopped. Without torchrun it is one process:

    python train_mlm.py --fill "import [MASK] as np"                        # the five likeliest words
    python train_mlm.py --export                                            # a directory for transformers
    python train_mlm.py --probe labelled.jsonl                              # what the features are good for

Documents do not attend across their boundaries. Training masks --mask-rate of the tokens, evaluation always
the same 15 %.
"""

import argparse
import hashlib
import json
import math
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch

import data
import monitor
from data import UserError
from ddp_utils import (ArgumentParser, Checkpoints, Outer, StopVote, World, add_common_flags, assert_in_sync,
                       assert_same_flags, check_resumable, claim, clip_gradients, compiles, compute_dtype,
                       dry_run, evaluate, init, load_data, load_model, load_to_resume, local_rank, no_sync,
                       number, on_main, optimizer_step, positive, reduce_sum, restore, restore_local, run,
                       run_of, seed_step, settings_of, shard_optimizers, share, start_model, table_of,
                       tokenizer_id, use_defaults, warm_up, wrap)
from model import (EMA, MLM, Block, MLMConfig, learning_rate, make_optimizers, num_params, pad_vocab,
                   reshard, to_hf)

# Only `tiny` has been tuned, on two CPU cores. base and large have ModernBERT's shapes (arXiv 2412.13663).
COLUMNS = ("n_layer", "n_head", "d_model", "ff", "seq_len", "global_batch", "batch", "lr", "warmup", "steps",
           "eval_every", "save_every", "eval_batches", "checkpoint_activations", "data")
SIZES = {name: dict(zip(COLUMNS, row)) for name, row in {
    "tiny": (4, 2, 128, 192, 128, 64, 32, 3e-3, 50, 400, 100, 100, 0, "none", "stdlib"),
    "17m": (7, 4, 256, 384, 512, 256, 32, 1e-3, 200, 4000, 250, 250, 20, "none", "fineweb-edu"),
    "base": (22, 12, 768, 1152, 512, 1024, 64, 8e-4, 1000, 10000, 500, 500, 10, "none", "fineweb-edu"),
    "large": (28, 16, 1024, 2624, 512, 1024, 32, 5e-4, 1000, 20000, 500, 500, 10, "block", "fineweb-edu"),
}.items()}
MODEL_FLAGS = ("n_layer", "n_head", "d_model", "ff", "seq_len", "window", "global_every", "dropout")

# A preset is a whole recipe: GPUs, use, size, flags. The narrow ones are for learning how things work.
SHAPE = ("n_layer", "n_head", "d_model", "ff", "seq_len", "global_batch", "epochs")
PRESETS = {name: (gpus, use, "tiny", dict(zip(SHAPE, row))) for name, (gpus, use, row) in {
    "h200_8gpu_fast": (8, "does everything work?", (4, 4, 8, 32, 128, 512, 3)),
    "h200_8gpu_standard": (8, "a first look at a data set", (6, 8, 16, 64, 128, 256, 5)),
    "h200_8gpu_quality": (8, "the best of the narrow ones", (8, 12, 24, 96, 128, 128, 10)),
    "4gpu_standard": (4, "a first look on four GPUs", (4, 4, 8, 32, 128, 128, 5)),
    "2gpu_standard": (2, "a first look on two GPUs", (4, 4, 8, 32, 128, 64, 5)),
    "1gpu_standard": (1, "a first look on one GPU", (4, 4, 8, 32, 128, 16, 5)),
}.items()} | {
    "1gpu_17m": (1, "a small encoder worth using", "17m", {}),
    "8gpu_base": (8, "ModernBERT-base from scratch", "base", {}),
    "8gpu_large": (8, "ModernBERT-large from scratch", "large", {}),
}
EVAL_RATE = 0.15

# -----------------------------------------------------------------------------------------------------------
# Command line


def list_presets() -> None:
    print(f"{'preset':20} {'layers':>6} {'heads':>6} {'width':>6} {'batch':>6} {'length':>9}  use case")
    for name, (_, use, size, flags) in PRESETS.items():
        row = SIZES[size] | flags
        length = f"{row['epochs']} epochs" if "epochs" in row else f"{row['steps']} st."
        print(f"{name:20} {row['n_layer']:6} {row['n_head']:6} {row['d_model']:6} {row['global_batch']:6} "
              f"{length:>9}  {use}")
    print()
    for name, (gpus, _, size, _) in PRESETS.items():
        source = " --data imdb" if size == "tiny" else ""  # the larger ones need more text, FineWeb-Edu
        print(f"torchrun --nproc_per_node={gpus} train_mlm.py --preset {name}{source}")


def parse_args() -> tuple[argparse.Namespace, dict]:
    """The flags, and the row of defaults that they began with."""
    parser = ArgumentParser(description=__doc__, epilog=table_of(SIZES))
    parser.add_argument("--size", choices=SIZES, help="the row of defaults below (tiny)")
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help="a recipe, see --list-presets")
    parser.add_argument("--list-presets", action="store_true", help="print all presets with their commands")
    add_common_flags(parser)
    g = parser.add_argument_group("model")
    g.add_argument("--n-layer", type=positive, help="blocks")
    g.add_argument("--n-head", type=positive, help="attention heads")
    g.add_argument("--d-model", type=positive, help="channels")
    g.add_argument("--ff", type=positive, help="hidden units of the MLP")
    g.add_argument("--vocab-size", type=positive, help="rows of the embedding table (default: the ids of the "
                   "tokenizer and [MASK], rounded up to a multiple of 64)")
    g.add_argument("--window", type=positive, default=128, help="tokens that a local layer sees (128)")
    g.add_argument("--global-every", type=positive, default=3, help="each so many layers one sees all (3)")
    g.add_argument("--dropout", type=share, default=0.0, help="(0)")
    g = parser.add_argument_group("masking")
    g.add_argument("--mask-rate", type=number(0.001, 1, open_end=True), default=0.3, help="share of tokens "
                   "that are to be restored (0.3)")
    g.add_argument("--mask-all", action="store_true", help="replace all of them by [MASK], instead of "
                   "80 %% by [MASK] and 10 %% by random tokens")
    g.add_argument("--whole-words", action="store_true", help="mask whole words")
    g = parser.add_argument_group("using a run")
    g.add_argument("--fill", metavar="TEXT", help="print the likeliest tokens for each [MASK] in a text")
    g.add_argument("--probe", metavar="FILE", help="train a linear classifier on frozen features; each "
                   "line of the file is a JSON object with text and label")
    args = parser.parse_args()
    _, _, size, flags = PRESETS.get(args.preset, (0, "", args.size or "tiny", {}))
    if args.preset and args.size:
        raise UserError("--preset has a size of its own: leave --size out.")
    if args.steps:
        flags = {k: v for k, v in flags.items() if k != "epochs"}
    args.size, defaults = size, SIZES[size] | flags
    use_defaults(args, {k: v for k, v in defaults.items() if k not in ("global_batch", "batch")})
    return args, defaults


# -----------------------------------------------------------------------------------------------------------
# Using a run


def fill_masks(model: MLM, tokenizer, text: str) -> None:
    """Prints the five likeliest tokens for each [MASK] in a text, with their probabilities."""
    if "[MASK]" not in text:
        raise UserError('--fill needs a text with [MASK] in it, such as "The [MASK] sat on the mat".')
    ids = [tokenizer.eot]
    for i, part in enumerate(text.split("[MASK]")):
        ids += [tokenizer.mask] * (i > 0)
        # the blank before a word belongs to its token, so it is for the mask to restore
        ids += tokenizer.encode(part.rstrip() if i < text.count("[MASK]") else part).tolist()
    if len(ids) > model.config.seq_len:
        raise UserError(f"the text has {len(ids)} tokens, more than the {model.config.seq_len} of the model.")
    x = torch.tensor([ids], device=model.embed.weight.device)
    with torch.no_grad():
        logits = model(x)[0].float()[:, :tokenizer.vocab_size]  # (T, V)
    for position in (x[0] == tokenizer.mask).nonzero()[:, 0].tolist():
        probabilities, best = logits[position].softmax(dim=-1).topk(5)
        print("  ".join(f"{tokenizer.decode([i])!r} {p:.1%}"
                        for i, p in zip(best.tolist(), probabilities.tolist())))


def mean_bytes(batches, tokenizer, world: World) -> float:
    """Mean number of bytes of the tokens that are masked in these batches, over all ranks."""
    ids = max(tokenizer.vocab_size, tokenizer.mask + 1)
    lengths = torch.zeros(ids, dtype=torch.int64, device=world.device)
    for i, token in tokenizer.spellings().items():
        lengths[i] = len(token)
    labels = torch.cat([labels[labels >= 0] for _, _, labels in batches])
    size, count = reduce_sum([lengths[labels].sum(), len(labels)], world)
    return size / count


def features(model: MLM, rows: list[list[int]], embeddings_only: bool) -> torch.Tensor:
    """Mean over the tokens of each row of the last hidden states, or of the embeddings: float32 (rows, C)."""
    found = []
    for row in rows:
        x = torch.tensor([row], device=model.embed.weight.device)
        with torch.no_grad():
            found.append((model.embed(x) if embeddings_only else model.hidden(x))[0].float().mean(dim=0))
    return torch.stack(found)


def probe_accuracy(x: torch.Tensor, y: torch.Tensor, test: torch.Tensor) -> float:
    """Accuracy on the test rows of a logistic regression that was fitted to the others. x (N, C), y (N,)."""
    mean, std = x[~test].mean(dim=0), x[~test].std(dim=0) + 1e-6
    x = ((x - mean) / std).cpu()
    weight = torch.zeros(x.size(1) + 1, int(y.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        logits = x[~test] @ weight[1:] + weight[0]
        loss = torch.nn.functional.cross_entropy(logits, y[~test]) + 1e-3 * weight[1:].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    predicted = (x[test] @ weight[1:] + weight[0]).argmax(dim=1)
    return (predicted == y[test]).float().mean().item()


def probe(model: MLM, tokenizer, path: str) -> None:
    """Prints how well frozen features tell labels apart, beside a random encoder's and plain embeddings."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        texts, labels = [row["text"] for row in rows], [str(row["label"]) for row in rows]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text that is no string")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--probe {path} has no lines of JSON with text and label ({error!r}).") from None
    ids = [[tokenizer.eot, *tokenizer.encode(text).tolist()][:model.config.seq_len] for text in texts]
    names = sorted(set(labels))
    y = torch.tensor([names.index(label) for label in labels])
    test = torch.tensor([int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0 for text in texts])
    if len(names) < 2 or test.all() or not test.any():
        raise UserError(f"--probe {path} needs texts of two labels or more, some dozens of each.")
    torch.manual_seed(0)
    untrained = MLM(model.config).to(model.embed.weight.device)
    untrained.compute_dtype = model.compute_dtype
    print(f"{len(y)} texts, {len(names)} labels, {int(test.sum())} texts to test on; the commonest label: "
          f"{y[test].bincount().max() / test.sum():.1%}")
    for what, encoder, embeddings_only in (("trained encoder", model, False),
                                           ("random encoder", untrained, False),
                                           ("bag of trained embeddings", model, True)):
        print(f"{what}: {probe_accuracy(features(encoder, ids, embeddings_only), y, test):.1%}")


def use_run(args, world: World, out: Path) -> None:
    """--fill, --probe and --export: acts on the newest checkpoint of a run."""
    model, saved = load_model(MLM, out if args.resume == "auto" else args.resume, world, print)
    model.compute_dtype = compute_dtype(args.precision, world.device)
    model.eval()
    if not world.main:
        return
    out, tokenizer = run_of(saved, args, out)
    print(f"step {saved['step']} from {saved['path']}", flush=True)
    if args.export:
        to_hf(model, out / "hf", tokenizer)
        print(f"{out / 'hf'} is ready for AutoModelForMaskedLM.from_pretrained", flush=True)
    if args.fill is not None:
        fill_masks(model, tokenizer, args.fill)
    if args.probe is not None:
        probe(model, tokenizer, args.probe)


# -----------------------------------------------------------------------------------------------------------
# The run


def main() -> None:
    args, preset = parse_args()
    if args.list_presets:
        return list_presets() if local_rank() == 0 else None
    if args.dry_run:
        k = round(args.mask_rate * args.seq_len)
        return dry_run(MLM, args, MODEL_FLAGS, preset, lambda model, x: model(x, x[:, :k], x[:, :k])[0])
    world = init(args.backend, args.device, args.timeout)
    assert_same_flags(world, vars(args))
    directory = data.directory_of(args.data, args.tokenizer)
    out = args.out or Path("runs", f"mlm-{args.preset or args.size}-{directory.name}")
    if args.export or args.fill is not None or args.probe is not None:
        return use_run(args, world, out)

    # ------------------------------------------------------------------------------------------------- data
    with torch.device("meta"):
        nominal = num_params(MLM(MLMConfig(**{flag: getattr(args, flag) for flag in MODEL_FLAGS})))
    dataset = load_data(args, world, directory, nominal)
    tokenizer, rows = dataset.tokenizer, dataset.train.rows
    global_batch, batch, grad_accum = data.plan_batch(
        world.world_size, args.global_batch, args.batch, args.grad_accum,
        preset["global_batch"], preset["batch"])
    steps = math.ceil(args.epochs * rows / global_batch) if args.epochs else args.steps

    # ------------------------------------------------------------------- model, optimizer, state to resume
    lock = claim(out, world)
    log = monitor.RunLog(out, world.main, world.prefix, steps, args.wandb, args.profile)
    saved = load_to_resume(out, args.resume, world, log.say)
    ids = max(tokenizer.vocab_size, tokenizer.mask + 1)
    config = MLMConfig(vocab_size=ids, padded_vocab=args.vocab_size or pad_vocab(ids), eot=tokenizer.eot,
                       **{flag: getattr(args, flag) for flag in MODEL_FLAGS})
    model = start_model(MLM, config, args, tokenizer, world, saved, log.say)
    masker = data.Masker(tokenizer, args.seq_len, args.mask_rate, args.seed, args.mask_all, args.whole_words)
    eval_masker = data.Masker(tokenizer, args.seq_len, EVAL_RATE, 0)
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
    identity = {"family": "MLM", "model_config": asdict(model.config), "seq_len": args.seq_len,
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
            block.compile()
    wrapped = wrap(model, world, args.comm, args.warmup)

    # -------------------------------------------------------------------------- say what is going to happen
    c = model.config
    entropy = data.unigram_entropy(dataset.val or dataset.train)
    log.say(f"Config '{args.preset or args.size}': d_model={c.d_model}, layers={c.n_layer}, "
            f"heads={c.n_head}, ff={c.ff}, seq_len={c.seq_len}")
    log.say(f"MLM: {num_params(model):,} parameters, {c.vocab_size} ids in {c.padded_vocab} rows; masks "
            f"{masker.k} of {args.seq_len} tokens, {eval_masker.k} in evaluation")
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
                "train anew, or try --fill, --probe or --export")
        return log.close()
    if logged and ends_epoch:
        epoch = dict.fromkeys(epoch, 0)
    epoch_loss = torch.tensor(epoch["loss"] if world.main else 0, dtype=torch.float64, device=world.device)
    epoch_begun = time.perf_counter() - epoch["seconds"]
    val_losses = [r["val_loss"] for r in log.records if r["val_loss"] is not None]
    peak = monitor.peak_flops(world.device, log.say)

    example = torch.zeros((batch, args.seq_len), dtype=torch.long, device=world.device)
    masked = torch.arange(masker.k, device=world.device).expand(batch, -1)
    warm_up(wrapped, *[lambda: wrapped(example, masked, torch.zeros_like(masked))[0]] * 2)
    powersgd = getattr(wrapped, "powersgd", None)
    if powersgd:
        powersgd.iter = step
    if saved:
        restore_local(saved, world, model, optimizers, outer, powersgd, args.comm, log.say)
        del saved["tensors"]
    loader = data.Loader(dataset.train, batch, world.rank, world.world_size, args.seed, world.device, samples,
                         masker)
    resumed_here = saved and Path(saved["path"]).parent == out / "checkpoints"
    checkpoints = Checkpoints(out, world, args.keep_last, log.say, saved_step=step if resumed_here else None,
                              best=min(val_losses, default=math.inf))

    def validation_batches():
        return data.validation_batches(dataset.val, batch, world.rank, world.world_size, world.device,
                                       args.eval_batches * global_batch or None, eval_masker)

    if dataset.val:
        bytes_per_token = mean_bytes(validation_batches(), tokenizer, world)

    def save():
        log.phase("save")
        position = {"samples": samples, "record": record, "epoch": epoch, "ends_epoch": ends_epoch}
        checkpoints.save(step, record["loss"], identity | position, model, optimizers, ema, scaler, outer,
                         powersgd)
        log.phase("other")

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
                means, stopping = evaluate(model, ema, validation_batches(), world, vote)
                if not stopping:
                    record["val_loss"], record["val_accuracy"] = means["loss"], means["correct"]
                    record["val_nats_per_byte"] = means["loss"] / bytes_per_token
            if ends_epoch or step >= steps:
                record["epoch_loss"] = epoch["loss"] / epoch["steps"]
                record["epoch_seconds"] = epoch["seconds"]
            if is_logged() and not (evaluates() and record["val_loss"] is None):  # else after a resume
                log.write(record)
                log.step_line(record, (steps - step) * (time.perf_counter() - begun) / max(step - first, 1),
                              "apart" if apart else "OK" if args.strategy in ("ddp", "zero1") else "shards")
            if record["val_loss"] is not None:
                log.say(f"step {step} | validation loss {record['val_loss']:.4f} | accuracy "
                        f"{record['val_accuracy']:.1%} | {record['val_nats_per_byte']:.4f} nats per masked "
                        f"byte | unigram entropy {entropy:.4f}")
                if checkpoints.saved_step == step:
                    checkpoints.mark_best(record["val_loss"])
                log.save_history()
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
        local_loss = torch.zeros((), device=world.device)
        for micro_batch in range(grad_accum):
            log.phase("data")
            x, positions, labels = next(loader)  # (B, T), (B, K), (B, K)
            log.phase("forward")
            with no_sync(wrapped, micro_batch < grad_accum - 1 or apart):
                loss, _ = wrapped(x, positions, labels)
                log.phase("backward")
                scaler.scale(loss / grad_accum).backward()
            local_loss += loss.detach() / (grad_accum * world.world_size)
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
        epoch_loss += local_loss
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
            mean_loss, epoch["loss"], skipped = reduce_sum([local_loss, epoch_loss, ~norm.isfinite()], world)
            now = time.perf_counter()
            epoch["seconds"] = now - epoch_begun
            tokens_per_sec = (step - window[1]) * global_batch * args.seq_len / (now - window[0])
            modes = ("none", args.checkpoint_activations)
            flops = [tokens_per_sec * model.flops_per_token(args.mask_rate, mode) for mode in modes]
            mfu, hfu = (f / (peak * world.world_size) if peak else None for f in flops)
            record = {"step": step, "loss": mean_loss, "val_loss": None, "val_accuracy": None,
                      "val_nats_per_byte": None, "lr": lr, "grad_norm": norm.item(), "skipped": int(skipped),
                      "tokens": samples * args.seq_len, "tokens_per_sec": round(tokens_per_sec, 1),
                      "mfu": mfu, "hfu": hfu,
                      "mem_gb": round(monitor.memory_gb(world.device), 3), "time": round(time.time(), 3)}

    # ----------------------------------------------------------------------------------------------- the end
    loader.close()
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
