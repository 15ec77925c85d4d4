"""Trains a recurrent language model: a model and trainer of one's own, written as tests/README.md says.

    torchrun --nproc_per_node=2 tests/train_recurrent.py --data shards/stdlib-bpe4096
"""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
from ddp_utils import (Metrics, StopVote, TrainState, begin_log, begin_sum, end_run, evaluate, find_run,
                       identity_of, launch, load_data, make_parser, new_model, open_run, parse,
                       plan_run, seed_step, set_modes, start, use_model, with_cleanup)
from model import (Block, CausalConfig, CausalLM, KVCache, Linear, flag, learning_rate,
                   make_optimizers, rms_norm)


@dataclass
class RecurrentConfig(CausalConfig):
    depth: int = flag(4, "blocks")
    width: int = flag(128, "channels")
    rates: int = flag(4, "rates at which channels forget")


class RecurrentBlock(Block):
    """h(t) = decay · h(t - 1) + v(t), gated; the channels forget at a few fixed rates."""

    def __init__(self, c: RecurrentConfig):
        super().__init__()
        self.rates = c.rates
        self.inner = Linear(c.width, 2 * c.width, bias=False)
        self.outer = Linear(c.width, c.width, bias=False)
        self.bias = nn.Parameter(torch.zeros(c.width))
        slopes = 2.0 ** -torch.arange(1, c.rates + 1)[:, None]
        decay = torch.exp(-slopes * torch.arange(c.seq_len + 1))  # (R, T + 1)
        self.register_buffer("decay", decay, persistent=False)

    def block(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        values, gate = self.inner(rms_norm(x, 1e-6)).chunk(2, dim=-1)  # (B, T, C) each
        values = values.float().view(B, T, self.rates, -1)
        ago = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)  # (T, T)
        weights = torch.where(ago >= 0, self.decay[:, ago.clamp(min=0)], 0.0)  # (R, T, T)
        state = torch.einsum("rij,bjrc->birc", weights, values)
        if cache is not None:
            slot, cache.slot = cache.slot, cache.slot + 1
            if cache.length:
                state = state + self.decay[:, 1:T + 1].T[:, :, None] * cache.memory[slot]
            cache.memory[slot:slot + 1] = [state[:, -1:]]
        y = state.reshape(B, T, C).to(x.dtype) * F.silu(gate + self.bias.to(x.dtype))
        return x + self.outer(y)


class Recurrent(CausalLM):
    Config = RecurrentConfig

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.padded_vocab, c.width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(RecurrentBlock(c) for _ in range(c.depth))

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        x = self.embed(idx).to(self.compute_dtype)
        for block in self.blocks:
            x = block(x, cache)
        return rms_norm(x, 1e-6)


BETAS, DECAY = (0.9, 0.95), 0.1
SIZES = {"tiny": dict(seq_len=256, global_batch=16, batch=8, lr=3e-3, warmup=30, steps=300, eval_every=100,
                      save_every=100, eval_batches=0, data="stdlib")}


def parse_args(argv=None, **records) -> argparse.Namespace:
    return parse(make_parser(__doc__, RecurrentConfig, SIZES), RecurrentConfig, SIZES, argv, **records)


@with_cleanup
def main(argv=None) -> None:
    args = parse_args(argv)
    if args.dry_run is not None:
        from test_ddp import dry_run
        return dry_run(Recurrent, args, SIZES[args.size])
    world = start(args)
    args, out, saved = find_run(Recurrent, args, world, parse_args, argv)
    if args.export or args.chat or args.prompt is not None:
        return use_model(Recurrent, args, world, out, saved)
    dataset = load_data(Recurrent, args, world)
    log, checkpoints, saved = open_run(out, args, world, saved)  # saved is None for a new run
    global_batch, batch, accumulation, total_steps = plan_run(args, SIZES[args.size], dataset, world, saved,
                                                              log.say)
    model = new_model(Recurrent, args, dataset, world, saved, log.say,
                      vocab_size=dataset.tokenizer.vocab_size, **dataset.roles)
    example = model.example(batch, world.device)
    set_modes(model, args, world, log.say)
    state = TrainState(model, make_optimizers(model, args.optimizer, args.lr, BETAS, DECAY), world,
                       args.strategy, args.comm, args.ema)
    identity = identity_of(Recurrent, model, args, dataset, world, globals(), steps=total_steps,
                           global_batch=global_batch, batch=batch, grad_accum=accumulation)
    step, samples = checkpoints.resume(saved, state, identity)
    begin_log(log, state, dataset, identity, step, saved, lambda record: [{}])
    state.warm_up(example, example)
    stop = StopVote(world)
    loader = data.Loader(dataset.train, batch, world, args.seed, samples)
    metrics = Metrics(world, 0, 0, saved)  # no loss of each epoch
    log.start_clock(step, samples)
    while True:
        ends = stop.agreed or step >= total_steps
        due = step % args.eval_every == 0 and step > 0
        if ends or due or step % args.save_every == 0 and step > 0:
            checkpoints.save(step, state, identity | metrics.position())
        if due and step not in log.evaluations and not stop.agreed:
            found = evaluate(state, dataset, stop, batch, args.eval_batches * global_batch)
            if found is None:
                continue
            checkpoints.mark_best(step, found["val_loss"])
            log.evaluation(step, samples, found, False)
        if ends:
            break
        seed_step(args.seed, step, world.rank)
        count, batches = loader.step(accumulation)
        labels = begin_sum(count, world)
        for micro_step, (x, y) in enumerate(batches):  # (B, T) each
            with state.no_sync(micro_step < accumulation - 1):
                objective, sums = state.wrapped(x, y)
                loss = objective * (world.world_size / labels().clamp(min=1))
                state.scaler.scale(loss).backward()
            metrics.add(sums)
        grad_norm = state.clip_gradients(args.grad_clip, stop)
        lr = learning_rate(step, total_steps, args.lr, args.warmup, args.schedule, 0.1)
        state.optimizer_step(lr, grad_norm)
        stop.vote()
        step, samples = step + 1, samples + global_batch
        metrics.end_step(samples, labels())
        log.step(metrics, step, samples, grad_norm, lr=lr)
    loader.close()
    end_run(log, checkpoints, stop, step, samples)


if __name__ == "__main__":
    launch(main)
