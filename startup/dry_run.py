"""--dry-run: how much memory each process would need."""

import contextlib
import os
import re
from argparse import Namespace
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cli.errors import UserError, first_line, from_launcher, say
from cli.flags import STRATEGIES, flags_of_model
from data import read_manifest, sources_of
from ddp_utils import list_checkpoints
from model import MLM, num_params, pad_vocab, use_device
from ops import cross_entropy
from ops.device import compute_dtype
from prepare.pipeline import default_tokenizer, directory_of
from startup.plan import describe_shape, plan_batch, wrap_lines
from training.strategies import memory_of
from vocab.tokenizer import TIKTOKEN_IDS, load_tokenizer


def expected_ids(data: str, flags: dict) -> int:
    """How many ids --data and --tokenizer will have, with [MASK], before anything is prepared."""
    if manifest := read_manifest(directory_of(data, flags)):
        return max(manifest["tokenizer"]["vocab_size"], manifest["tokenizer"]["mask"] + 1)
    name = flags["tokenizer"] or default_tokenizer(data)
    if re.fullmatch(r"bpe:\d+", name):
        return int(name[4:])
    return TIKTOKEN_IDS.get(name) or load_tokenizer(name).num_ids


class _Alive(TorchDispatchMode):
    """Records the storage of each computed tensor, also in compiled blocks, without keeping it alive."""

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)  # else Dynamo compiles nothing in a mode

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        return result


def activation_bytes(loss, others) -> int:
    """Bytes that stay in memory for the backward pass of loss(), not counting the tensors `others`."""
    known = {StorageWeakRef(t.untyped_storage()) for t in others}
    with _Alive() as alive:
        kept = loss()
    nbytes = sum(n for storage, n in alive.sizes.items() if storage not in known and not storage.expired())
    del kept
    return nbytes


def kept_for_backward(model_class: type, config, device: torch.device, dtype: torch.dtype,
                      checkpointing: str, inputs: dict, compiled: bool) -> int:
    """Counts the bytes of activations that a model's backward pass needs, on tensors that have a shape but no
    memory. `inputs` are the arguments of forward; only their types and shapes matter. With `compiled`, counts
    what compiled blocks keep: they recompute cheap operations in any mode.
    """
    if hasattr(config, "dropout"):  # attention with dropout keeps T x T probabilities, but only on CPUs
        config = replace(config, dropout=0.0)
    with torch.device("meta"):
        model = model_class(config)
    # nothing is computed, so don't split the loss into rows that fit a cache
    unsplit = mock.patch.object(cross_entropy, "LOSS_CACHE", 2**40)
    with FakeTensorMode(allow_non_fake_inputs=True), unsplit:
        model.to_empty(device="cpu")
        # splits forward and backward as Inductor does, but without its kernels
        compiling = {"backend": "aot_eager_decomp_partition"} if compiled else {}
        use_device(model, device, dtype, checkpointing, **compiling)
        model.compile_loss = False
        inputs = tree_map_only(Tensor, lambda value: torch.zeros_like(value, device="cpu"), inputs)
        return activation_bytes(lambda: model(**inputs)[0], [*model.parameters(), *model.buffers()])


USABLE = {"cuda": 0.9, "cpu": 0.85}  # share of a process's memory; libraries, fragmentation take the rest


def fits(held: dict[str, float], gigabytes: float, device: torch.device) -> bool:
    return sum(held.values()) / 1e9 <= USABLE[device.type] * gigabytes


def empty_model(model_class: type, args: Namespace) -> nn.Module:
    """Makes the model that a trainer's flags ask for, on the meta device."""
    ids = expected_ids(sources_of(args.data)[0], vars(args))
    ids = args.vocab_size or pad_vocab(ids - (not issubclass(model_class, MLM)))  # only MLM has [MASK]
    flags = flags_of_model(model_class.Config, args)
    with torch.device("meta"):
        return model_class(model_class.Config(vocab_size=ids, padded_vocab=ids, **flags))


def before_data(run, example: dict, free: float) -> tuple[int, str, str]:
    """Returns how many tokens of a source on the hub to prepare: 20 for each parameter of the model. Then,
    for training on GPUs, which activations to recompute and what each mode needs. `free` is the memory of a
    process in GB before its model is built, `run` a ddp_utils.Run.

    On GPUs it warns if the model doesn't fit. It raises UserError if the model needs more than 1.3 times the
    memory, unless the data are prepared already.
    """
    args, needs = run.args, ""
    if run.world.device.type == "cuda" and not args.eval_only:
        said = []
        with contextlib.suppress(TypeError):  # `dummy_inputs` of a user's model may want other arguments
            share, needs = dry_run(run.model_class, args, said.append, free, **example)
            torch.compiler.reset()  # what was compiled for counting won't run
            text = f"a process needs {share:.0%} of its memory, see --dry-run: {said[-1]}"
            if share > 1.3 and not any(directory_of(sources_of(args.data)[0], vars(args)).glob("*.bin")):
                raise UserError(text)
            if share > USABLE["cuda"]:
                say(f"WARNING: {text}")
    mode = args.checkpoint_activations
    if mode == "auto":  # nothing could be counted
        mode = run.size_defaults.get("checkpoint_activations", "none")
    return 20 * num_params(empty_model(run.model_class, args)), mode, needs


