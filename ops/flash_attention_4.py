"""FlashAttention 4 instead of torch's flash attention, if the package flash-attn-4 is installed.

torch itself has the switch for this. `--fast` doesn't need it: there torch uses cuDNN's attention, which is
as fast, but its backward pass can't add up in a fixed order.
"""

from importlib.metadata import distributions

import torch
from torch.nn import attention

from cli.errors import first_line

NOT_HERE = "only some processes have it"  # shown only if other processes do have it


def take(model, run, all_gather, at_end) -> bool:
    """Turns FlashAttention 4 on if all ranks can use it. Returns whether it is on.

    All ranks call this for the model in training. A resumed run uses it only if it did before. `all_gather`
    is the function in ddp_utils. The ExitStack `at_end` switches back to torch's own kernels.
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
    """Turns FlashAttention 4 on in this process and checks its results. Returns "" if they are right,
    NOT_HERE if it isn't installed or this run can't use it, otherwise what is wrong. In the last case it may
    still be on.
    """
    config = model.config
    if (run.world.device.type != "cuda" or model.compute_dtype == torch.float32
            or getattr(config, "attention", None) != "causal" or getattr(config, "dropout", 0)
            or not [*distributions(name="flash-attn-4")]
            or run.saved and not run.saved["settings"].get("flash_attention_4")):
        return NOT_HERE
    try:
        # (q k v, B, T, H, D): large, because another order of sums changes about one number in ten thousand
        qkv = torch.randn(3, 8, 1024, 8, config.head_dim, dtype=model.compute_dtype, device="cuda",
                          requires_grad=True)

        def both_passes() -> torch.Tensor:  # gradients; they also differ where only y differs
            y = torch._scaled_dot_product_flash_attention(*qkv.transpose(2, 3), is_causal=True)[0]
            return torch.autograd.grad(y, qkv, y)[0]

        right = both_passes()
        attention.activate_flash_attention_impl("FA4")
        gradients = both_passes()
        if not gradients.dist(right) <= 0.02 * right.norm():  # rounding to bfloat16 is 0.003
            return "its numbers differ from those of torch's kernel on this GPU"
        return "" if torch.equal(gradients, both_passes()) else "its bits differ between calls on this GPU"
    except Exception as error:  # a broken package can raise anything
        return first_line(error)
