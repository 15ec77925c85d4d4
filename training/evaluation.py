"""Evaluations of a model, on all ranks."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import torch

import monitor
from cli.errors import UserError
from data import validation_batches
from ddp_utils import Run, StopVote, assert_same, reduce_sum, seed_step
from training.step import TrainState


def refuse_odd_metric(metric: Callable, values):
    """Raises UserError unless `values`, which the trainer's `metric` returned, is {name: (sum, count)}."""
    if not isinstance(values, dict):  # such as None, if it has no `return`
        values = {getattr(metric, "__name__", "NAME"): values}
    for name, value in values.items():
        dimensions = []
        with suppress(TypeError, ValueError, RuntimeError):
            dimensions = [torch.as_tensor(part).ndim for part in value]
        if dimensions != [0, 0]:
            raise UserError(f"the metric {name} is not a pair of a sum and its count: return "
                            f'{{"{name}": (sum, count)}}.')
        if "/" in name or name.endswith(" (count)"):
            raise UserError(f"a metric cannot be called {name}: choose a name without / and (count).")


@torch.no_grad()
def evaluate(state: TrainState, run: Run, stop: StopVote, masker=None) -> dict[str, float] | None:
    """Evaluates the first --eval-batches (0: all) of each validation set, with the averaged weights if the
    run keeps any. All ranks call this. Returns means, such as `val_loss` over all sets together and
    `val_loss/NAME` over each named set; None if a stop signal cut it short.

    `run.metric` is the trainer's own function: metric(model, *micro_batch) returns {name: (sum, count)},
    numbers or scalar tensors. Both are summed over batches and ranks, and `val_NAME` is sum / count. Raises
    UserError if a name is taken.

    Each evaluation starts with the same random state, so that a model that draws random numbers gets the same
    results after a resume.
    """
    args, model, world = run.args, state.model.eval(), state.world
    reserved = {"samples", "exact", "correct", "nats", "best_metric"}  # a metric can't have these names
    token_bytes = torch.from_numpy(run.dataset.tokenizer.token_bytes).to(world.device)
    seed_step(args.seed, 0, world.rank)
    totals = Counter()
    of_names = {}
    with state.averaged_weights():
        for name, shards in run.dataset.val.items():
            sums = Counter()
            limit = args.eval_batches * args.eval_batch  # rows
            for micro_batch in validation_batches(shards, run.batch, world, limit, masker):
                _, batch_sums = model(*micro_batch)
                if run.dataset.vocab_size:  # its rows aren't text
                    batch_sums.pop("nats", None)
                own = run.metric(model, *micro_batch) if run.metric else {}
                refuse_odd_metric(run.metric, own)
                monitor.refuse_taken([*batch_sums, *own, *reserved - batch_sums.keys()])
                for key, value in own.items():
                    batch_sums |= {key: value[0], f"{key} (count)": value[1]}
                labels = micro_batch[-1]
                learned = labels >= 0
                batch_sums["labels"] = learned.sum()
                known = labels.clamp(0, len(token_bytes) - 1)  # `dataset.vocab_size` may be larger
                batch_sums["bytes"] = (token_bytes[known] * learned).sum()
                sums.update({key: torch.as_tensor(value, dtype=torch.float64, device=world.device)
                             for key, value in batch_sums.items()})
                if stop.vote():
                    break
            assert_same("the list of results", json.dumps([*sums]),
                        "return the same names for every batch")
            sums["bytes"] *= getattr(shards, "byte_ratio", 1)
            sums = dict(zip(sums, reduce_sum([*sums.values()], world)))  # waits for the device
            totals.update(sums)
            if name:
                of_names |= {f"{key}/{name}": value
                             for key, value in monitor.means_of_sums(sums).items()}
            if stop.agreed:
                break
    model.train()
    return None if stop.agreed else monitor.means_of_sums(totals) | of_names
