"""The state of training: a model, its optimizers, loss scaler and averaged weights."""

import contextlib
import functools
import gc
import inspect
import json
import math
import operator
import signal
from collections import Counter
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, Adam, AdamW
from torch.optim.optimizer import Optimizer

from cli.errors import RunError, UserError, joined, set_handler
from cluster.late import Late
from ddp_utils import (
    HostCopy,
    Run,
    StopVote,
    all_gather,
    assert_in_sync,
    assert_same,
    assert_same_parameters,
    bit_sum,
    leave_at_once,
    process,
    transfer,
)
from model import copied_buffers
from ops.device import compiles
from ops.ema import EMA, local_shard
from training.strategies import copy_from_rank0, reshard, set_modes, wrap


def assert_all_train(model: nn.Module, optimizers: list):
    """Raises UserError unless each parameter that trains is in exactly one optimizer, and is sharded if the
    model is. The optimizers must have no other parameters, no state outside of their own, and a step that
    needs no closure.
    """
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            raise UserError(f"{type(optimizer).__name__} computes the loss again in its step, but a trainer "
                            "computes it once: use an optimizer with a step that needs no closure.")
        if inside := [type(value).__name__ for value in torch.utils._pytree.tree_leaves(vars(optimizer))
                      if isinstance(value, Optimizer) and value.state is not optimizer.state]:
            raise UserError(f"no checkpoint would hold the state of {joined(inside)}, which "
                            f"{type(optimizer).__name__} wraps: use an optimizer that keeps all of its state "
                            "in its own state[p].")
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if whole and isinstance(model, FSDPModule):
        raise UserError(f"{joined(whole)} was added to the model after new_model, so it is not sharded and "
                        "its gradient would never be averaged: create it in the model's constructor, or use "
                        "--strategy ddp or zero1.")
    count = Counter(p for o in optimizers for group in o.param_groups for p in group["params"])
    if foreign := [list(p.shape) for p in count.keys() - {*model.parameters()}]:
        raise UserError(f"the optimizers have parameters that are not the model's ({len(foreign)}, one of "
                        f"shape {max(foreign)}), so no checkpoint would hold them, and each process would "
                        "train its own: create them in the model's constructor, see docs/changing.md.")
    odd = [f"{name} in {count[p]}" for name, p in model.named_parameters()
           if p.requires_grad and count[p] != 1]
    if odd:
        raise UserError(f"each parameter has to be in one optimizer, but {joined(odd)}: if it is in 2, take "
                        "it out of one; if it is in 0, add it, or freeze it with requires_grad_(False).")


def clip_grad_norm(parameters, max_norm: float) -> Tensor:
    """Scales gradients down to a total norm of at most max_norm (0: no limit). Returns the norm before that,
    a scalar, which is the same on all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]  # frozen parameters have none
    shards = [local_shard(g) for g in gradients]
    norm = nn.utils.get_total_norm(shards)
    if isinstance(gradients[0], DTensor):
        squared = norm.to(gradients[0].device_mesh.device_type) ** 2
        dist.all_reduce(squared)
        norm = squared.sqrt()
    if max_norm > 0:
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(shards, clip.to(shards[0].device))
    return norm


class DeviceNorm(Tensor):
    """A scalar on the device that prints like a number. Only printing makes the host wait for it. What you
    compute from it is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # as in nn.Parameter

    def __format__(self, spec: str = "", **_) -> str:
        return format(self.item(), spec)

    __repr__ = __format__


def count_hooks(optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks | optimizer._optimizer_step_post_hooks)


def skips_on_device(optimizer, whole) -> bool:
    """Whether the device can skip an update of `optimizer`: torch's fused kernels do if `found_inf` is 1.

    With zero1, `whole` has the parameters of all ranks, so that all ranks give the same answer. Subclasses
    and wrappers don't count, because they may do more in a step. SGD doesn't either: if it skipped the first
    update, its momentum would have no values.
    """
    return type(optimizer) in (AdamW, Adam, Adagrad) and not count_hooks(whole) and all(
        group["fused"] and p.is_cuda for group in whole.param_groups for p in group["params"])


