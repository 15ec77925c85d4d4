"""Trains GPT-2, in English, Spanish or whatever the data are, on one process or on many.

    torchrun --nproc_per_node=2 train_gpt2.py                             # tiny, Python's own source
    torchrun --nproc_per_node=8 train_gpt2.py --size gpt2                 # 124 M parameters, FineWeb-Edu
    torchrun --nproc_per_node=8 train_gpt2.py --size gpt2 --data wikipedia-es --tokenizer bpe:32000
    torchrun --nproc_per_node=8 train_gpt2.py --size gpt2 --init-from hf:gpt2 --data 'text:*.txt'

Run the same command again and it resumes where it stopped. Without torchrun it is one process:

    python train_gpt2.py --prompt "def main("               # the newest checkpoint continues a text
    python train_gpt2.py --export                           # and becomes a directory for transformers

On five PCs with one small GPU each, a step of 160 sequences of 1024 tokens fits with

    torchrun --nnodes=5 … train_gpt2.py --size gpt2 --precision fp16 --batch 1 --global-batch 160
"""

import argparse

import data
from ddp_utils import (Run, TrainState, begin_sum, launch, load_data, make_parser, parse, run_directory,
                       seed_step, start, use_model)
from model import GPT2, GPT2Config, learning_rate, make_optimizers

# Only `tiny` has been tuned, on two CPU cores. The others have the shapes of Radford et al., 2019, about
# 20 tokens for each parameter, and the learning rates of Brown et al., 2020.
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
BETAS, WEIGHT_DECAY, MIN_LR_RATIO = (0.9, 0.95), 0.1, 0.1  # the last: final learning rate / --lr


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parse(make_parser(__doc__, GPT2Config, SIZES), GPT2Config, SIZES, argv)


def main() -> None:
    args = parse_args()
    if args.dry_run is not None:
        from test_ddp import dry_run
        return dry_run(GPT2, args, SIZES[args.size])
    world = start(args)
    out = run_directory(args, "gpt2-tiny" if args.size == "tiny" else args.size)
    if args.export or args.chat or args.prompt is not None:
        return use_model(GPT2, args, world, out)

    # ------------------------------------------------------------------------------ data, model, optimizer
    dataset = load_data(GPT2, args, world)
    run = Run(args, world, dataset, SIZES[args.size], out)
    model = run.make_model(GPT2, vocab_size=dataset.tokenizer.vocab_size, **dataset.roles)
    optimizers = make_optimizers(model, args.optimizer, args.lr, BETAS, WEIGHT_DECAY)
    state = TrainState(model, optimizers, args, world)
    example = model.example(run.micro_batch, world.device)
    if not run.begin(state, (example, example), lambda record: model.flops_per_token()):
        return  # it is complete already
    loader = data.Loader(dataset.train, run.micro_batch, run.grad_accum_steps, world.rank, world.world_size,
                         args.seed, world.device, run.samples)

    # -------------------------------------------------------------------------------------------- training
    while run.report(run.evaluate):  # what is due after a step, or was when a run that resumes was stopped
        lr = learning_rate(run.step, run.total_steps, args.lr, args.warmup, args.schedule, MIN_LR_RATIO)
        seed_step(args.seed, run.step, world.rank)
        count, batches = next(loader)
        labels = begin_sum(count, world)  # of all ranks, which are waited for before the first backward pass
        for micro_step, (x, y) in enumerate(batches):  # (B, T) each, y is −1 where nothing is learned
            with state.no_sync(micro_step < run.grad_accum_steps - 1):
                objective, sums = state.wrapped(x, y)
                state.backward(objective, labels())
            run.count(sums)
        grad_norm = state.clip_gradients(args.grad_clip)
        state.optimizer_step(lr, grad_norm)
        run.end_step(grad_norm, lr, labels())
    loader.close()
    run.finish()


if __name__ == "__main__":
    launch(main)
