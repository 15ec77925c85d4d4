"""Models, losses, optimizers and learning-rate schedules.

Shapes in comments: B sequences, T tokens, C = d_model channels, H heads of D channels, F hidden units of the
MLP, V rows of the embedding table. Two choices shape every layer:

* Parameters stay in float32; `Linear` casts its weight to the dtype of its input. Mixed precision then needs
  no autocast, and the gradients of a weight that is used several times are summed in float32. (Autocast's
  weight cache sums them in bfloat16, breaks selective checkpointing, and lost gradients after no_grad in
  older releases.)
* Activation checkpointing wraps single blocks, never the recurrence, so recomputing cannot change the depth.

Sections of this file, and what uses them:

    layers                     Linear, rotary positions, Block: the models
    how a model computes       use_device: set_modes in training/strategies.py, weights/use.py
    the loss                   linear_cross_entropy: each model's forward
    what a model must provide  LanguageModel, CausalLM: base classes of the models
    HRM, GPT-2, MLM            one trainer each
    optimizers and schedules   make_optimizers, learning_rate: the trainers

Fast kernels, such as the fused loss, are in ops/.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ops.adam_atan2 import AdamAtan2
from ops.attention import BandMask, cpu_attention
from ops.cross_entropy import LinearCrossEntropy
from ops.device import uses_flex
from ops.documents import document_bounds

# -----------------------------------------------------------------------------------------------------------
# Layers


class Linear(nn.Linear):
    """nn.Linear that computes in the dtype of its input, whatever the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that computes in the dtype of its input, whatever the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, without weights."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rope_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """cos and sin of the rotary angles (Su et al., 2021): float32 (2, T, D/2), always on the CPU."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device="cpu"), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates the channel pairs (i, i + D/2) of x (B, H, T, D) by the angles in rope (2, T, D/2). Computes in
    float32 and returns x's dtype.
    """
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@functools.cache
def compiled_once(function):
    """Compiles a function when it is first needed, because importing the compiler takes seconds. Each shape
    gets its own graph, so a resumed run uses the same graph for the same shape.
    """
    return torch.compile(function, dynamic=False)


aten = torch.ops.aten
# Selective checkpointing keeps the results of matrix products and attention and recomputes the rest.
_KEPT = {aten.mm.default, aten.addmm.default, aten.bmm.default, torch.ops.higher_order.flex_attention}
# Attention kernels, and the position of the dropout probability among their arguments.
_ATTENTION = {aten._scaled_dot_product_flash_attention.default: 3,
              aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
              aten._scaled_dot_product_efficient_attention.default: 5,
              aten._scaled_dot_product_cudnn_attention.default: 5}


def checkpoint_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    """Whether selective checkpointing keeps the result of op(*args). It recomputes attention that has
    dropout: if it kept the result, recomputation would skip attention's random draws, and the next dropout
    would draw other numbers than in the forward pass.
    """
    keeps = op in _KEPT
    if op in _ATTENTION:
        keeps = len(args) <= _ATTENTION[op] or args[_ATTENTION[op]] == 0
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


LONGEST_PLAIN = 4096  # tokens; for longer sequences torch's kernel takes less memory


def attention_mask(mask_mod: Callable, idx: Tensor, flex: bool, before: int | None = None,
                   after: int | None = None):
    """The attention mask for tokens idx (B, T): position i of row b sees position j if mask_mod(b, 0, i, j).
    Returns a BlockMask with `flex`, otherwise a BandMask (ops/attention.py) of bool (B, 1, T, T). A position
    sees at most `before` positions back and `after` positions ahead (None: no limit).
    """
    B, T = idx.shape
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        if Block.flex_attention is None:
            Block.flex_attention = staticmethod(compiled_once(flex_attention))
        return compiled_once(create_block_mask)(mask_mod, B, None, T, T, device=idx.device)
    t = torch.arange(T, device=idx.device)
    b = torch.arange(B, device=idx.device)[:, None, None, None]
    return BandMask(mask_mod(b, 0, t[:, None], t), before, after)


class Block(nn.Module):
    """A residual block that can recompute its activations in the backward pass; subclasses define `block`."""

    checkpointing = "none"  # or "block": keep only the input; or "selective": also keep matrix products
    dropout = 0.0
    qk_norm = False
    drops_attention = False  # whether `dropout` also applies to attention probabilities
    cpu_attention = None  # on CPUs the function of ops/ for bfloat16, see attend
    flex_attention = None  # torch's function, compiled when a GPU first needs it

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None = None, mask=None,
                  cache=None) -> Tensor:  # a KVCache of weights/sampling.py
        """Multi-head attention of q, k, v (B, T, C), causal without a mask; returns (B, T, C)."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        if self.qk_norm:
            q, k = rms_norm(q, self.eps), rms_norm(k, self.eps)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.attend(q, k, v, mask).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask=None) -> Tensor:
        """Attention over q, k, v (B, H, T, D); returns (B, H, T, D). `mask` is a BlockMask, or bool with True
        where attention is allowed (also in a BandMask), or floats that are added to the scores. Without a
        mask, attention is causal. On CPUs, bfloat16 without a float mask uses ops/attention.py, which is
        faster than torch.
        """
        is_causal = mask is None and q.size(2) > 1
        before, after = None, 0 if is_causal else None
        if isinstance(mask, BandMask):
            mask, before, after = mask
        dropout = self.dropout if self.drops_attention and self.training else 0.0
        if mask is not None and not isinstance(mask, Tensor):
            return self.flex_attention(q, k, v, block_mask=mask)
        long = k.size(2) > LONGEST_PLAIN
        floats = mask is not None and mask.dtype != torch.bool
        if not self.cpu_attention or q.dtype != torch.bfloat16 or dropout or long or floats:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout,
                                                  is_causal=is_causal)
        return self.cpu_attention(q, k, v, mask, before, after)

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, *args) -> Tensor:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.block(x, *args)
        selective = {}
        if self.checkpointing == "selective":
            selective["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, checkpoint_policy)
        block = updating_once(self) if [*self.buffers()] else self.block  # blocks in this file have none
        return checkpoint(block, x, *args, use_reentrant=False, **selective)


def copied_buffers(module: nn.Module):
    """A context in which the module works on copies of its buffers, made when this is called."""
    copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return _reparametrize_module(module, copies, tie_weights=True)


def updating_once(block: Block) -> Callable:
    """block.block for activation checkpointing: the first call updates the block's buffers. The second call,
    which recomputes, starts from the same values and updates only copies.
    """
    calls = [contextlib.nullcontext(), copied_buffers(block)]

    @torch.compiler.disable
    def call(*args) -> Tensor:
        with calls.pop(0):
            return block.block(*args)

    return call


def blocks_of(model: nn.Module) -> list[Block]:
    """All blocks of a model, in the order in which it defines them."""
    return [module for module in model.modules() if isinstance(module, Block)]


# -----------------------------------------------------------------------------------------------------------
# How a model computes


def use_device(model: nn.Module, device: torch.device, dtype: torch.dtype, checkpointing: str = "none",
               **compiling):
    """Sets how a model computes on a device: the dtype of its activations, its attention kernel, what it
    recomputes in the backward pass (`checkpointing`, as in Block), and whether its blocks are compiled.
    `compiling` has the options of torch.compile; without any, nothing is compiled.
    """
    model.compute_dtype = dtype
    model.compile_loss = bool(compiling) and device.type == "cuda"
    for block in blocks_of(model):
        block.cpu_attention = cpu_attention if device.type == "cpu" else None
        block.checkpointing = checkpointing
        if compiling:
            block.compile(**compiling)


# -----------------------------------------------------------------------------------------------------------
# The loss


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int,
                         bias: Tensor | None = None, z_loss: float = 0.0, hits: bool = False,
                         compiled: bool = False, logits: Callable | None = None, reduction: str = "sum",
                         ) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy of targets (…) under the logits hidden (…, C) · weightᵀ (C, V) + bias (V), without
    holding the logits of all targets at once. Targets below 0 are ignored. Rows of `weight` from `vocab_size`
    on are padding and get probability 0. Returns

    * the objective, to differentiate: the cross-entropy in nats, plus z_loss · log² Z of each target (PaLM,
      arXiv 2204.02311, uses z_loss 1e-4), float32. With `reduction` "sum" it is a scalar. With "none" it has
      a value for each target (…), 0 where ignored, to build a weighted, clipped or preference loss from.
    * the loss: the summed cross-entropy in nats, float32, detached.
    * with `hits`, whether each target has the largest logit, bool (…); otherwise None.

    `compiled` fuses the operations between the matrix products of ops/. `logits` is a function that replaces
    them: rows of hidden (N, C) → logits (N, V). Raises ValueError for any other reduction.
    """
    if reduction not in ("sum", "none"):  # the trainer would divide a mean by the number of labels again
        raise ValueError(f"reduction is {reduction!r}, but must be 'sum' or 'none'")
    if logits is None and reduction == "sum":
        objective, loss, correct = LinearCrossEntropy.apply(
            hidden.flatten(0, -2), weight, bias, targets.flatten(), vocab_size, z_loss,
            torch.is_grad_enabled(), hits, compiled)
        return objective, loss, correct.view(targets.shape) if hits else None

    def plain(h: Tensor) -> Tensor:
        products = F.linear(h, weight.to(h.dtype)).float()
        return products if bias is None else products + bias

    def of_rows(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = (logits or plain)(h)[:, :vocab_size].float()
        log_z = rows.logsumexp(-1)
        loss = log_z - rows.gather(1, y.clamp(min=0)[:, None])[:, 0]
        losses = (loss + z_loss * log_z.square()) * (y >= 0), loss.detach() * (y >= 0)
        return (*losses, rows.argmax(-1) == y) if hits else losses

    rows = 4096 if hidden.is_cuda else 512
    chunks = zip(hidden.flatten(0, -2).split(rows), targets.flatten().split(rows))
    # recomputes the logits in the backward pass
    parts = [checkpoint(of_rows, h, y, use_reentrant=False) for h, y in chunks]
    objective, loss, *correct = (torch.cat(part).view(targets.shape) for part in zip(*parts))
    if reduction == "sum":
        objective = objective.sum()
    return objective, loss.sum(), correct[0] if hits else None


# -----------------------------------------------------------------------------------------------------------
# What a model must provide

VOCAB_TENSORS = {"embed.weight", "head.weight", "head_bias"}  # these have padded_vocab rows


def pad_vocab(n: int) -> int:
    """Rows of an embedding table for n ids: the next multiple of 64, which is faster on GPUs."""
    return -(-n // 64) * 64


def init_normal(weight: Tensor, std: float):
    """Normal initialization, truncated at three standard deviations and rescaled to `std`."""
    nn.init.trunc_normal_(weight, a=-3.0, b=3.0)
    weight.data.mul_(std / 0.98658)


DROPOUT = "probability of dropping an activation in training"


class ConfigError(ValueError):
    """A configuration that cannot work. A trainer prints it as one sentence; exit code 2."""

    exit_code = 2


def flag(default, help: str, type=None):
    """A field of a configuration that is also a command-line flag of the trainer, with this default and help
    (see flag_group in cli/parser.py). Give `type`, choices or a function, if the value is neither a number
    nor a switch.
    """
    return field(default=default, metadata={"help": help, "type": type})


@dataclass
class ModelConfig:
    vocab_size: int = 50257  # ids in use; the embedding table has `padded_vocab` rows
    padded_vocab: int = 50304
    seq_len: int = flag(1024, "context length in tokens")

    @property
    def depth(self) -> int:
        """Number of blocks that a token passes through, one after another."""
        return vars(self).get("n_layer", 0)

    def __post_init__(self):
        if self.depth > 100_000:  # at this depth, Python's overhead is half a minute per step
            raise ConfigError(f"a token would pass through {self.depth:,} blocks, which takes hours per step "
                              "on any machine: lower --n-layer or the cycles to at most 100,000 blocks in "
                              "all.")
        if self.padded_vocab < self.vocab_size:
            raise ConfigError(f"an embedding table of {self.padded_vocab} rows is too small for the "
                              f"tokenizer's {self.vocab_size} ids: use another --tokenizer or --size.")

    @property
    def head_dim(self) -> int:
        """Channels per attention head. Raises ConfigError unless it is an even integer."""
        if self.d_model % (2 * self.n_head):
            raise ConfigError(f"--d-model {self.d_model} must be a multiple of 2 x --n-head {self.n_head}.")
        return self.d_model // self.n_head


@dataclass
class CausalConfig(ModelConfig):
    """Configuration of a model that continues text or answers prompts. The fields are the ids of
    data.Dataset.marker_ids; −1 means none.
    """

    start: int = -1
    response: int = -1
    end: int = -1


@dataclass
class AttentionConfig(CausalConfig):
    """Configuration of a model that builds its attention mask with CausalLM.mask."""

    attention: str | None = flag(None, "causal: sees all earlier tokens; isolated: only in its document; "
                                 "prefix: a prompt also sees ahead\nDefault: causal. With pairs, prefix for "
                                 "the HRM, as published, and isolated for GPT-2, because other programs have "
                                 "no prefix for it.",
                                 ("prefix", "isolated", "causal"))
    DEFAULT_ON_PAIRS: ClassVar[str] = "prefix"  # the default on pairs of prompt and response

    def __post_init__(self):
        super().__post_init__()
        self.attention = self.attention or (self.DEFAULT_ON_PAIRS if self.response >= 0 else "causal")


class LanguageModel(nn.Module):
    """What a model must provide to work with the rest of the code. The shortest example is
    examples/train_recurrent.py.

    * `Config` is a dataclass that inherits ModelConfig, or CausalConfig if the model generates text. `config`
      is an instance of it. Fields made with `flag` become flags of the trainer. Inherit AttentionConfig,
      which adds --attention, only if the model calls CausalLM.mask.
    * The constructor initializes all parameters. It runs on each rank with parameters on the meta device, and
      on rank 0 once more with real ones. So don't compute a buffer from a parameter, and don't give a
      parameter two names. A non-persistent buffer is not saved, so it must be the same in every run.
    * `forward` may update persistent buffers, such as running means, while training. All ranks must make the
      same update: sum what they add with dist.all_reduce if dist.is_initialized(). Warm-up before the first
      step, recomputation and evaluation restore the buffers afterwards.
    * `forward(idx)` returns logits (B, T, vocab_size) for tokens idx (B, T), int64.
      `forward(idx, targets)` with targets (B, T), as the loader yields them, returns the objective to
      differentiate and a dictionary of detached scalars, including `loss` in nats. All are sums over the
      targets ≥ 0. The log divides the scalars by the number of targets and shows them as NAME and val_NAME.
      Don't use the names labels, bytes, samples, nats, correct, exact, accuracy or bits_per_byte, which
      evaluations fill themselves. With `per_token` the objective is not summed: it has a value per target
      (B, T). CausalLM implements `forward` for models with `hidden` and `head_weight`.
    * Every parameter gets a gradient in every step, even if it is 0. All ranks call the same collectives.
    * Let layers inherit `Block` and define `block`: only these are compiled, recomputed
      (--checkpoint-activations) and sharded one by one, and Muon trains only their matrices (including an
      nn.Embedding). A Block uses only its parameters, buffers and arguments, and draws random numbers only
      from torch's global generator, which each step seeds. No parameter has 0 dimensions.
    * Activations have the dtype `compute_dtype`, set by --precision. Parameters are always float32, so layers
      cast them, as `Linear` does.
    * `embed.weight` is the embedding table; `head.weight` is the output head, unless it is tied. Both are
      (padded_vocab, C). They can have their own learning rate, and --init-from adds rows to them for new ids.
    * `dummy_inputs(batch, device)` returns arguments of `forward` with which every parameter gets a gradient.
      With the meta device, --dry-run uses them to measure the memory of `forward`, and loggers/mfu.py to
      count its FLOPs.
    * To generate text, a model needs `head_weight` (V, C) and `hidden(idx, cache=None)`, which returns the
      states (B, T, C) that the head reads. With a cache, the KVCache of weights/sampling.py, idx has only the
      tokens that follow those in it: T in the first call, then one per call.

    A custom optimizer must create its whole state in its first step, even if the learning rate and the
    gradients are 0, because restoring a checkpoint relies on it. Its groups have `lr` and may have `scale`.
    A checkpoint saves the tensors, numbers and strings in self.state[p], and those in a parameter group that
    the optimizer itself has changed.
    """

    compute_dtype = torch.float32
    compile_loss = False  # fuse the operations between the loss's matrix products (GPUs only)
    z_loss = 0.0  # weight of log² Z in the objective, see linear_cross_entropy


class CausalLM(LanguageModel):
    """What HRM and GPT2 share: attention masks, loss and generation."""

    def forward(self, idx: Tensor, targets: Tensor | None = None, per_token: bool = False):
        """Returns the logits (B, T, vocab_size) of idx (B, T). Given targets (B, T), returns the result of
        `loss` instead, which `per_token` calls with the reduction "none".
        """
        x = self.hidden(idx)
        if per_token:
            return self.loss(x, idx, targets, reduction="none")
        return self.logits(x) if targets is None else self.loss(x, idx, targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (…, vocab_size) of states (…, C), without padding. An override gets a part of the rows
        (N, C) per call, and each part again in the backward pass.
        """
        return F.linear(hidden, self.head_weight.to(hidden.dtype))[..., :self.config.vocab_size]

    @property
    def own_logits(self) -> Callable | None:
        """`logits` if it is overridden, otherwise None: the loss then uses the faster kernel of ops/."""
        return None if getattr(self.logits, "__func__", None) is CausalLM.logits else self.logits

    def mask(self, idx: Tensor, cache, flex: bool = True):
        """The mask of tokens idx (B, T) for Block.attend, or None for plain causal attention. With `isolated`
        attention, a token sees itself and the earlier tokens of its document. With `prefix`, prompt tokens
        (from the start token through <|response|>) also see the whole prompt.
        """
        c = self.config
        if c.attention == "causal" or cache and cache.length:  # a generated token sees the whole cache
            return None
        number, _, response = document_bounds(idx, c.start, c.response)
        last = response if c.attention == "prefix" else torch.full_like(response, -1)

        def mask_mod(b, h, i, j):
            return (number[b, i] == number[b, j]) & ((j <= i) | (j <= last[b, j]))

        after = None if c.attention == "prefix" else 0
        flex = flex and cache is None and uses_flex(c.head_dim, idx.device)
        return attention_mask(mask_mod, idx, flex, after=after)

    def loss(self, hidden: Tensor, idx: Tensor, targets: Tensor,
             reduction: str = "sum") -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the objective for states (B, T, C) and targets (B, T), and a dictionary of detached sums.
        Targets below 0 are ignored. The objective is a scalar, or with the reduction "none" has a value for
        each target (B, T). The sums are `loss` in nats and, in evaluation, the same as `nats`; on pairs also
        the number of `samples` and how many of them are `exact`: every target of the sample has the largest
        logit. An override that does not take `reduction` works, but not with `per_token`.
        """
        c = self.config
        hits = c.response >= 0 and not self.training
        objective, loss, correct = linear_cross_entropy(
            hidden, self.head_weight, targets, c.vocab_size, z_loss=self.z_loss, hits=hits,
            compiled=self.compile_loss, logits=self.own_logits, reduction=reduction)
        sums = {"loss": loss}
        if not self.training:
            sums["nats"] = loss  # so evaluations can report perplexity and bits per byte
        if hits:
            number, _, _ = document_bounds(idx, c.start, c.response)
            learned = targets >= 0
            wrong = (learned & ~correct).float()
            # (B, T + 1): wrong targets of each document; a row has at most T + 1 documents
            mistakes = wrong.new_zeros(len(idx), idx.size(1) + 1).scatter_add_(1, number, wrong)
            samples = learned & (idx == c.response)  # one position per sample
            exact = samples & (mistakes.gather(1, number) == 0)
            sums |= {"samples": samples.sum(), "exact": exact.sum()}
        return objective, sums

    def decode(self, idx: Tensor, cache) -> Tensor:
        """Adds new tokens idx (B, T) to the cache. Returns the logits (B, vocab_size), float32, for the token
        that follows the last one.
        """
        x = self.hidden(idx, cache)[:, -1]
        cache.length, cache.slot = cache.length + idx.size(1), 0
        return self.logits(x).float()

    def dummy_inputs(self, batch: int, device, **more) -> dict[str, Any]:
        """Arguments of `forward` for a batch in which every parameter gets a gradient."""
        x = torch.zeros((batch, self.config.seq_len), dtype=torch.long, device=device)
        return {"idx": x, "targets": x, **more}


# -----------------------------------------------------------------------------------------------------------
# HRM: the Hierarchical Reasoning Model for text (arXiv 2605.20613, github sapientinc/HRM-Text)


def int_range(flag: str, text, lowest: int) -> tuple[int, int]:
    """Parses '2:5' as (2, 5) and '5' as (5, 5). Raises ConfigError if it is neither, or below `lowest`."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(text))
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not lowest <= low <= high:
        raise ConfigError(f"{flag} {text}: give a number of {lowest} or more, or a range such as {lowest}:5.")
    return low, high


