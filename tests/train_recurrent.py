"""Trains a recurrent language model: a model and trainer of one's own, written as tests/README.md says.

    torchrun --nproc_per_node=2 tests/train_recurrent.py --data shards/stdlib-bpe4096
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
from ddp_utils import (Run, TrainState, begin_sum, launch, load_data, make_parser, parse, run_directory,
                       seed_step, start, use_model)
from model import (Block, CausalConfig, CausalLM, KVCache, Linear, flag, learning_rate, make_optimizers,
                   num_params, rms_norm)


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

    def flops_per_token(self) -> float:
        return 6 * num_params(self)


BETAS, DECAY = (0.9, 0.95), 0.1
SIZES = {"tiny": dict(seq_len=256, global_batch=16, batch=8, lr=3e-3, warmup=30, steps=300, eval_every=100,
                      save_every=100, eval_batches=0, data="stdlib")}


def main() -> None:
    args = parse(make_parser(__doc__, RecurrentConfig, SIZES), RecurrentConfig, SIZES, None)
    if args.dry_run is not None:
        from test_ddp import dry_run
        return dry_run(Recurrent, args, SIZES[args.size])
    world = start(args)
    out = run_directory(args, f"recurrent-{args.size}")
    if args.export or args.chat or args.prompt is not None:
        return use_model(Recurrent, args, world, out)
    dataset = load_data(Recurrent, args, world)
    run = Run(args, world, dataset, SIZES[args.size], out)
    model = run.make_model(Recurrent, vocab_size=dataset.tokenizer.vocab_size, **dataset.roles)
    state = TrainState(model, make_optimizers(model, args.optimizer, args.lr, BETAS, DECAY), args, world)
    example = model.example(run.micro_batch, world.device)
    if not run.begin(state, (example, example), lambda _: model.flops_per_token()):
        return
    loader = data.Loader(dataset.train, run.micro_batch, run.grad_accum_steps, world.rank, world.world_size,
                         args.seed, world.device, run.samples)
    while run.report(run.evaluate):
        seed_step(args.seed, run.step, world.rank)
        count, batches = next(loader)
        labels = begin_sum(count, world)
        for micro_step, (x, y) in enumerate(batches):  # (B, T) each
            with state.no_sync(micro_step < run.grad_accum_steps - 1):
                objective, sums = state.wrapped(x, y)
                state.backward(objective, labels())
                run.count(sums)
        grad_norm = state.clip_gradients(args.grad_clip)
        lr = learning_rate(run.step, run.total_steps, args.lr, args.warmup, args.schedule, 0.1)
        state.optimizer_step(lr, grad_norm)
        run.end_step(grad_norm, lr, labels())
    loader.close()
    run.finish()


if __name__ == "__main__":
    launch(main)
