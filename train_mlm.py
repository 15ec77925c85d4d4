"""Train a masked language model (ModernBERT's architecture), with one process or many.

    torchrun --nproc_per_node=2 train_mlm.py                    # tiny, Python's own source
    torchrun --nproc_per_node=8 train_mlm.py --size base        # 22 x 768, FineWeb-Edu
    python train_mlm.py --list-presets                          # all presets with their commands
    torchrun --nproc_per_node=8 train_mlm.py --preset h200_8gpu_standard --data imdb

Run the same command again and it resumes where it stopped. Without torchrun it runs as one process:

    python train_mlm.py --fill "import [MASK] as np"            # the five likeliest tokens
    python train_mlm.py --export                                # convert for transformers

Attention does not cross document boundaries. Training masks --mask-rate of the tokens, different
ones in each epoch. Evaluation always masks the same 15 %.
"""

import os

import data
import ddp_utils as ddp
from cli.errors import local_rank
from cli.files import without_surrogates
from cli.flags import Command, make_parser, parse_flags, uses_model
from cli.parser import bounded, flag_group
from model import MLM, MLMConfig, learning_rate, make_optimizers
from startup.dry_run import dry_run
from startup.run import (
    end_run,
    find_run,
    is_complete,
    load_data,
    new_model,
    open_run,
    resolve_flags,
    start_run,
    use_run,
)
from training.evaluation import evaluate
from training.step import TrainState

# Only `tiny` has been tuned (on two CPU cores). base and large have ModernBERT's shapes (arXiv 2412.13663).
WEB = dict(seq_len=512, data="fineweb-edu")
SIZES = {
    "tiny": dict(n_layer=4, n_head=2, d_model=128, ff=192, seq_len=128, global_batch=64, batch=32, lr=3e-3,
                 warmup=50, steps=400, eval_every=100, save_every=100, eval_batches=0, data="stdlib"),
    "17m": dict(n_layer=7, n_head=4, d_model=256, ff=384, global_batch=256, batch=32, lr=1e-3, warmup=200,
                steps=4000, eval_every=250, save_every=250, eval_batches=20, **WEB),
    "base": dict(n_layer=22, n_head=12, d_model=768, ff=1152, global_batch=1024, batch=64, lr=8e-4,
                 warmup=1000, steps=10000, eval_every=500, save_every=500, eval_batches=10, **WEB),
    "large": dict(n_layer=28, n_head=16, d_model=1024, ff=2624, global_batch=1024, batch=32, lr=5e-4,
                  warmup=1000, steps=20000, eval_every=500, save_every=500, eval_batches=10, **WEB),
}
# --preset: number of GPUs, minutes on that many H200s, use case, --size, changes to that size. The minutes
# are predicted by bench/cost.py; for --data imdb it was told 6.7 M training tokens, an estimate. The narrow
# models are for quick trials.
NARROW = dict(n_layer=4, n_head=4, d_model=8, ff=32, epochs=5)
PRESETS = {
    "h200_8gpu_fast": (8, "<1", "does everything work?", "tiny", NARROW | dict(global_batch=512, epochs=3)),
    "h200_8gpu_standard": (8, "<1", "a first look at a data set", "tiny", NARROW | dict(
        n_layer=6, n_head=8, d_model=16, ff=64, global_batch=256)),
    "h200_8gpu_quality": (8, "2", "the best of the narrow ones", "tiny", NARROW | dict(
        n_layer=8, n_head=12, d_model=24, ff=96, global_batch=128, epochs=10)),
    "4gpu_standard": (4, "1", "a first look on four GPUs", "tiny", NARROW | dict(global_batch=128)),
    "2gpu_standard": (2, "1", "a first look on two GPUs", "tiny", NARROW | dict(global_batch=64)),
    "1gpu_standard": (1, "4", "a first look on one GPU", "tiny", NARROW | dict(global_batch=16)),
    "1gpu_17m": (1, "15", "a small encoder worth using", "17m", {}),
    "8gpu_base": (8, "31", "ModernBERT-base from scratch", "base", {}),
    "8gpu_large": (8, "172", "ModernBERT-large from scratch", "large", {}),
}
RECIPES = SIZES | {name: SIZES[size] | flags for name, (*_, size, flags) in PRESETS.items()}
EVAL_RATE = 0.15  # fraction of the tokens that evaluations mask
BETAS = 0.9, 0.95


def parse_args(argv: list[str] | None = None) -> Command:
    parser = make_parser(__doc__, MLMConfig, SIZES, PRESETS)
    flag = flag_group(parser, "masked language model")
    flag("--list-presets", bool, "print all presets with their commands")
    flag("--mask-rate", bounded(0.001, 1, open_end=True), "fraction of the tokens to mask and restore", 0.3)
    flag("--fill", without_surrogates, "print the likeliest tokens for each [MASK] in this text")
    return parse_flags(parser, MLMConfig, RECIPES, argv)