def dry_run(model_class: type, args: Namespace, say=print, free: float = 0, **example) -> tuple[float, str]:
    """Prints the memory that each process would need with each strategy, and whether it fits. Sets
    --checkpoint-activations auto to the fastest that fits. Returns the share of the memory that --strategy
    needs, and in one line what each mode of recomputing needs. `free` GB replace the memory of this machine.
    """
    if from_launcher("RANK") > 0:
        return 0, ""
    if args.dry_run is not None and args.out and list_checkpoints(args.out):
        raise UserError(f"--dry-run does not read the run in {args.out}: give its flags, without --out.")
    gpus = uses_gpus(args)
    processes, gigabytes = machine(args.dry_run, gpus)
    gigabytes = free or gigabytes
    global_batch, batch, grad_accum = plan_batch(
        processes, args.global_batch, args.batch, args.grad_accum, args.wanted_batch, args.largest_batch)
    model = empty_model(model_class, args)
    # GPUs that aren't here compute in bf16
    precision = "bf16" if gpus and args.precision == "auto" else args.precision
    dtype = compute_dtype(precision, torch.device("cpu"))
    compiled = gpus if args.compile is None else args.compile
    inputs = model.dummy_inputs(batch, "meta", **example)
    mode = args.checkpoint_activations
    device = torch.device("cuda" if gpus else "cpu")
    labels = inputs["labels" if "labels" in inputs else "targets"].numel()
    logits = cross_entropy.logits_bytes(labels, model.config.padded_vocab, dtype, compiled)
    kept = {}  # bytes of activations by mode, the fastest mode first
    failed = ""
    for other in ("none", "selective", "block"):
        try:
            kept[other] = logits + kept_for_backward(model_class, model.config, device, dtype, other, inputs,
                                                     compiled)
        except Exception as error:  # such as shapes that depend on the data
            failed = first_line(error)
    chosen = args.strategy
    held = {other: memory_of(model, chosen, args, processes, kept[other]) for other in kept}
    fast = [other for other in held if fits(held[other], gigabytes, device)]
    if mode == "auto" and kept:
        args.checkpoint_activations = mode = (fast or [*kept][-1:])[0]
    needs = ", ".join(f"{other} needs {sum(held[other].values()) / 1e9:.3g} GB" for other in held)
    if mode not in kept:
        say(f"WARNING: activations of blocks are not counted ({failed}): leave room for them")
    activations = kept.get(mode, logits)
    say(wrap_lines(f"""machine
  world size  {processes} processes with {gigabytes:.0f} GB each
  precision   {str(dtype).removeprefix("torch.")}
  compile     {"on" if compiled else "off"}
  recompute   {mode} (--checkpoint-activations)
model
  model       {describe_shape(model)}
  size        {model_class.__name__} {args.size}
  parameters  {num_params(model):,}
batch
  batch       {batch} x accumulation {grad_accum} x processes {processes} = {global_batch} sequences
  tokens      {global_batch * args.seq_len:,} a step
memory of a process in GB"""))
    table = {strategy: memory_of(model, strategy, args, processes, activations) for strategy in STRATEGIES}
    fitting = [strategy for strategy, held in table.items() if fits(held, gigabytes, device)]
    widths = {part: max(len(part) + 1, 8) for part in (*table["ddp"], "together")}
    say(f"{'--strategy':13}" + "".join(f"{part:>{width}}" for part, width in widths.items()) + " fits")
    for strategy, held in table.items():
        numbers = zip((*held.values(), sum(held.values())), widths.values())
        say(f"{strategy:13}" + "".join(f"{n / 1e9:{width}.2f}" for n, width in numbers)
            + f"{'yes' if strategy in fitting else 'no':>5}")
    file = sum(table["ddp"][part] for part in ("parameters", "optimizer", "other")) / 1e9
    say(f"a checkpoint is {file:.2f} GB: {(args.keep_last + 2) * file:.1f} GB of disk for --keep-last "
        f"{args.keep_last}, the best and the one being written, and {file:.2f} GB of rank 0's host "
        "memory (on GPUs up to twice that)")
    ways = [f"--batch {b}" for b in range(1, batch) if batch % b == 0 and fits(
        table[chosen] | {"activations": activations * b // batch}, gigabytes, device)][-1:]
    ways += [f"--strategy {strategy}" for strategy in fitting]
    ways += [f"--checkpoint-activations {other}" for other in fast]
    if fast:
        say(f"with --strategy {chosen} these --checkpoint-activations fit, the fastest first: "
            f"{', '.join(fast)}")
    both = "--strategy zero3 with --checkpoint-activations block, or then with more processes"
    say(f"--strategy {chosen} " + (
        f"fits{'' if mode in kept else ' without the activations of blocks'}." if chosen in fitting else
        f"does not fit: use {' or '.join(ways) or both}."))
    return sum(table[chosen].values()) / 1e9 / gigabytes, needs


def uses_gpus(args: Namespace) -> bool:
    return bool(args.dry_run) or args.device != "cpu" and torch.cuda.is_available()


def machine(text: str, gpus: bool) -> tuple[int, float]:
    """Processes and the GB of each: '8x141' → (8, 141.0), '' → the processes that torchrun started here."""
    if text:
        match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text)
        if not match:
            raise UserError(f"--dry-run {text} is not GPUs x GB of each: give 8x141, for example.")
        return int(match[1]), float(match[2])
    if gpus:
        total, _ = torch.cuda.mem_get_info(0)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total /= from_launcher("LOCAL_WORLD_SIZE", 1)
    return from_launcher("WORLD_SIZE", 1), total / 1e9