@dataclass
class HRMConfig(AttentionConfig):
    n_layer: int = flag(16, "blocks in each of the two stacks")
    n_head: int = flag(12, "attention heads")
    d_model: int = flag(1536, "channels")
    dropout: float = flag(0.0, DROPOUT)
    ff: int = flag(4096, "hidden units of the MLP")
    h_cycles: int | str = flag(2, "cycles of the model; 4:8 draws a number for each training step\n"
                               "A cycle is --l-cycles calls of the stack L and one of H.", type=str)
    l_cycles: int = flag(3, "calls of the fast stack L in each cycle")
    bp_cycles: int = flag(0, "backpropagate through this many of the last cycles; 0: see --bp-steps")
    init: str | None = flag(None, "identity: blocks first add zero, and the head is small; published: as in "
                            "HRM-Text", ("identity", "published"))
    inject_input: bool = flag(False, "also feed the embedded input to L, as the first HRM paper does")
    qk_norm: bool = flag(False, "normalize queries and keys, which allows a wider range of learning rates")
    halt: bool = flag(False, "let each token choose how many cycles it gets, up to 4")
    eval_cycles: int = flag(None, "cycles in evaluation and use (default: as in training)\n"
                            "After training with 4:8 cycles the default is 16.")
    least_cycles: int = 0  # the smallest number of cycles in training; 0: always h_cycles
    max_cycles: int = 4  # the largest number of cycles with `halt`
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    embed_scale: float | None = None  # None: sqrt(d_model), so that embeddings start with variance 1

    def __post_init__(self):
        if isinstance(self.h_cycles, str):
            least, self.h_cycles = int_range("--h-cycles", self.h_cycles, 1)
            self.least_cycles = least if least < self.h_cycles else 0
        super().__post_init__()
        if self.embed_scale is None:
            self.embed_scale = self.d_model ** 0.5

    @property
    def depth(self) -> int:
        return self.n_layer * (self.l_cycles + 1) * max(self.cycles, self.max_eval_cycles)

    @property
    def cycles(self) -> int:
        """The largest number of cycles in training."""
        return self.max_cycles if self.halt else self.h_cycles

    @property
    def max_eval_cycles(self) -> int:
        """The largest number of cycles in evaluation and use."""
        return self.eval_cycles or self.cycles * (2 if self.least_cycles else 1)

    def calls_with_grad(self, bp_steps: int | None, cycles: int) -> list[tuple[int, int]]:
        """How many calls of L and of H to backpropagate through, as a pair (L, H) for each of `cycles`
        cycles. In a cycle, these are the last calls of L.
        """
        calls = self.l_cycles + 1
        whole = min(self.bp_cycles, cycles)
        if whole and not self.halt:
            return [(0, 0)] * (cycles - whole) + [(self.l_cycles, 1)] * whole
        bp_steps = min(whole * calls or bp_steps or cycles * calls, cycles * calls)
        if self.halt:  # any cycle can be the last, so each keeps as many calls as the last would
            return [(min(bp_steps - 1, self.l_cycles), 1)] * cycles
        h_left = min(cycles, bp_steps - 1)
        l_left = bp_steps - h_left
        kept = []
        for later in reversed(range(cycles)):  # number of cycles after this one
            l_kept = min(max(l_left - later * self.l_cycles, 0), self.l_cycles)
            kept.append((l_kept, int(later < h_left)))
        return kept

    def reaches_embedding(self, bp_steps: int | None, cycles: int | None = None) -> bool:
        """Whether the embedding table gets a gradient when `cycles` cycles run (None: the most)."""
        # x enters as z_H of the first cycle
        _, h_kept = self.calls_with_grad(bp_steps, cycles or self.cycles)[0]
        return self.inject_input or h_kept > 0