def list_presets():
    """Print a table of the presets and a command for each. Only one process per node prints."""
    if local_rank() > 0:
        return
    print(f"{'preset':18} {'layers':>6} {'heads':>5} {'width':>5} {'batch':>5} {'length':>9} {'lr':>6} "
          f"{'minutes':>7}  use case")
    commands = []
    for name, (gpus, minutes, use, size, _) in PRESETS.items():
        row = RECIPES[name]
        length = f"{row['epochs']} epochs" if "epochs" in row else f"{row['steps']} st."
        print(f"{name:18} {row['n_layer']:6} {row['n_head']:5} {row['d_model']:5} {row['global_batch']:5} "
              f"{length:>9} {row['lr']:6g} {minutes:>7}  {use}")
        source = " --data imdb" if size == "tiny" else ""  # larger sizes keep FineWeb-Edu
        commands.append(f"torchrun --nproc_per_node={gpus} {os.path.relpath(__file__)} "
                        f"--preset {name}{source}")
    print("\nminutes: predicted, with one H200 for each process of the command below. Preparing the data,\n"
          "compiling, evaluations and saves come on top.\n"
          "Presets up to width 24 use the learning rate, warm-up and context of --size tiny, which were\n"
          "tuned for width 128. Change them with --lr, --warmup and --seq-len.\n")
    print(*commands, sep="\n")


@ddp.cleanup_on_exit
def main(argv: list[str] | None = None):
    command = parse_args(argv)
    if "list_presets" in command.given:
        return list_presets()
    if "dry_run" in command.given:
        args = resolve_flags(command)
        return dry_run(MLM, args, mask_rate=args.mask_rate)
    # joins the process group; when a run is resumed, flags that are not given keep its values
    run = find_run(MLM, command, constants=globals())
    # set run.metric or run.change_data here (recipes in docs/changing.md), so that --eval-only uses them too
    if uses_model(run.args):
        return use_run(run)

    # --------------------------------------------------------- data, model, optimizers, checkpoint, log
    dataset = load_data(run, mask_rate=run.args.mask_rate)
    open_run(run)  # locks the run directory, plans steps and batches
    args, world, checkpoints = run.args, run.world, run.checkpoints
    tokenizer = dataset.tokenizer
    model = new_model(run, vocab_size=tokenizer.num_ids, eot=tokenizer.eot)
    example = model.dummy_inputs(run.batch, world.device, args.mask_rate)
    optimizers = make_optimizers(model, args.optimizer, args.lr, BETAS, args.weight_decay)
    state = TrainState(model, optimizers, run)  # sets precision, recomputing and compiling
    log, meta, step, samples = start_run(run, state)
    if is_complete(run, log, step):
        return
    state.warm_up(example)
    stop = ddp.StopVote(world)  # after warm_up, so that Ctrl-C during warm_up stops at once
    # data.Masker, unless change_data sets another: chooses and replaces the tokens to restore
    masker = dataset.masker_class(tokenizer, args.seq_len, args.mask_rate, args.seed)
    eval_masker = dataset.masker_class(tokenizer, args.seq_len, EVAL_RATE, 0)
    loader = data.Loader(dataset.train, run.batch, world, args.seed, samples, masker)
    metrics = ddp.Metrics(run)
    log.start_clock(step, samples)

    # -------------------------------------------------------------------------------------------- training
    while True:
        due = ddp.due_after(step, run, log, stop)
        if step % ddp.SYNC_EVERY == 0:  # checkpoints.save checks it as well
            ddp.assert_in_sync(model, step)
        # save before evaluating, because an evaluation can take long; after a skipped update nothing is new
        if due.saving and (state.updated or due.stopping or due.done):
            checkpoints.save(step, state, meta | metrics.state_dict())
        if due.evaluating and not due.stopping:
            results = evaluate(state, run, stop, eval_masker)
            if results is None:  # a signal interrupted it; the resumed run evaluates this step again
                continue
            if log.evaluation(step, samples, results):  # the best so far
                checkpoints.mark_best(step)
        if due.stopping or due.done:
            break
        if due.saving:  # don't count saves and evaluations as training time
            log.restart_clock(samples)

        # compute lr here for your own schedule
        lr = learning_rate(step, run.steps, args.lr, args.warmup, args.schedule, args.min_lr, args.decay)
        ddp.seed_step(args.seed, step, world.rank)
        count, batches = loader.step(run.grad_accum)
        labels = ddp.async_sum(count, world)  # labels of the step on all ranks; labels() waits for the sum
        for micro_step, (x, positions, y) in enumerate(batches):  # (B, T), (B, K), (B, K)
            with state.no_sync(micro_step < run.grad_accum - 1):
                objective, sums = state.wrapped(x, positions, y)  # both are sums over labels
                # the mean over all labels of the step; times world_size, because DDP averages over ranks
                loss = objective * (world.world_size / labels().clamp(min=1))
                state.scaler.scale(loss).backward()
            metrics.add(sums)
        grad_norm = state.clip_gradients(args.grad_clip, stop)
        state.optimizer_step(lr, grad_norm)
        stop.vote()  # asks all ranks whether one got a signal; the next step reads the answer
        step, samples = step + 1, samples + run.global_batch
        metrics.end_step(samples, labels())
        log.step(metrics, step, samples, grad_norm, lr=lr)
    loader.close()
    end_run(run, log, stop, step, samples)


if __name__ == "__main__":
    ddp.launch(main)