def refuse_unsaved(values: dict):
    """Raises UserError for what JSON cannot hold of an optimizer's values."""
    for name, value in values.items():
        kept = None
        with suppress(TypeError, ValueError):
            kept = json.loads(json.dumps(value))
        if str(kept) != str(value):  # JSON makes a list of a tuple, and text of a number that is a key
            raise UserError(f"an optimizer keeps {name} as {type(value).__name__}, which a checkpoint cannot "
                            "hold: make it a number, a text, a list of these, or a tensor in self.state[p]; "
                            "with --strategy ddp, also a list of tensors there or a tensor in the group.")


def first_step_values(optimizer: torch.optim.Optimizer) -> dict:
    """What a step with zero gradients adds to a new optimizer of the same class: entries of its parameter
    group, and of its state, True for a tensor. {} if its constructor needs more arguments.
    """
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.zeros_like(p)
    before = optimizer.param_groups[0]
    with contextlib.suppress(Exception):
        other = type(optimizer)([before | {"params": [p]}], lr=optimizer.defaults["lr"])  # as for zero1
        other.step()
        kept = {key: isinstance(value, Tensor) or value for key, value in other.state[p].items()}
        return {f"{type(optimizer).__name__}/{key}": value
                for key, value in (kept | other.param_groups[0]).items() if key not in before}
    return {}


# What to do if an optimizer divides its work among ranks
WHOLE_STATE = ("let every rank compute the state of every parameter, or let --strategy zero1 divide an "
               "optimizer that doesn't divide its work itself, such as torch.optim.Muon")