class HRMBlock(Block):
    """Pre-norm block without biases: RMSNorm without parameters, gated attention (causal by default) with
    RoPE, and SwiGLU. With `qk_norm`, queries and keys are scaled to norm sqrt(head_dim); Henry et al. (2020,
    arXiv 2010.04245) use another scale.
    """

    def __init__(self, c, zero_init: bool, qk_norm: bool):
        super().__init__()
        self.head_dim, self.eps, self.dropout, self.qk_norm = c.head_dim, c.norm_eps, c.dropout, qk_norm
        self.gqkv = Linear(c.d_model, 4 * c.d_model, bias=False)  # gate, query, key, value
        self.attn_out = Linear(c.d_model, c.d_model, bias=False)
        self.gate_up = Linear(c.d_model, 2 * c.ff, bias=False)
        self.down = Linear(c.ff, c.d_model, bias=False)
        for layer in (self.gqkv, self.attn_out, self.gate_up, self.down):
            init_normal(layer.weight, layer.in_features ** -0.5)  # LeCun normal
            if zero_init and layer in (self.attn_out, self.down):  # these add to the residual stream
                nn.init.zeros_(layer.weight)

    def block(self, x: Tensor, rope: Tensor, mask=None, cache=None) -> Tensor:
        gate, q, k, v = self.gqkv(rms_norm(x, self.eps)).chunk(4, dim=-1)  # (B, T, C) each
        y = self.attn_out(gate.sigmoid() * self.attention(q, k, v, rope, mask, cache))
        x = x + self.dropped(y)
        gate, up = self.gate_up(rms_norm(x, self.eps)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.dropped(self.down(F.silu(gate) * up))


class Stack(nn.Module):
    """Blocks and a final RMSNorm: the H or L stack of an HRM."""

    def __init__(self, c: HRMConfig):
        super().__init__()
        self.eps = c.norm_eps
        self.blocks = nn.ModuleList(
            HRMBlock(c, c.init == "identity", c.qk_norm) for _ in range(c.n_layer))

    def forward(self, x: Tensor, rope: Tensor, mask=None, cache=None) -> Tensor:
        for block in self.blocks:
            x = block(x, rope, mask, cache)
        return rms_norm(x, self.eps)


class HRM(CausalLM):
    """A slow stack H and a fast stack L, applied repeatedly to the embedded input x:

        z_H = x;  z_L = a frozen random vector
        repeat h_cycles times:  (repeat l_cycles times:  z_L = L(z_L + z_H));  z_H = H(z_H + z_L)
        logits = head(z_H)

    Backpropagation is truncated. As in the paper, it goes through `bp_steps` stack calls: the last calls of
    H, at most bp_steps − 1, and for the rest the last calls of L. With `bp_cycles`, it goes through all calls
    of the last `bp_cycles` cycles instead. With `halt`, the output for each token is the mean of its z_H over
    all cycles, weighted by halting probabilities (adaptive computation time, Graves 2016, arXiv 1603.08983).
    """

    Config = HRMConfig

    def __init__(self, config: HRMConfig):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.padded_vocab, c.d_model)
        init_normal(self.embed.weight, c.d_model ** -0.5)
        self.H, self.L = Stack(c), Stack(c)
        self.head = Linear(c.d_model, c.padded_vocab, bias=False)
        init_normal(self.head.weight, 0.02 if c.init == "identity" else c.d_model ** -0.5)
        if c.halt:
            self.halt = Linear(c.d_model, 1)
            nn.init.zeros_(self.halt.weight)
            nn.init.constant_(self.halt.bias, -3.0)  # from 0 or above, most runs stay at one cycle
        z_l = torch.empty(c.d_model)
        init_normal(z_l, 1.0)
        self.register_buffer("z_l_init", z_l)
        self.register_buffer("rope", rope_table(c.seq_len, c.head_dim, c.rope_theta), persistent=False)

    @property
    def head_weight(self) -> Tensor:  # (V, C)
        return self.head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None, bp_steps: int | None = None,
                ponder_weight: float = 0.0, fixed_depth: bool = False, cycles: int | None = None,
                per_token: bool = False):
        """Returns the logits (B, T, vocab_size) of idx (B, T). Given targets (B, T), returns the result of
        CausalLM.loss instead, which `per_token` calls with the reduction "none". Its sums then include the
        number of `cycles` run and, with `halt`, the `ponder` cost, which the objective adds times
        ponder_weight. bp_steps None means no truncation. `cycles` overrides the configuration.
        """
        z, ponder, cycles = self.recurrence(idx, bp_steps, fixed_depth=fixed_depth, cycles=cycles)
        if targets is None:
            return self.logits(z)
        loss = functools.partial(self.loss, reduction="none") if per_token else self.loss
        objective, sums = loss(z, idx, targets)
        if not self.config.reaches_embedding(bp_steps, cycles):  # DDP needs a gradient for each parameter
            objective = objective + 0.0 * self.embed.weight[0, 0]
        sums["cycles"] = cycles * (targets >= 0).sum()
        if self.config.halt:
            ponder = ponder * (targets >= 0)
            sums["ponder"] = ponder.detach().sum()
            objective = objective + ponder_weight * (ponder if per_token else ponder.sum())
        return objective, sums

    def recurrence(self, idx: Tensor, bp_steps: int | None = None, cache=None, fixed_depth: bool = False,
                   cycles: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Runs the recurrence on idx (B, T). Returns the states for the head (B, T, C), the ponder cost per
        token (B, T) and the number of cycles run. With `fixed_depth`, all cycles run and no rank is asked
        whether its tokens have halted.
        """
        c = self.config
        cycles = cycles or (c.cycles if self.training else c.max_eval_cycles)
        remaining = torch.ones(idx.shape, dtype=torch.float32, device=idx.device)  # halting mass left (B, T)
        out, ponder = 0.0, torch.zeros_like(remaining)
        for cycle, z_h in enumerate(self.high_level_states(idx, cycles, bp_steps, cache), 1):
            if c.halt:
                last = cycle == cycles
                weight, remaining = self.halting_weight(z_h, remaining, last)
                out = out + weight.unsqueeze(-1) * z_h
                ponder = ponder + remaining
                if not last and not fixed_depth and self.everyone_halted(remaining):
                    break
        return out.to(z_h.dtype) if c.halt else z_h, ponder, cycle

    def high_level_states(self, idx: Tensor, cycles: int, bp_steps: int | None = None, cache=None):
        """Yields z_H (B, T, C) of idx (B, T) after each of `cycles` cycles."""
        c, T = self.config, idx.size(1)
        begin = cache.length if cache else 0
        rope, mask = self.rope[:, begin:begin + T], self.mask(idx, cache)
        x = self.embed(idx).to(self.compute_dtype) * c.embed_scale  # (B, T, C)
        z_h, z_l = x, self.z_l_init.to(x.dtype).expand_as(x)
        grad = torch.is_grad_enabled()
        for l_kept, h_kept in c.calls_with_grad(bp_steps, cycles):
            for i in range(c.l_cycles):
                with torch.set_grad_enabled(grad and i >= c.l_cycles - l_kept):
                    z_l = self.L(z_l + z_h + x if c.inject_input else z_l + z_h, rope, mask, cache)
            with torch.set_grad_enabled(grad and h_kept > 0):
                z_h = self.H(z_h + z_l, rope, mask, cache)
            yield z_h

    def halting_weight(self, z_h: Tensor, remaining: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Returns the weight of this cycle in the output and the halting mass left for later cycles, (B, T)
        each. The weight is p = sigmoid(halt(z_H)). In the last cycle, or if p would leave less than 1 %, it
        is all the mass that remains. The ponder cost, the sum of the mass left after each cycle, is then the
        expected number of cycles beyond the first.
        """
        p = self.halt(z_h.float()).squeeze(-1).sigmoid()
        weight = torch.where((remaining - p < 0.01) | last, remaining, p)
        return weight, remaining - weight

    def everyone_halted(self, remaining: Tensor) -> bool:
        """Whether no token on any rank needs another cycle. All ranks decide together, because under FSDP a
        rank that ran one more cycle would wait for the others forever. For tokens that have halted, a further
        cycle has weight 0 and changes only the rounding of gradients.
        """
        left = remaining.detach().max()
        if dist.is_initialized():
            dist.all_reduce(left, op=dist.ReduceOp.MAX)
        return left.item() == 0

    def hidden(self, idx: Tensor, cache) -> Tensor:
        return self.recurrence(idx, cache=cache, fixed_depth=True)[0]

    def dummy_inputs(self, batch: int, device, bp_steps: int = 5,
                     cycles: int | None = None) -> dict[str, Any]:
        return super().dummy_inputs(batch, device, bp_steps=bp_steps, ponder_weight=1.0, fixed_depth=True,
                                    cycles=cycles)


# -----------------------------------------------------------------------------------------------------------
# GPT-2 (Radford et al., 2019), or with `modern` a transformer of HRMBlocks


MODERN_THETA = 10000.0  # RoPE base with --modern


@dataclass
class GPT2Config(AttentionConfig):
    n_layer: int = flag(12, "blocks")
    n_head: int = flag(12, "attention heads")
    d_model: int = flag(768, "channels\nThe MLP has four times as many, with --modern 8/3 as many.")
    dropout: float = flag(0.0, DROPOUT)
    modern: bool = flag(False, "modern blocks: gated attention, QK-norm, SwiGLU, RMSNorm, rotary positions\n"
                        "As in the HRM, but with normalized queries and keys. Projections start at zero, and "
                        "the head is untied. Best with --optimizer muon.")
    norm_eps: float = 1e-5
    DEFAULT_ON_PAIRS: ClassVar[str] = "isolated"

    @property
    def ff(self) -> int:
        """Hidden units of the MLP: 4 C, or with `modern` 8/3 C rounded up to a multiple of 128."""
        return math.ceil(self.d_model / 48) * 128 if self.modern else 4 * self.d_model


class GPT2Block(Block):
    """Pre-norm block: attention (causal by default) and an MLP of 4 C hidden units with GELU."""

    drops_attention = True

    def __init__(self, c: GPT2Config):
        super().__init__()
        self.head_dim, self.dropout = c.head_dim, c.dropout
        self.attn_norm, self.mlp_norm = (LayerNorm(c.d_model, eps=c.norm_eps) for _ in range(2))
        self.qkv = Linear(c.d_model, 3 * c.d_model)
        self.attn_out = Linear(c.d_model, c.d_model)
        self.up = Linear(c.d_model, c.ff)
        self.down = Linear(c.ff, c.d_model)
        added = 0.02 / math.sqrt(2 * c.n_layer)  # std of residual projections
        for layer, std in (self.qkv, 0.02), (self.up, 0.02), (self.attn_out, added), (self.down, added):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def block(self, x: Tensor, rope: None, mask=None, cache=None) -> Tensor:
        q, k, v = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)  # (B, T, C) each
        y = self.attn_out(self.attention(q, k, v, rope, mask, cache))
        x = x + self.dropped(y)
        y = self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))  # (B, T, 4 C) inside
        return x + self.dropped(y)


