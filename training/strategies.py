"""A model on ranks, replicated or sharded (--strategy), how it computes (--precision, --compile, …), and what
memory that takes.
"""

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
from cli.flags import SHARDED, uses_model
from ddp_utils import World
from model import blocks_of, hidden_matrices, num_params, use_device
from ops.device import compiles, compute_dtype
from ops.ema import local_shard


def refuse_together(args: Namespace, world: World):
    """Raises UserError for flags that can't train together, and for shards on GPUs with gloo, which would
    crash the process.
    """
    sharded = args.strategy in SHARDED
    trains = not uses_model(args)
    if sharded and (trains or args.eval_only) and world.backend == "gloo" and world.device.type == "cuda":
        raise UserError(f"--strategy {args.strategy} on GPUs needs NCCL, and the backend is gloo: give "
                        "--strategy ddp or zero1, or --backend nccl.")
    if not trains:
        return
    if sharded and args.optimizer == "muon":
        raise UserError("--optimizer muon needs whole matrices: give --strategy ddp or zero1, or start a new "
                        "run with --optimizer adamw.")
    dtype = compute_dtype(args.precision, world.device)
    if args.comm == "bf16" and args.strategy == "zero1":
        raise UserError("--comm bf16 needs --strategy ddp, zero2 or zero3: give one, or --comm fp32.")
    if args.comm == "bf16" and args.strategy != "ddp" and dtype != torch.bfloat16:
        raise UserError("--comm bf16 with shards needs --precision bf16: give both, or --comm fp32.")
    if args.comm == "late" and (args.strategy != "ddp" or dtype == torch.float16):
        raise UserError("--comm late needs --strategy ddp and --precision bf16 or fp32: or leave it out.")


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
    """Applies --precision, --checkpoint-activations, --compile and --fast to a model, also if it is only
    evaluated.
    """
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


def memory_of(model: nn.Module, strategy: str, args: Namespace, processes: int,
              activations: int) -> dict[str, float]:
    """Returns the peak bytes in each process, by type, with `strategy` instead of --strategy.

    zero2 and zero3 hold their shards, gathered parameters, and the gradients of one block and of parameters
    outside blocks. zero2 gathers all parameters. zero3 gathers two blocks (one is prefetched) and parameters
    outside blocks. With the other strategies, the largest gradient exists twice for a while, as parts from
    embedding and head. `warm_up`, which runs before there is optimizer state, holds each gradient twice.
    """
    largest_one = 4 * max(p.numel() for p in model.parameters())
    blocks = [4 * num_params(block) for block in blocks_of(model)]
    everything = 4 * num_params(model)
    outside = everything - sum(blocks)
    block = max(blocks, default=0)
    state = 2 * everything  # AdamW keeps two numbers per parameter, Muon one
    if args.optimizer == "muon":
        state -= 4 * sum(p.numel() for p in hidden_matrices(model))
    sharded = strategy in SHARDED
    offload = strategy == "zero3-offload"
    held = 0 if offload else everything / (processes if sharded else 1)
    gathered = (everything if strategy == "zero2" else outside + 2 * block) if sharded else 0
    optimizer = 0 if offload else state if strategy == "ddp" else state / processes
    gradients = held + (outside + block if sharded else max(largest_one, everything - optimizer))
    averaged = held if args.ema else 0
    # the next gradient, the last move
    late = 2 * everything if strategy == "ddp" and args.comm == "late" else 0
    return {"parameters": held + gathered, "gradients": gradients + late, "optimizer": optimizer,
            "other": averaged + late, "activations": activations}  # the first late: copies
