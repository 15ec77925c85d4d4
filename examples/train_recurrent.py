"""Trains a recurrent language model, as an example of your own model and trainer: see docs/changing.md.

    torchrun --nproc_per_node=2 examples/train_recurrent.py --data shards/stdlib-bpe4096
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a copy beside model.py doesn't need this line
import data
import ddp_utils as ddp
from cli.flags import Command, make_parser, parse_flags, uses_model
from model import Block, CausalConfig, CausalLM, Linear, flag, learning_rate, make_optimizers, rms_norm
from startup.dry_run import dry_run
from startup.run import (
    end_run,
    find_run,
    load_data,
    new_model,
    open_run,
    resolve_flags,
    start_run,
    use_run,
)
from training.evaluation import evaluate
from training.step import TrainState
from weights.sampling import KVCache


@dataclass
class RecurrentConfig(CausalConfig):
    depth: int = flag(4, "blocks")
    width: int = flag(128, "channels")
    rates: int = flag(4, "rates at which channels forget")


class RecurrentBlock(Block):
    """h(t) = decay · h(t - 1) + v(t), gated. The channels forget at a few fixed rates."""

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


def parse_args(argv=None) -> Command:
    parser = make_parser(__doc__, RecurrentConfig, SIZES)
    return parse_flags(parser, RecurrentConfig, SIZES, argv)


@ddp.cleanup_on_exit
def main(argv=None) -> None:
    command = parse_args(argv)
    if "dry_run" in command.given:
        return dry_run(Recurrent, resolve_flags(command))
    run = find_run(Recurrent, command, constants=globals())
    if uses_model(run.args):
        return use_run(run)
    dataset = load_data(run)
    open_run(run)
    args, world, checkpoints = run.args, run.world, run.checkpoints
    model = new_model(run, vocab_size=dataset.tokenizer.vocab_size, **dataset.marker_ids)
    example = model.dummy_inputs(run.batch, world.device)
    state = TrainState(model, make_optimizers(model, args.optimizer, args.lr, BETAS, DECAY), run)
    log, meta, step, samples = start_run(run, state)
    state.warm_up(example)
    stop = ddp.StopVote(world)
    loader = data.Loader(dataset.train, run.batch, world, args.seed, samples)
    metrics = ddp.Metrics(run)
    log.start_clock(step, samples)
    while True:
        due = ddp.due_after(step, run, log, stop)
        if due.saving:
            checkpoints.save(step, state, meta | metrics.state_dict())
        if due.evaluating and not due.stopping:
            results = evaluate(state, run, stop)
            if results is None:
                continue
            if log.evaluation(step, samples, results):  # the best so far
                checkpoints.mark_best(step)
        if due.stopping or due.done:
            break
        ddp.seed_step(args.seed, step, world.rank)
        count, batches = loader.step(run.grad_accum)
        labels = ddp.async_sum(count, world)
        for micro_step, (x, y) in enumerate(batches):  # (B, T) each
            with state.no_sync(micro_step < run.grad_accum - 1):
                objective, sums = state.wrapped(x, y)
                loss = objective * (world.world_size / labels().clamp(min=1))
                state.scaler.scale(loss).backward()
            metrics.add(sums)
        grad_norm = state.clip_gradients(args.grad_clip, stop)
        lr = learning_rate(step, run.steps, args.lr, args.warmup, args.schedule, args.min_lr, args.decay)
        state.optimizer_step(lr, grad_norm)
        stop.vote()
        step, samples = step + 1, samples + run.global_batch
        metrics.end_step(samples, labels())
        log.step(metrics, step, samples, grad_norm, lr=lr)
    loader.close()
    end_run(run, log, stop, step, samples)


if __name__ == "__main__":
    ddp.launch(main)
