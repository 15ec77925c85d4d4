"""Train a Hierarchical Reasoning Model for text (arXiv 2605.20613), with one process or many.

    torchrun --nproc_per_node=2 train_hrm.py            # tiny, Python's own source
    torchrun --nproc_per_node=8 train_hrm.py --size 1b  # eight GPUs, FineWeb-Edu
    torchrun --nproc_per_node=2 train_hrm.py --data 'text:books/*.txt' --tokenizer bpe:4096

Run the same command again and it resumes where it stopped. Without torchrun it runs as one process:

    python train_hrm.py --prompt "def main("            # continue a text with the newest checkpoint
    python train_hrm.py --export                        # convert that checkpoint for transformers
"""

import random
from argparse import Namespace

import data
import ddp_utils as ddp
from cli.errors import UserError
from cli.flags import Command, flags_of_model, make_parser, parse_flags, uses_model
from cli.parser import flag_group
from model import HRM, HRMConfig, int_range, learning_rate, make_optimizers
from startup.dry_run import dry_run
from startup.run import (
    end_run,
    find_run,
    is_complete,
    load_data,
    new_model,
    open_run,
    resolve_flags,
    sample,
    start_run,
    use_run,
)
from training.evaluation import evaluate
from training.step import TrainState

# Only `tiny` and `puzzle` have been tuned (on two CPU cores). 1b has the learning rate of HRM-Text and four
# times its batch. In all trainers, `batch` (the micro-batch) suits 80 GB GPUs. `checkpoint_activations` is
# for CPUs; on GPUs a run takes the fastest mode that fits.
WEB = dict(seq_len=1024, data="fineweb-edu", init="identity")
TINY = dict(d_model=128, n_head=2, n_layer=2, ff=384, seq_len=256, global_batch=16, batch=8, lr=6e-3,
            warmup=30, steps=300, eval_every=100, save_every=100, eval_batches=0, data="stdlib",
            init="identity")
SIZES = {
    "tiny": TINY,
    "puzzle": TINY | dict(n_head=4, n_layer=1, lr=1.4e-2, steps=600, eval_every=300, eval_batches=1,
                          data="task:addition", optimizer="muon", schedule="wsd", decay=0.6, ema=0.98,
                          sample_every=1, temperature=0.0, init="published", qk_norm=True, h_cycles="4:8",
                          l_cycles=1, bp_cycles=2, inject_input=True),
    "25m": dict(d_model=320, n_head=5, n_layer=3, ff=1024, global_batch=256, batch=32, lr=1e-3, warmup=200,
                steps=2000, eval_every=250, save_every=250, eval_batches=20, **WEB),
    "100m": dict(d_model=640, n_head=10, n_layer=6, ff=1792, global_batch=1024, batch=64, lr=6e-4, warmup=200,
                 steps=2000, eval_every=250, save_every=250, eval_batches=10, **WEB),
    "350m": dict(d_model=1024, n_head=8, n_layer=11, ff=2816, global_batch=1024, batch=32, lr=3e-4,
                 warmup=500, steps=7000, eval_every=500, save_every=500, eval_batches=10,
                 checkpoint_activations="selective", **WEB),
    "1b": dict(d_model=1536, n_head=12, n_layer=16, ff=4096, global_batch=768, batch=24, lr=2.2e-4,
               warmup=1000, steps=27000, eval_every=500, save_every=500, eval_batches=10,
               checkpoint_activations="block", **WEB),
}
SIZES["1b-published"] = SIZES["1b"] | dict(  # what HRM-Text 1B does differently
    vocab_size=65536, init="published", global_batch=192, warmup=2000, steps=305000, optimizer="adam-atan2",
    schedule="constant", grad_clip=0.0, ema=0.9999)
BETAS = 0.9, 0.95
VOCAB_LR = 4.0  # times --lr for embedding and head; 1 with Muon, --init-from or --init published
PONDER_COST = 0.01  # with --halt: added to the objective for each cycle beyond the first
RAMP = 0.2  # bp_steps and the ponder cost grow over this first fraction of the run


def as_range(low: int, high: int) -> str:
    return f"{low} to {high}" if low < high else f"{high}"


def parse_args(argv: list[str] | None = None) -> Command:
    parser = make_parser(__doc__, HRMConfig, SIZES)
    flag = flag_group(parser, "recurrence")
    flag("--bp-steps", str, "backpropagate through this many last stack calls; 2:5 grows over the first "
         "fifth\nDefault: 2:5, and further for more cycles; with --init-from it doesn't grow. Replaces "
         "--bp-cycles.")
    command = parse_flags(parser, HRMConfig, SIZES, argv)
    if "bp_steps" in command.given:
        command.given["bp_cycles"] = 0
    elif command.given.get("bp_cycles"):  # replaces the --bp-steps of the run that is resumed
        command.given["bp_steps"] = None
    return command


def truncation(args: Namespace) -> tuple[int, int]:
    """Number of stack calls to backpropagate through, at the start of the run and after the ramp. Raises
    UserError if the flags conflict.
    """
    c = HRMConfig(**flags_of_model(HRMConfig, args))
    calls = c.l_cycles + 1  # stack calls per cycle
    if c.halt and c.least_cycles:
        raise UserError("--h-cycles A:B cannot be used with --halt, which chooses the number of cycles "
                        "itself: give one number.")
    if isinstance(args.bp_steps, str):
        low, high = int_range("--bp-steps", args.bp_steps, 2)
    elif c.bp_cycles:
        low = high = c.bp_cycles * calls
    elif args.bp_steps:  # from the run that is resumed
        low, high = args.bp_steps
    else:
        high = 5 if c.halt or c.inject_input else max(c.cycles + 1, 5)
        low = high if args.init_from else 2  # trained weights need no ramp
    if high > max(c.cycles * calls, 5):
        kept = f"--bp-cycles {c.bp_cycles}" if c.bp_cycles else f"--bp-steps {high}"
        raise UserError(f"{kept} is more than the model has: {c.cycles} cycles of {calls} stack calls.")
    return low, high