class GPT2(CausalLM):
    """GPT-2, with learned positions and a head tied to the embedding. With `modern`, it has rotary positions,
    an untied head, and embeddings of variance 1, like the HRM.
    """

    Config = GPT2Config

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.padded_vocab, c.d_model)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.transformer = nn.ModuleDict({"blocks": nn.ModuleList(
            HRMBlock(c, True, True) if c.modern else GPT2Block(c) for _ in range(c.n_layer))})
        if c.modern:
            init_normal(self.embed.weight, c.d_model ** -0.5)
            self.head = Linear(c.d_model, c.padded_vocab, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)
            self.register_buffer("rope", rope_table(c.seq_len, c.head_dim, MODERN_THETA), persistent=False)
        else:
            self.positions = nn.Embedding(c.seq_len, c.d_model)
            nn.init.normal_(self.positions.weight, std=0.02)
            self.norm = LayerNorm(c.d_model, eps=c.norm_eps)

    @property
    def head_weight(self) -> Tensor:  # (V, C)
        return self.head.weight if self.config.modern else self.embed.weight

    def hidden(self, idx: Tensor, cache=None) -> Tensor:
        """The states (B, T, C) of idx (B, T) after the last norm."""
        c, T = self.config, idx.size(1)
        begin = cache.length if cache else 0
        mask = self.mask(idx, cache, flex=not c.dropout)  # FlexAttention has no dropout
        rope, x = None, self.embed(idx)  # (B, T, C)
        if c.modern:
            rope, x = self.rope[:, begin:begin + T], x * c.d_model ** 0.5
        elif c.attention == "causal" or begin:
            x = x + self.positions.weight[begin:begin + T]
        else:  # positions restart in each document
            begins = document_bounds(idx, c.start, c.response)[1]
            x = x + self.positions(torch.arange(T, device=idx.device) - begins)
        x = F.dropout(x.to(self.compute_dtype), c.dropout, self.training)
        for block in self.transformer["blocks"]:
            x = block(x, rope, mask, cache)
        return rms_norm(x, c.norm_eps) if c.modern else self.norm(x)


