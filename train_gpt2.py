"""Train GPT-2 on text in any language, with one process or many.

    torchrun --nproc_per_node=2 train_gpt2.py                     # tiny, Python's own source
    torchrun --nproc_per_node=8 train_gpt2.py --size gpt2         # 124 M parameters, FineWeb-Edu
    torchrun --nproc_per_node=8 train_gpt2.py --size gpt2 --data wikipedia-es --tokenizer bpe:32000
    torchrun --nproc_per_node=8 train_gpt2.py --size gpt2 --init-from hf:gpt2 --data 'text:*.txt'

Run the same command again and it resumes where it stopped. Without torchrun it runs as one process:

    python train_gpt2.py --prompt "def main("       # continue a text with the newest checkpoint
    python train_gpt2.py --export                   # convert that checkpoint for transformers
"""

import data
import ddp_utils as ddp
from cli.flags import Command, make_parser, parse_flags, uses_model
from model import GPT2, GPT2Config, learning_rate, make_optimizers
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

# Only `tiny` has been tuned (on two CPU cores). The other shapes are from Radford et al., 2019, and the
# learning rates from Brown et al., 2020. `steps` gives each about 20 tokens per parameter.
WEB = dict(seq_len=1024, global_batch=512, eval_batches=20, data="fineweb-edu")
SIZES = {
    "tiny": dict(n_layer=4, n_head=2, d_model=128, seq_len=256, global_batch=16, batch=8, lr=3e-3, warmup=30,
                 steps=300, eval_every=100, save_every=100, eval_batches=0, data="stdlib"),
    "gpt2": dict(n_layer=12, n_head=12, d_model=768, batch=32, lr=6e-4, warmup=200, steps=5000,
                 eval_every=250, save_every=250, **WEB),
    "gpt2-medium": dict(n_layer=24, n_head=16, d_model=1024, batch=16, lr=3e-4, warmup=500, steps=14000,
                        eval_every=500, save_every=500, **WEB),
    "gpt2-large": dict(n_layer=36, n_head=20, d_model=1280, batch=16, lr=2.5e-4, warmup=500, steps=30000,
                       eval_every=500, save_every=500, **WEB),
    "gpt2-xl": dict(n_layer=48, n_head=25, d_model=1600, batch=8, lr=2e-4, warmup=1000, steps=60000,
                    eval_every=500, save_every=500, **WEB),
}
BETAS = 0.9, 0.95


def parse_args(argv: list[str] | None = None) -> Command:
    parser = make_parser(__doc__, GPT2Config, SIZES)
    return parse_flags(parser, GPT2Config, SIZES, argv)


@ddp.cleanup_on_exit
def main(argv: list[str] | None = None):
    command = parse_args(argv)
    if "dry_run" in command.given:
        return dry_run(GPT2, resolve_flags(command))
    # joins the process group; when a run is resumed, flags that are not given keep its values
    run = find_run(GPT2, command, constants=globals())
    # set run.metric or run.change_data here (recipes in docs/changing.md), so that --eval-only uses them too
    if uses_model(run.args):
        return use_run(run)

    # --------------------------------------------------------- data, model, optimizers, checkpoint, log
    dataset = load_data(run)
    open_run(run)  # locks the run directory, plans steps and batches
    args, world, checkpoints = run.args, run.world, run.checkpoints
    model = new_model(run, vocab_size=dataset.tokenizer.vocab_size, **dataset.marker_ids)
    example = model.dummy_inputs(run.batch, world.device)
    optimizers = make_optimizers(model, args.optimizer, args.lr, BETAS, args.weight_decay)
    state = TrainState(model, optimizers, run)  # sets precision, recomputing and compiling
    log, meta, step, samples = start_run(run, state)
    if is_complete(run, log, step):
        return
    state.warm_up(example)
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

        # compute lr here for your own schedule
        lr = learning_rate(step, run.steps, args.lr, args.warmup, args.schedule, args.min_lr, args.decay)
        ddp.seed_step(args.seed, step, world.rank)
        count, batches = loader.step(run.grad_accum)
        labels = ddp.async_sum(count, world)  # labels of the step on all ranks; labels() waits for the sum
        for micro_step, (x, y) in enumerate(batches):  # (B, T) each; y = −1 is ignored
            with state.no_sync(micro_step < run.grad_accum - 1):
                objective, sums = state.wrapped(x, y)  # both are sums over labels
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
    if not due.stopping:
        sample(state, run, step, stop)
    end_run(run, log, stop, step, samples)


if __name__ == "__main__":
    ddp.launch(main)