@ddp.cleanup_on_exit
def main(argv: list[str] | None = None):
    command = parse_args(argv)
    if "dry_run" in command.given:
        args = resolve_flags(command)
        return dry_run(HRM, args, bp_steps=truncation(args)[1])
    # joins the process group; when a run is resumed, flags that are not given keep its values
    run = find_run(HRM, command, constants=globals())
    # set run.metric or run.change_data here (recipes in docs/changing.md), so that --eval-only uses them too
    if uses_model(run.args):
        return use_run(run)
    low, high = truncation(run.args)

    # --------------------------------------------------------- data, model, optimizers, checkpoint, log
    dataset = load_data(run, bp_steps=high)
    open_run(run)  # locks the run directory, plans steps and batches
    args, world, checkpoints = run.args, run.world, run.checkpoints
    model = new_model(run, vocab_size=dataset.tokenizer.vocab_size, **dataset.marker_ids)
    c = model.config
    least_cycles = c.least_cycles or c.cycles
    if not c.reaches_embedding(high, least_cycles):
        raise UserError(f"backpropagating through {high} stack calls, the embedding never learns: add "
                        f"--inject-input, or give --bp-steps {least_cycles + 1}.")
    examples = [model.dummy_inputs(run.batch, world.device, n) for n in (low, high)]
    fast_vocab = args.init == "identity" and args.optimizer != "muon" and not args.init_from
    optimizers = make_optimizers(model, args.optimizer, args.lr, BETAS, args.weight_decay,
                                 VOCAB_LR if fast_vocab else 1.0)
    state = TrainState(model, optimizers, run)
    if state.ema:
        state.ema.constant = args.size == "1b-published"
    log, meta, step, samples = start_run(run, state, bp_steps=[low, high])
    if is_complete(run, log, step):
        return
    trained = as_range(1 if c.halt else least_cycles, c.cycles)
    used = as_range(1 if c.halt else c.max_eval_cycles, c.max_eval_cycles)
    graph = f"{c.bp_cycles} whole cycles" if c.bp_cycles else f"{as_range(low, high)} stack calls"

    def plan(step: int) -> tuple[float, int, int]:
        """Ramp progress (0 to 1), bp_steps and number of cycles for a step; the same on all ranks."""
        ramp = min(1.0, step / (RAMP * run.steps))
        cycles = random.Random(f"{args.seed} {step}").randint(least_cycles, c.cycles)
        return ramp, low + int(ramp * (high - low)), cycles

    # more steps stretch the ramp
    now = f", now {plan(step)[1]}" if step > 0 and low < high else ""
    log.say(f"cycles: {trained} in training, {used} in evaluation; backpropagation through at most the last "
            f"{graph}{now}")
    state.warm_up(*examples)
    stop = ddp.StopVote(world)  # after warm_up, so that Ctrl-C during warm_up stops at once
    loader = data.Loader(dataset.train, run.batch, world, args.seed, samples)
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
            if due.done and args.size == "puzzle" and "eval_batches" not in run.given:
                log.say("the last evaluation takes all rows of each level")
                args.eval_batches = 0
            results = evaluate(state, run, stop)
            if results is None:  # a signal interrupted it; the resumed run evaluates this step again
                continue
            if log.evaluation(step, samples, results):  # the best so far
                checkpoints.mark_best(step)
            if args.sample_every and len(log.evaluations) % args.sample_every == 0 and not due.done:
                sample(state, run, step, stop)
        if due.stopping or due.done:
            break
        if due.saving:  # don't count saves and evaluations as training time
            log.restart_clock(samples)

        ramp, bp_steps, cycles = plan(step)
        # compute lr here for your own schedule
        lr = learning_rate(step, run.steps, args.lr, args.warmup, args.schedule, args.min_lr, args.decay)
        ddp.seed_step(args.seed, step, world.rank)
        count, batches = loader.step(run.grad_accum)
        labels = ddp.async_sum(count, world)  # labels of the step on all ranks; labels() waits for the sum
        for micro_step, (x, y) in enumerate(batches):  # (B, T) each; y = −1 is ignored
            with state.no_sync(micro_step < run.grad_accum - 1):
                objective, sums = state.wrapped(x, y, bp_steps=bp_steps, cycles=cycles,
                                                ponder_weight=ramp * PONDER_COST)
                # the mean over all labels of the step; times world_size, because DDP averages over ranks
                loss = objective * (world.world_size / labels().clamp(min=1))
                state.scaler.scale(loss).backward()
            metrics.add(sums)
        grad_norm = state.clip_gradients(args.grad_clip, stop)
        if not c.reaches_embedding(bp_steps, cycles):
            model.embed.weight.grad = None  # so no weight decay until the embedding learns, as in HRM-Text
        state.optimizer_step(lr, grad_norm)
        stop.vote()  # asks all ranks whether one got a signal; the next step reads the answer
        step, samples = step + 1, samples + run.global_batch
        metrics.end_step(samples, labels())
        log.step(metrics, step, samples, grad_norm, lr=lr, bp_steps=bp_steps)
    loader.close()
    if not due.stopping:
        sample(state, run, step, stop)
    end_run(run, log, stop, step, samples)


if __name__ == "__main__":
    ddp.launch(main)