# -----------------------------------------------------------------------------------------------------------
# MLM: a bidirectional model that fills masks (ModernBERT; Warner et al., arXiv 2412.13663)


@dataclass
class MLMConfig(ModelConfig):
    vocab_size: int = 50258  # [MASK] is one of the ids in use
    n_layer: int = flag(22, "blocks")
    n_head: int = flag(12, "attention heads")
    d_model: int = flag(768, "channels")
    dropout: float = flag(0.0, DROPOUT)
    ff: int = flag(1152, "hidden units of the MLP")
    window: int = flag(128, "width of the attention window of local layers, half to either side")
    global_every: int = flag(3, "every N-th layer, starting with the first, sees the whole document")
    global_theta: float = 160000.0
    local_theta: float = 10000.0
    norm_eps: float = 1e-5
    eot: int = 50256  # the id that starts a document


class MLMBlock(Block):
    """Pre-norm block without biases: bidirectional attention with RoPE, local or global, and GeGLU. It has
    dropout in the same places as Hugging Face's ModernBERT, except in attention, because FlexAttention has
    none.
    """

    def __init__(self, c: MLMConfig, index: int):
        super().__init__()
        self.head_dim, self.dropout = c.head_dim, c.dropout
        self.is_local = index % c.global_every > 0
        # the first block needs no norm, because the embedding is already normalized
        self.attn_norm = LayerNorm(c.d_model, eps=c.norm_eps, bias=False) if index else nn.Identity()
        self.mlp_norm = LayerNorm(c.d_model, eps=c.norm_eps, bias=False)
        self.qkv = Linear(c.d_model, 3 * c.d_model, bias=False)
        self.attn_out = Linear(c.d_model, c.d_model, bias=False)
        self.gate_up = Linear(c.d_model, 2 * c.ff, bias=False)
        self.down = Linear(c.ff, c.d_model, bias=False)
        for layer in (self.qkv, self.gate_up):
            init_normal(layer.weight, 0.02)
        for layer in (self.attn_out, self.down):  # these add to the residual stream
            init_normal(layer.weight, 0.02 / math.sqrt(2 * c.n_layer))

    def block(self, x: Tensor, rope: Tensor, mask) -> Tensor:
        """Returns x (B, T, C) after the block. `mask` is bool (B, 1, T, T), True where attention is allowed,
        or a BlockMask.
        """
        q, k, v = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)  # (B, T, C) each
        y = self.attn_out(self.attention(q, k, v, rope, mask))
        x = x + self.dropped(y)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.down(self.dropped(F.gelu(gate) * up))