class TrainState:
    """A model in training: `model`, `wrapped` (the model in DDP), optimizers, loss scaler, averaged weights.
    `state_dict` yields the tensors of a checkpoint; saving and `load_state_dict` both iterate over them.
    """

    MAX_SKIPPED = 10  # skipped updates in a row after which the run ends

    def __init__(self, model: nn.Module, optimizers: list, run: Run):
        assert_all_train(model, optimizers)
        args, world = run.args, run.world
        if compiles(args.compile, world.device):
            run.say("compiling: the first step takes minutes")
        set_modes(model, args, world)
        self.model = model
        self._trained = {p: p.requires_grad for p in model.parameters()}
        self._views = {}  # by parameter: its view of DDP's bucket
        self.world = world
        self.optimizers = optimizers
        self.zero1 = args.strategy == "zero1"
        self.ddp = args.strategy == "ddp"
        if not self.ddp:
            for optimizer in optimizers:
                values = first_step_values(optimizer)
                refuse_unsaved(values)
                assert_same(f"what {type(optimizer).__name__} keeps", f"{[*values]}", WHOLE_STATE)
        if self.zero1:  # each process updates its part of the parameters and sends it in one buffer
            from torch.distributed.optim import ZeroRedundancyOptimizer
            self.optimizers = [ZeroRedundancyOptimizer(o.param_groups, type(o), lr=o.defaults["lr"],
                                                       parameters_as_bucket_view=True)
                               for o in optimizers]
            for old, new in zip(optimizers, self.optimizers):
                if count_hooks(old) > count_hooks(new.optim):  # its constructor may register some itself
                    raise UserError("--strategy zero1 creates the optimizers again, without these hooks: "
                                    "register them on state.optimizers, after TrainState.")
            with suppress(TypeError):  # the trainer may register hooks later, so its list gets the new ones
                optimizers[:] = self.optimizers
        # the optimizers that hold the state; with zero1, only the state of this process's parameters
        self.inner = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]
        self.groups = {}  # the parameter groups by name, such as "AdamW 0.1"
        for i, (inner, optimizer) in enumerate(zip(self.inner, self.optimizers)):
            for j, group in enumerate(optimizer.param_groups):
                self.groups[f"{type(inner).__name__} {i}.{j}"] = group
        self._initial_values = {name: repr(value) for name, value in self._group_values().items()}
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=model.compute_dtype == torch.float16)
        self.ema = None
        if args.ema:
            self.ema = EMA(model, args.ema)
        self.wrapped = wrap(model, world, args.comm)
        self.late = None
        if args.comm == "late":
            self.late = Late(model, self.inner, run)
        self.skipped = 0  # updates in a row that were skipped, because the gradient was not finite
        self._checked = False  # whether it is known that checkpoints can hold the optimizers' state
        self._updated = True
        self._norm = None  # the gradient norm of the last step, until the host has read it

    def no_sync(self, accumulating: bool):
        """A context for one micro-batch. With `accumulating` DDP keeps gradients local: pass True for all
        micro-batches of a step except the last.

        Gradients that are None become zeros in DDP's buckets. Otherwise a backward pass without communication
        would allocate them a second time.
        """
        if empty := {p: view for p, view in self._views.items() if p.grad is None}:
            torch._foreach_zero_(list(empty.values()))
            for p, view in empty.items():
                p.grad = view
        ddp = isinstance(self.wrapped, DistributedDataParallel)
        return self.wrapped.no_sync() if ddp and accumulating else contextlib.nullcontext()

    def warm_up(self, example: dict, after_ramp: dict | None = None):
        """Runs three backward passes and throws their gradients away. The first is of model(**example). The
        other two are of model(**after_ramp), if the steps compute something else after a ramp.

        The first one, without communication, checks that every parameter gets a gradient when training
        starts; if not, it raises RunError. The other two settle DDP's buckets: DDP rearranges them after its
        first step, which changes the order of sums. Otherwise a resumed run would drift from an uninterrupted
        one.
        """
        set_handler(signal.SIGINT, leave_at_once)
        self._refuse_thawed()
        later = after_ramp or example
        for i, inputs in enumerate((example, later, later)):
            self.wrapped.zero_grad()
            with copied_buffers(self.model), self.no_sync(i == 0):
                self.wrapped(**inputs)[0].backward()
            reshard(self.model)
            for name, p in self.model.named_parameters():
                if p.requires_grad and p.grad is None:
                    raise RunError(f"{name} gets no gradient: use it in each forward pass, or freeze it with "
                                   "requires_grad_(False); to skip a layer at random, multiply what it adds "
                                   "by 0.")
        self.clear_gradients()
        assert_in_sync(self.model, training=False)
        # From now on garbage collection leaves out all objects that exist: scanning them takes half a second.
        gc.collect()
        gc.freeze()
        process.at_end.callback(gc.unfreeze)

    def clip_gradients(self, max_norm: float, stop: StopVote | None = None) -> "float | DeviceNorm":
        """Clips the gradients. Returns their norm before clipping, exactly 0 for a step without labels.

        With --comm late, the gradients of the previous step first replace those of this one. Also reads the
        previous step's vote from `stop`. Here the host waits for the device, once a step: for the end of the
        previous step if the device can skip an update, otherwise for the norm.
        """
        reshard(self.model)
        self._refuse_thawed()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.late:
            self.late.exchange()
        norm = clip_grad_norm(self.model.parameters(), max_norm)
        self._count_skipped()
        if stop:
            stop.read()
        steppers = self.inner if self.zero1 else self.optimizers  # a wrapper may do more than its .optim
        if self.scaler.is_enabled() or not all(map(skips_on_device, steppers, self.optimizers)):
            return norm.item()
        return norm.as_subclass(DeviceNorm)

    def _refuse_thawed(self):
        """Raises UserError if parameters were frozen or unfrozen after the constructor ran."""
        if odd := {p for p, trained in self._trained.items() if p.requires_grad != trained}:
            names = [name for name, p in self.model.named_parameters() if p in odd]
            raise UserError(f"requires_grad of {joined(names)} has changed since TrainState began, and "
                            "neither the optimizers nor the other processes would follow: set it before "
                            "make_optimizers, and don't change it later. To freeze parameters for some "
                            "steps, set p.grad = None in those steps, see docs/changing.md.")

    def optimizer_step(self, lr: float, grad_norm: "float | DeviceNorm"):
        """Steps the optimizers, unless the gradient norm is 0 or not finite; it must be the same on all
        ranks. Then clears the gradients and updates the average. Raises RunError if the gradient was not
        finite MAX_SKIPPED times in a row; if the norm is still on the device, the next clip_gradients does.
        """
        if self.late:
            self.late.leave_out()
        on_device = isinstance(grad_norm, DeviceNorm)
        steps = (grad_norm > 0) & (grad_norm < math.inf)
        for optimizer, inner in zip(self.optimizers, self.inner):
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
            if on_device:
                inner.found_inf = 1.0 - steps.float()  # GradScaler sets it the same way
                optimizer.step()
                del inner.found_inf
            elif steps:
                optimizer.step()
        self.clear_gradients()
        self.scaler.update()  # unscale_ has looked for inf and NaN
        if self.ema:
            self.ema.update()
        self._norm = HostCopy(grad_norm) if on_device else grad_norm
        if not on_device:
            self._count_skipped()
        if not self._checked:  # if a checkpoint can't hold the state, fail now, not hours later
            self.non_tensor_values()
            self._checked = True

    @property
    def updated(self) -> bool:
        """Whether the gradient of the last step was finite. The host waits for it."""
        self._count_skipped()
        return self._updated

    def _count_skipped(self):
        if self._norm is None:
            return
        self._updated = math.isfinite(self._norm)
        self._norm = None
        if not self.scaler.is_enabled() or self.scaler.get_scale() < 1:  # fp16 tries smaller scales first
            self.skipped = 0 if self._updated else self.skipped + 1
        if self.skipped >= self.MAX_SKIPPED:
            raise RunError(f"the gradient was not finite {self.MAX_SKIPPED} times in a row: lower --lr, or "
                           "use --precision bf16 or fp32, and start again; the run resumes from the newest "
                           "checkpoint, or from the one before if you delete that.")

    def clear_gradients(self):
        """Sets all gradients to None. Zeros could be mistaken for the gradients of a step."""
        params = [p for p in self.model.parameters() if p.grad is not None]  # one pass: the GPU is idle here
        if isinstance(self.wrapped, DistributedDataParallel):
            self._views |= {p: p.grad for p in params}
        for p in params:
            p.grad = None

    @contextlib.contextmanager
    def averaged_weights(self):
        """A context in which the model has the averaged weights, if the run keeps any. Afterwards its buffers
        are restored, too.
        """
        with copied_buffers(self.model):
            if self.ema:
                self.ema.swap()
                reshard(self.model)
            try:
                yield
            finally:
                if self.ema:
                    self.ema.swap()
                reshard(self.model)  # without an average, too: requires_grad is set on shards

    def state_dict(self):
        """Yields (group, name, tensor, owner) for each tensor of a checkpoint, in the same order on all
        ranks. If `owner` is None, all ranks have the tensor or a shard of it (DTensor). Otherwise only rank
        `owner` has it, and the other ranks yield a meta tensor of its shape.
        """
        held = self.optimizer_tensors()
        groups = {"model": self.model.state_dict()}
        if self.ema:
            groups |= self.ema.state_dict()
        if self.late:
            groups["late"] = self.late.state_dict()
        if not self.zero1:
            groups["optimizer"] = held
        for group, named in groups.items():
            yield from ((group, name, tensor, None) for name, tensor in named.items())
        if self.zero1:
            of_ranks = all_gather({name: tensor.to("meta") for name, tensor in held.items()})
            for owner, shapes in enumerate(of_ranks):
                for name, shape in shapes.items():
                    yield "optimizer", name, held.get(name, shape), owner

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This process's optimizer state by parameter and key, such as `embed.weight/exp_avg`; with ddp also
        `embed.weight/Q.0` of a list, and the tensors in parameter groups.
        """
        values = self._state()
        if self.ddp:
            values |= self._group_values()
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _state(self) -> dict:
        """This process's optimizer state by parameter and key. Raises RunError for state of anything else."""
        names = {p: name for name, p in self.model.named_parameters()}
        states = {}
        for optimizer in self.inner:
            for p, state in optimizer.state.items():
                if p not in names:  # of a tensor the shape, not its numbers
                    raise RunError(f"{type(optimizer).__name__} keeps state of {getattr(p, 'shape', p)}, "
                                   "which is no parameter, so no checkpoint can hold it: keep it in "
                                   "self.state[p] or the group.")
                for key, value in state.items():
                    name = f"{names[p]}/{key}"
                    if isinstance(value, list) and value and all(
                            isinstance(part, Tensor) or part == [] for part in value):
                        states |= {f"{name}.{i}": part for i, part in enumerate(value)
                                   if isinstance(part, Tensor)}
                    else:
                        states[name] = value
        return states

    def _group_values(self) -> dict:
        """What the optimizers keep in their groups besides what the trainer sets, by group and key."""
        of_trainer = {"params", "lr", "weight_decay", "scale", "betas", "fused", "foreach"}
        return {f"{name}/{key}": value for name, group in self.groups.items()
                for key, value in group.items() if key not in of_trainer}

    def non_tensor_values(self, bits: bool = True) -> dict:
        """What a checkpoint holds of the optimizers besides tensors: values in their state, and those in
        their groups that they have changed. Every rank calls this. Raises UserError for what JSON cannot
        hold, and for state that isn't the same on all ranks, except with zero1. Without `bits` only its names
        are compared: before a checkpoint is restored, parameters and copies of them differ.
        """
        states = self._state()
        values = {name: value for name, value in states.items() if not isinstance(value, Tensor)}
        if self.zero1:
            values = functools.reduce(operator.or_, all_gather(values))
        else:
            # also catches slices of one shape; values that are no tensors are compared below
            sums = {name: bits and type(value) is Tensor and int(bit_sum(value))
                    for name, value in states.items()}
            for other in all_gather(sums):
                if odd := sums.items() ^ other.items():
                    raise UserError(f"{min(odd)[0]}, which an optimizer keeps, is not the same on all ranks, "
                                    f"and a checkpoint would hold only rank 0's: {WHOLE_STATE}.")
        values |= {name: value for name, value in self._group_values().items()
                   if repr(value) != self._initial_values.get(name)
                   and not (self.ddp and isinstance(value, Tensor))}
        refuse_unsaved(values)
        assert_same("what an optimizer keeps in numbers", json.dumps(values),
                    "let it sum over all ranks what it computes from gradients or parameters, with "
                    "torch.distributed.all_reduce, or use --strategy ddp")
        return values

    @torch.no_grad()
    def load_state_dict(self, saved: dict, say):
        """Copies the tensors of a checkpoint, which rank 0 has read, to all ranks, one by one, so no other
        rank holds a second copy. A new --ema starts from the weights. A parameter whose saved optimizer state
        has other names or shapes starts without optimizer state.
        """
        assert_same_parameters(self.model, saved)
        tensors = saved["tensors"]
        parameters = dict(self.model.named_parameters())
        self._create_optimizer_state()
        for name, tensor in tensors["optimizer"].items():
            owner, _, key = name.rpartition("/")
            if owner in self.groups:  # a later step than the first may make it
                self.groups[owner][key] = torch.empty_like(tensor, device=self.world.device)
        ours = {name: t.shape for group, name, t, _ in self.state_dict() if group == "optimizer"}
        theirs = {name: t.shape for name, t in tensors["optimizer"].items()}
        plain = saved["plain"]
        ours |= dict.fromkeys(self.non_tensor_values(bits=False))
        theirs |= dict.fromkeys(plain)
        changed = {name.rpartition("/")[0] for name, _ in ours.items() ^ theirs.items()}
        changed -= self.groups.keys()  # their values always come from the checkpoint
        if discarded := changed & {name.rpartition("/")[0] for name in theirs}:  # others have had no step yet
            say(f"WARNING: the optimizer starts from scratch with {joined(sorted(discarded))}, because "
                "what it had saved there is not what it makes in a first step")
        for group, name, tensor, owner in self.state_dict():
            source = tensors.get(group, {}).get(name)
            unlike = source is None or source.shape != tensor.shape
            if group in ("ema", "kept") and unlike:
                tensor.copy_(parameters[name])
            elif name.rpartition("/")[0] in changed or unlike and group != "model":
                pass  # saved with another --comm or other frozen parameters: it starts from scratch
            elif owner is None:
                copy_from_rank0(tensor, source, self.world)
            elif (received := transfer(source, 0, owner, self.world)) is not None:
                tensor.copy_(received)
        for optimizer in self.inner:
            for name in changed:
                optimizer.state.pop(parameters.get(name), None)
        for name, value in plain.items():
            owner, _, key = name.rpartition("/")
            if owner in self.groups:
                self.groups[owner][key] = value
            for optimizer in self.inner:
                if (p := parameters.get(owner)) in optimizer.state:
                    optimizer.state[p][key] = value
        if self.ema:
            self.ema.updates = saved["ema_updates"] or saved["step"]  # the run may have had no average
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])

    def _create_optimizer_state(self):
        """Steps with gradient and learning rate 0, one parameter at a time, to hold only one gradient. The
        parameter groups stay as they are.
        """
        for optimizer in self.inner:
            before = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for p in group["params"]:
                    if p.requires_grad:
                        p.grad = torch.zeros_like(p)
                        optimizer.step()
                        p.grad = None
            for group, values in zip(optimizer.param_groups, before):
                group.clear()
                group.update(values)
