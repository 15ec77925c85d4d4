"""FlashAttention 4, where the package flash-attn-4 is installed, in the place of torch's flash attention, by
torch's own switch. Not with --fast, where torch takes cuDNN's: that is as fast, but its backward pass cannot
add up in a fixed order.
"""

from importlib.metadata import distributions

import torch
from torch.nn import attention

from cli.errors import first_line

NOT_HERE = "only some processes have it"  # said if that is so


def take(model, run, all_gather, at_end) -> bool:
    """Takes it if all ranks can, and returns whether they do. A resumed run takes it only if it did before.
    Every rank calls this, for the model in training. `all_gather` is that of ddp_utils; the ExitStack
    `at_end` gives torch its own kernels back.
    """
    problems = {*all_gather(activate(model, run))}
    taken = problems == {""}
    if taken:
        at_end.callback(attention.restore_flash_attention_impl)
    elif attention.current_flash_attention_impl() == "FA4":
        attention.restore_flash_attention_impl()
    if problems != {NOT_HERE}:
        run.say("attention: FlashAttention 4" if taken else
                f"WARNING: FlashAttention 4 is not used, see docs/clusters.md: {min(problems - {''})}")
    return taken


def activate(model, run) -> str:
    """Returns "" if this process has it now and it is right, NOT_HERE if it is not installed or not for this
    run, else what is wrong with it; then it may be active all the same.
    """
    config = model.config
    if (run.world.device.type != "cuda" or model.compute_dtype == torch.float32
            or getattr(config, "attention", None) != "causal" or getattr(config, "dropout", 0)
            or not [*distributions(name="flash-attn-4")]
            or run.saved and not run.saved["settings"].get("flash_attention_4")):
        return NOT_HERE
    try:
        # (q k v, B, T, H, D): many, since another order of sums changes one of some ten thousand numbers
        qkv = torch.randn(3, 8, 1024, 8, config.head_dim, dtype=model.compute_dtype, device="cuda",
                          requires_grad=True)

        def both_passes() -> torch.Tensor:  # the gradients, which differ where y differs, too
            y = torch._scaled_dot_product_flash_attention(*qkv.transpose(2, 3), is_causal=True)[0]
            return torch.autograd.grad(y, qkv, y)[0]

        right = both_passes()
        attention.activate_flash_attention_impl("FA4")
        gradients = both_passes()
        if not gradients.dist(right) <= 0.02 * right.norm():  # rounding to bfloat16 is 0.003
            return "its numbers are not those of torch's kernel on this GPU"
        return "" if torch.equal(gradients, both_passes()) else "its bits are not the same twice on this GPU"
    except Exception as error:  # a broken package has many
        return first_line(error)