class MLM(LanguageModel):
    """An encoder that fills masks. Tokens attend only within their document; documents start with `eot`."""

    Config = MLMConfig

    def __init__(self, config: MLMConfig):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.padded_vocab, c.d_model)
        self.embed_norm, self.norm, self.head_norm = (
            LayerNorm(c.d_model, eps=c.norm_eps, bias=False) for _ in range(3))
        self.transformer = nn.ModuleDict({"blocks": nn.ModuleList(MLMBlock(c, i) for i in range(c.n_layer))})
        self.head_dense = Linear(c.d_model, c.d_model, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(c.padded_vocab))
        for layer in (self.embed, self.head_dense):
            init_normal(layer.weight, 0.02)
        self.register_buffer("rope", torch.stack([rope_table(c.seq_len, c.head_dim, theta) for theta in (
            c.global_theta, c.local_theta)]), persistent=False)  # (2, 2, T, D/2)

    def forward(self, idx: Tensor, positions: Tensor | None = None, labels: Tensor | None = None,
                per_token: bool = False):
        """Returns the logits (B, T, vocab_size) of idx (B, T). Given masked positions (B, K), int64, and
        labels (B, K), returns the objective at those positions and a dictionary of detached sums instead. The
        objective is a scalar, or with `per_token` has a value for each label (B, K). The sums are `loss` in
        nats and, in evaluation, the same as `nats` and the number of `correct` labels. Labels below 0 are
        ignored.
        """
        c, x = self.config, self.hidden(idx)
        if positions is not None:  # select whole rows: backward then sorts B · K indices instead of B · K · C
            first = torch.arange(len(idx), device=idx.device)[:, None] * idx.size(1)
            x = x.flatten(0, 1).index_select(0, (first + positions).flatten()).view(*positions.shape, -1)
        x = self.head_norm(F.gelu(self.head_dense(x)))
        if positions is None:
            logits = F.linear(x, self.embed.weight.to(x.dtype), self.head_bias.to(x.dtype))
            return logits[..., :c.vocab_size]
        objective, loss, correct = linear_cross_entropy(
            x, self.embed.weight, labels, c.vocab_size, self.head_bias, self.z_loss, hits=not self.training,
            compiled=self.compile_loss, reduction="none" if per_token else "sum")
        sums = {"loss": loss}
        if not self.training:
            sums |= {"nats": loss, "correct": correct.sum()}
        return objective, sums

    def hidden(self, idx: Tensor) -> Tensor:
        """The states (B, T, C) of idx (B, T) after the last norm."""
        # RoPE table and mask, first of global layers, then of local ones
        tables = list(zip(self.rope[:, :, :idx.size(1)], self.attention_masks(idx)))
        x = self.embed_norm(self.embed(idx).to(self.compute_dtype))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer["blocks"]:
            x = block(x, *tables[block.is_local])
        return self.norm(x)

    def attention_masks(self, idx: Tensor) -> list:
        """The masks of tokens idx (B, T) for global and for local layers, as MLMBlock.block takes them."""
        c = self.config
        document = (idx == c.eot).cumsum(dim=1)  # (B, T)

        def together(b, h, i, j):
            return document[b, i] == document[b, j]

        def nearby(b, h, i, j):
            return together(b, h, i, j) & ((i - j).abs() <= half)

        flex = uses_flex(c.head_dim, idx.device)
        half = c.window // 2
        return [attention_mask(together, idx, flex), attention_mask(nearby, idx, flex, half, half)]

    def dummy_inputs(self, batch: int, device, mask_rate: float = 0.3) -> dict[str, Any]:
        """Arguments of `forward` for a batch in which every parameter gets a gradient."""
        x = torch.zeros((batch, self.config.seq_len), dtype=torch.long, device=device)
        positions = torch.arange(max(1, round(mask_rate * self.config.seq_len)), device=device)
        positions = positions.expand(batch, -1)
        return {"idx": x, "positions": positions, "labels": torch.zeros_like(positions)}


