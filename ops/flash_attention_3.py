"""FlashAttention 3, where the package flash_attn_3 is installed, in the place of torch's flash attention, by
torch's own switch. Not with --fast, where torch takes cuDNN's: that is as fast, but its backward pass cannot
add up in a fixed order.
"""

import importlib.metadata
import importlib.util

import torch
from torch.nn import attention

from cli.errors import UserError


def take(model, run, all_gather, at_end) -> bool:
    """Takes it if all ranks can, and returns whether they do. A resumed run takes it only if it did before.
    Every rank calls this, for the model in training. `all_gather` is that of ddp_utils; the ExitStack
    `at_end` gives torch its own kernels back.
    """
    began = not run.saved or run.saved["settings"].get("flash_attention_3")
    why_not = activate(model, run.world.device) if began else None
    found = {*all_gather(why_not)}
    if found == {""}:
        at_end.callback(attention.restore_flash_attention_impl)
        run.say("attention: FlashAttention 3")
        return True
    if why_not == "":
        attention.restore_flash_attention_impl()
    if found != {None}:
        why_not = max(filter(None, found), default="only some processes have it and a GPU for it")
        run.say(f"WARNING: FlashAttention 3 is not used: {why_not}")
    return False


def activate(model, device: torch.device) -> str | None:
    """Returns "" if this process has it now, None if it is not installed or not for this model or GPU, else
    what is wrong with it.
    """
    if model.compute_dtype == torch.float32 or not importlib.util.find_spec("flash_attn_3"):
        return None
    about = vars(model.config)
    wide = getattr(model.config, "head_dim", 256) > 192  # which a model of one's own may not have
    if about.get("attention") != "causal" or about.get("dropout") or wide:
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        if importlib.metadata.version("flash_attn_3").startswith("3.0.0b"):
            raise UserError("flash_attn_3 3.0.0b1 may add up in any order, so install 3.0.0 or newer")
        attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # a broken package has many
        return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removeprefix("UserError: ")
    return ""
