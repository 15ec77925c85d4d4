"""How the sequences of a step are divided among processes and micro-batches."""

import math

from cli.errors import UserError


def micro_batch_of(share: int, batch: int | None, grad_accum: int | None, largest: int) -> int:
    """The micro-batch size for a process's `share` of a global batch, or 0 if --batch and --grad-accum do not
    divide it. A flag that is not given is None. With neither, it is the largest divisor of the share up to
    `largest`.
    """
    if grad_accum:
        batch = batch or share // grad_accum
        return batch if batch * grad_accum == share else 0
    if batch:
        return batch if share % batch == 0 else 0
    return max(b for b in range(1, min(share, largest) + 1) if share % b == 0)


def plan_batch(world_size: int, global_batch: int | None, batch: int | None, grad_accum: int | None,
               wanted: int, largest: int) -> tuple[int, int, int]:
    """Returns (global batch, micro-batch, accumulation steps), in sequences; global batch = micro-batch ×
    accumulation steps × world size. Flags that are not given are None.

    A given global batch is used, or refused with a UserError that names the nearest fit. Otherwise it is
    `wanted`, the number of the recipe or of the run so far. If the world size does not divide that, it is the
    multiple of the world size within 5 % of `wanted` that allows the largest micro-batch, up to `largest`.
    """
    if global_batch is None and batch and grad_accum:
        global_batch = batch * grad_accum * world_size
    elif global_batch is None and wanted % world_size == 0:
        global_batch = wanted
    elif global_batch is None:
        exact = wanted / world_size  # sequences per process
        fitting = {}  # micro-batch by share, for shares within 5 %
        for share in range(math.ceil(0.95 * exact), math.floor(1.05 * exact) + 1):
            if micro := micro_batch_of(share, batch, grad_accum, largest):
                fitting[share] = micro
        unit = batch or grad_accum or 1
        share = max(1, round(exact / unit)) * unit
        if fitting:
            share = max(fitting, key=lambda share: (fitting[share], -abs(share - exact)))
        global_batch = share * world_size
    if global_batch % world_size:
        low = global_batch // world_size * world_size
        fits = " or ".join(str(n) for n in (low, low + world_size) if n > 0)
        raise UserError(f"a global batch of {global_batch} sequences cannot be divided among {world_size} "
                        f"processes: use --global-batch {fits}.")
    share = global_batch // world_size
    micro = micro_batch_of(share, batch, grad_accum, largest)
    if not micro:
        wish = batch or share // grad_accum
        nearest = min((b for b in range(1, share + 1) if share % b == 0), key=lambda b: abs(b - wish))
        given = f"--grad-accum {grad_accum}" if grad_accum else f"--batch {batch}"
        raise UserError(f"{given} does not fit: {global_batch} sequences are {share} for each of "
                        f"{world_size} processes. Use --batch {nearest} --grad-accum {share // nearest}, "
                        f"or --global-batch {(batch or 1) * (grad_accum or 1) * world_size}.")
    return global_batch, micro, share // micro
