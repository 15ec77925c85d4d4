"""A model on ranks, replicated or sharded (--strategy), and how it computes (--precision, --compile, …)."""

import os
import warnings
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from cli.errors import UserError
from cli.flags import SHARDED
from ddp_utils import World
from model import blocks_of, use_device
from ops.device import compiles, compute_dtype
from ops.ema import local_shard


def build_model(model_class: type, config, world: World, strategy: str = "ddp",
                comm: str = "fp32") -> nn.Module:
    """Builds a model on this process's device, sharded if `strategy` says so. Parameters are uninitialized;
    buffers keep their initial values. Raises UserError if the model can't be built this way.

    Parameters are created on the meta device, without memory. So only rank 0, which has the weights, ever
    holds all of them in host memory.

    With `comm` bf16, FSDP gathers the parameters of blocks in bfloat16, to which the layers would cast them
    anyway, and sums their gradients in bfloat16, over the uses of a weight and over ranks. Some parameters
    outside of blocks are used in float32, so all of those are sent in float32.
    """
    def on_meta(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter:
        return p if p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)

    torch.manual_seed(0)  # so that random buffers are the same on all ranks, and in a resumed run
    with register_module_parameter_registration_hook(on_meta):
        model = model_class(config)
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(p, name)) != name:
            raise UserError(f"{first} and {name} of {model_class.__name__} are one parameter, which training "
                            "would split in two: register it once, and use it twice in forward.")
    buffers = {(module, name): buffer for module in model.modules()
               for name, buffer in module.named_buffers(recurse=False)}
    offload = strategy == "zero3-offload"
    if strategy in SHARDED:
        options = {"mesh": init_device_mesh(world.device.type, (world.world_size,)),
                   "reshard_after_forward": strategy != "zero2"}  # zero2 keeps parameters gathered
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        sent = {}
        if comm == "bf16":
            sent["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        for block in blocks_of(model):
            fully_shard(block, **options, **sent)
        fully_shard(model, **options)
        if strategy == "zero2":  # HRM calls its blocks several times; reshard() frees them once a step
            model.set_reshard_after_backward(False)
        if hasattr(model, "decode"):
            register_fsdp_forward_method(model, "decode")
    model.to_empty(device="cpu" if offload else world.device)
    for (module, name), buffer in buffers.items():
        if buffer.is_meta:
            raise UserError(f"the buffer {name} of {type(module).__name__.removeprefix('FSDP')} is made from "
                            "a parameter, which has no values while the model is being built: compute it in "
                            "forward.")
        setattr(module, name, buffer.to(world.device))
    return model


def reshard(model: nn.Module):
    """Frees the parameters that zero2 and zero3 have gathered. After an update they are stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_from_rank0(tensor: Tensor, source: Tensor | None, world: World):
    """Copies `source`, which rank 0 has unsharded, into `tensor` on all ranks, sharded or not."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if world.is_rank0:
        full.copy_(source)
    dist.broadcast(full, src=0)
    if isinstance(tensor, DTensor):
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_shard(tensor).copy_(local_shard(full))


def copy_weights(model: nn.Module, weights: dict[str, Tensor], world: World):
    """Copies `weights` into the model on all ranks. Rank 0 has them, unsharded and by name."""
    for name, tensor in model.state_dict().items():
        copy_from_rank0(tensor, weights.get(name), world)


def set_modes(model: nn.Module, args: Namespace, world: World):
    """Applies the same flags to any model, such as one that is only evaluated."""
    if world.device.type == "cuda":
        # By default, attention's backward pass on a GPU adds up gradients in no fixed order, so a resumed run
        # would differ from an uninterrupted one. warn_only isn't enough, because torch would still pick such
        # kernels. The setting also fixes the block sizes of Inductor's kernels that add up. Inductor still
        # tunes elementwise kernels, which changes no bits.
        if not args.fast:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(not args.fast)  # an earlier run in this process may have set it
        torch.utils.deterministic.fill_uninitialized_memory = False  # filling each torch.empty takes time
    compiling = {}
    torch._dynamo.config.optimize_ddp = False  # it would split a block where a gradient bucket ends
    # above this limit a block would run uncompiled, with other bits
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if compiles(args.compile, world.device):
        # round where eager code does, so that recomputing gives the same bits
        compiling["options"] = {"emulate_precision_casts": not args.fast,
                                # again, because the thread of the backward pass may compile, too
                                "deterministic": torch.are_deterministic_algorithms_enabled()}
    use_device(model, world.device, compute_dtype(args.precision, world.device), args.checkpoint_activations,
               **compiling)


def wrap(model: nn.Module, world: World, comm: str = "fp32") -> nn.Module:
    """Wraps the model in DistributedDataParallel. Returns it unwrapped if there is one process, if it is
    sharded, or if `comm` is late. Parameters must be the same on all ranks before the first step.
    """
    if world.world_size == 1 or comm == "late" or isinstance(model, FSDPModule):
        return model
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.11 has only this name
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True,
                                      init_sync=False)
    if comm == "bf16":  # a lambda, because DDP refuses this hook by name without NCCL
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return wrapped