def num_params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# -----------------------------------------------------------------------------------------------------------
# Optimizers and schedules


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon trains: all trainable matrices of all blocks."""
    return [p for block in blocks_of(model) for p in block.parameters() if p.ndim == 2 and p.requires_grad]


def make_optimizers(model: nn.Module, name: str, lr: float, betas: tuple[float, float],
                    weight_decay: float, vocab_lr: float = 1.0) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of --optimizer `name`: `adamw` (fused), `adam-atan2`, or `muon`, which trains
    the matrices of each Block with Muon and everything else with AdamW. Weight decay applies to matrices
    only. A group learns at lr times its `scale`, which is vocab_lr for the embedding table and the head and 1
    otherwise. Raises ConfigError if Muon gets no matrices.
    """
    hidden = dict.fromkeys(hidden_matrices(model)) if name == "muon" else {}
    if name == "muon" and not hidden:
        raise ConfigError("--optimizer muon trains the matrices of blocks, and no layer of "
                          f"{type(model).__name__} inherits Block from model.py: let its layers inherit it, "
                          "or use --optimizer adamw.")
    groups = {}
    for key, p in model.named_parameters():
        if p.requires_grad and p not in hidden:
            decay = weight_decay if p.ndim >= 2 else 0.0
            scale = vocab_lr if key in VOCAB_TENSORS else 1.0
            group = groups.setdefault((decay, scale), {"params": [], "weight_decay": decay, "scale": scale})
            group["params"].append(p)
    adam = functools.partial(torch.optim.AdamW, fused=True)
    if name == "adam-atan2":
        adam = AdamAtan2
    optimizers = [adam(groups.values(), lr=lr, betas=betas)]
    if hidden:
        # scales updates to the size of AdamW's, so that both can use one learning rate (arXiv 2502.16982)
        optimizers.append(torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay,
                                           adjust_lr_fn="match_rms_adamw"))
    return optimizers


def learning_rate(step: int, steps: int, lr: float, warmup: float, schedule: str,
                  min_ratio: float, decay: float = 0.2) -> float:
    """The learning rate of a step, counted from 0. Warm-up is linear and takes `warmup` steps, or if below 1
    that fraction of all steps. Then comes the schedule: `constant`, `cosine`, or `wsd`, which stays constant
    and falls linearly over the last fraction `decay` of the steps after the warm-up. `cosine` and `wsd` end
    at lr · min_ratio.
    """
    if schedule != "constant" and step >= steps - 1:
        return lr * min_ratio
    if warmup < 1:
        warmup = round(warmup * steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    done = (step - warmup) / (steps - 1 - warmup)
    fraction = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else min((1 - done) / decay, 1.0)
    return lr * (min_ratio + (1 - min_ratio) * fraction)


