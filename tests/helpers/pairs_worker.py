"""The gradients of a step on eight rows of pairs, in one or two micro-batches a rank; for test_pairs.py."""

import sys

import torch
from states import train_state
from test_pairs import ROLES, START, gpt2, packed

import data
import ddp_utils


def gradients(world: ddp_utils.World, micro_steps: int) -> dict[str, torch.Tensor]:
    idx = packed(8)
    idx[2] = idx[4] = idx[5] = START  # no labels; on two ranks, a micro-batch has nothing else
    labels = torch.cat((idx[:, 1:], idx[:, :1]), dim=1)
    labels[torch.from_numpy(~data.label_mask(idx.numpy(), ROLES, "response"))] = -1
    model = gpt2().train()
    state = train_state(model, world)
    batches = [part.chunk(world.world_size)[world.rank].chunk(micro_steps) for part in (idx, labels)]
    count = ddp_utils.async_sum(sum((y >= 0).sum() for y in batches[1]), world)
    for i, (x, y) in enumerate(zip(*batches)):
        with state.no_sync(i < micro_steps - 1):
            (state.wrapped(x, y)[0] * (world.world_size / count())).backward()
    state.clip_gradients(0)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for x, y in zip(*batches):  # control: the mean of the means of micro-batches
        (model(x, y)[0] / (y >= 0).sum().clamp(min=1) / micro_steps).backward()
    mean = model.embed.weight.grad / world.world_size
    torch.distributed.all_reduce(mean)
    return found | {"mean of means": mean}


def main() -> None:
    world = ddp_utils.init("gloo", "cpu")
    found = {micro_steps: gradients(world, micro_steps) for micro_steps in (1, 2)}
    if world.is_rank0:
        torch.save(found, sys.argv[1])


if __name__ == "__main__":
    ddp_utils.launch(main)
