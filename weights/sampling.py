"""Generates text, and fills masks."""

import contextlib
import itertools
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cli.errors import UserError, first_line, say
from data import read_rows
from model import HRM, MLM, CausalLM, copied_buffers
from vocab.tokenizer import prompt_ids


class KVCache:
    """Keys and values of up to `seq_len` tokens, with a slot (B, H, T, D) for each attention call of a
    forward pass, where D is the width of a key plus that of a value. The calls come in a fixed order, so the
    index of a slot is the number of calls before it. `length` is the number of tokens so far. A recurrent
    layer keeps its state in memory[slot] instead and adds 1 to `slot`; while `length` is 0 it has no state.
    """

    def __init__(self, seq_len: int):
        self.memory: list[Tensor] = []
        self.seq_len, self.length, self.slot = seq_len, 0, 0
        self.of_attention = 0  # number of slots that hold keys and values

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v (B, H, T, D) of new tokens in the next slot; returns the k, v of all tokens so far."""
        # is_causal aligns queries with the first keys
        assert self.length == 0 or k.size(2) == 1, "a cache that is not empty takes one token at a time"
        if self.slot == len(self.memory):
            self.memory.append(k.new_empty(*k.shape[:2], self.seq_len, k.size(3) + v.size(3)))
            self.of_attention += 1
        stored, end = self.memory[self.slot], self.length + k.size(2)
        stored[..., self.length:end, :] = torch.cat((k, v), dim=-1)
        self.slot += 1
        return stored[..., :end, :].split((k.size(3), v.size(3)), dim=-1)

    def rewind(self, n: int):
        """Forgets all but the first n tokens. A recurrent state cannot be rewound except to 0."""
        assert n == 0 or self.of_attention == len(self.memory), "a recurrent state cannot be rewound"
        self.length = n


CLOSE = 2e-3  # in float32, correct models differ by up to 2e-6; one with a slightly too wide window by 6e-3


def has_usual_loss(model: CausalLM) -> bool:
    """Whether the model's loss is the cross-entropy of its logits, as in CausalLM."""
    return {type(model).forward, type(model).loss} <= {CausalLM.forward, HRM.forward, CausalLM.loss}


@torch.no_grad()
def contradiction(model: CausalLM, device, everywhere: bool = False) -> str:
    """Checks that generation computes what training does. Returns the reason if it doesn't, otherwise "".

    The model reads a row in two passes with a cache: all but the last token, then that token. The logits must
    equal the logits of one pass over the whole row. The loss must equal the cross-entropy of these logits,
    unless the class defines its own loss. Both are computed in float32, to tell errors from rounding.
    Differences count only beyond what a change of the embeddings by a millionth causes, because a model may
    draw random numbers or be so deep that rounding grows. A model that cannot be checked gets a warning and
    "".

    Buffers and torch's generator stay as they are. With `everywhere`, all ranks must call this, and all get
    the same answer.
    """
    def nudged(embed, idx, x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * torch.randn_like(x))

    c = model.config
    cache = KVCache(c.seq_len)
    T = min(c.seq_len, 1024)  # the logits of longer rows would take gigabytes
    ids = {*range(c.vocab_size)} - {c.start, c.response, c.end}
    row = torch.tensor([random.Random(0).choices([*ids], k=T)], device=device)
    if c.response >= 0:
        row[0, 0], row[0, T // 2] = c.start, c.response
    targets = row.roll(-1)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, model, "compute_dtype", model.compute_dtype)
            stack.callback(model.train, model.training)
            model.compute_dtype = torch.float32
            model.eval()
            stack.enter_context(copied_buffers(model))
            stack.enter_context(torch.random.fork_rng([device] if row.is_cuda else []))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # such as the HRM's fixed_depth, without which it would ask the other ranks
            options = {k: v for k, v in model.dummy_inputs(1, device).items() if not isinstance(v, Tensor)}
            whole = model(row, **options)[0].float()
            with model.embed.register_forward_hook(nudged):
                again = model(row, **options)[0]
            passes = torch.cat([model.decode(part, cache) for part in row.split(T - 1 or 1, dim=1)])
            loss = model(row, targets, **options)[1]["loss"] / T
    except (AttributeError, TypeError) as error:  # it has no `embed`, or its forward needs more than ids
        say(f"WARNING: {type(model).__name__.removeprefix('FSDP')} is not checked before it writes "
            f"({first_line(error)})", file=sys.stderr)
        return ""
    error = (passes - whole[-2:]).std() / whole.std()
    of_logits = F.cross_entropy(whole, targets[0])
    of_loss = (loss - of_logits).abs() / loss * has_usual_loss(model)
    errors = torch.stack([error, of_loss]) - 4 * (again - whole).std() / whole.std()
    if everywhere:
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    error, of_loss = errors.tolist()
    if error > CLOSE:
        why = (f"reading {T} tokens in two passes with a cache, the logits differ by {error:.1%} from those "
               "of one pass: a mask, a position or a layer ignores that cache.length tokens came before, or "
               "a token sees later ones")
    elif of_loss > CLOSE:
        why = (f"the loss differs by {of_loss:.1%} from the cross-entropy of the logits: to change the "
               "logits, override `logits` in a class of your own, which the loss calls")
    else:
        return ""
    # FSDP puts its name in front of the class's
    return f"{type(model).__name__.removeprefix('FSDP')} would not generate what it learns: {why}."


def filtered(logits: Tensor, temperature: float, top_k: int | None, top_p: float = 1.0) -> Tensor:
    """Divides logits (B, V) by a temperature above 0, and sets those that must not be sampled to minus
    infinity. First, only the `top_k` likeliest ids are kept (None or 0: all). Then the least likely ids are
    removed as long as their probabilities add up to at most 1 - top_p; the likeliest always stays (nucleus
    sampling, arXiv 1904.09751).
    """
    logits = logits / temperature
    if top_k:
        kept = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    if top_p < 1:
        rising, ids = logits.sort(dim=-1)
        # sums of integers (multiples of 2^-40), because a GPU's sums of floats differ from call to call
        sums = (rising.softmax(dim=-1).double() * 2**40).long().cumsum(dim=-1)
        left_out = sums <= (1 - top_p) * 2**40
        left_out[:, -1] = False
        logits = logits.masked_fill(left_out.scatter(1, ids, left_out), -torch.inf)
    return logits


def sample_ids(logits: Tensor, temperature: float, top_k: int | None, generator, top_p: float = 1.0,
               num_samples: int = 1) -> Tensor:
    """Ids (B,) sampled from logits (B, V): greedy at temperature 0, otherwise from what `filtered` leaves."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = filtered(logits, temperature, top_k, top_p).softmax(dim=-1)
    if num_samples == 1:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    # multinomial does the same, but draws the numbers one by one, which takes longer than a small model
    drawn = torch.rand(probabilities.shape, device=probabilities.device, generator=generator)
    return (probabilities / -drawn.log()).argmax(dim=-1)


@torch.no_grad()
def generate(model, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
             seed: int = 0, stop: int | None = None, top_p: float = 1.0, num_samples: int = 1):
    """Yields the next ids, int64 (B * num_samples,), for `max_new_tokens` tokens. A single sequence ends
    earlier, after the id `stop`. The prompts idx (B, T) may have up to seq_len tokens; each is continued
    `num_samples` times. When the context is full, its second half becomes the new prompt, but a model that
    answers prompts stops there. Padding ids are never sampled.
    """
    training, c = model.training, model.config
    model.eval()
    generator = torch.Generator(device=idx.device).manual_seed(seed)
    idx = idx.repeat_interleave(num_samples, dim=0)
    cache, new = KVCache(c.seq_len), idx
    try:
        for _ in range(max_new_tokens):
            if cache.length + new.size(1) > c.seq_len:
                if c.response >= 0:
                    break
                cache.rewind(0)
                new = idx[:, -max(c.seq_len // 2, 1):]
            with torch.compiler.set_stance("force_eager"):  # otherwise blocks would recompile for each length
                logits = model.decode(new, cache)
            new = sample_ids(logits, temperature, top_k, generator, top_p, num_samples)[:, None]
            idx = torch.cat((idx, new), dim=1)
            yield new[:, 0]
            if stop is not None and idx.size(0) == 1 and new.item() == stop:
                break
    finally:
        model.train(training)


def samples_of(model, tokenizer, device, prompt: str, sampling, stop: bool = False, num_samples: int = 1,
               vote=int):
    """Returns `num_samples` texts, each as an iterator of its pieces, that continue a prompt, which may be
    empty, or answer it if the model was trained on pairs. With `stop`, a text ends where the document ends,
    and a note on stderr says if an answer is cut. `sampling` has these flags of a trainer: temperature,
    top_k, seed, condition, max_new_tokens and optionally top_p. Without max_new_tokens, texts have up to 200
    tokens; answers with `stop` may fill the context. Without `stop`, all ids are generated at once, until
    vote() returns something. Raises UserError before it generates anything.
    """
    c = model.config
    if num_samples > 1 and sampling.temperature == 0:
        raise UserError("--num-samples with --temperature 0 always writes the same text: raise the latter.")
    answers = c.response >= 0
    most = sampling.max_new_tokens or (c.seq_len if stop and answers else 200)
    if answers:
        end = c.end if c.end >= 0 else c.start
        ids = prompt_ids(tokenizer, prompt, sampling.condition).tolist()
        if len(ids) >= c.seq_len:
            raise UserError(f"the prompt has {len(ids)} tokens, but the context of the model is {c.seq_len}: "
                            "shorten it.")
    else:
        isolated = getattr(c, "attention", "causal") != "causal"
        end = tokenizer.eot if stop or isolated else None  # otherwise the text continues past eot
        ids = [tokenizer.eot, *tokenizer.encode(prompt).tolist()]
        if len(ids) > c.seq_len:
            print(f"note: the prompt has {len(ids)} tokens, and the model reads only the last {c.seq_len}",
                  file=sys.stderr)
            ids = ids[-c.seq_len:]
    steps = generate(model, torch.tensor([ids], device=device), most, sampling.temperature, sampling.top_k,
                     sampling.seed, top_p=getattr(sampling, "top_p", 1.0), num_samples=num_samples)
    if not stop:  # in training, all ranks generate the same number of ids
        steps = [*itertools.takewhile(lambda _: not vote(), steps)]

    def through_the_end(steps, row):
        for new in steps:
            i = int(new[row])
            if i == end:
                return
            yield i
        if stop and answers:
            print("\nnote: the answer is cut at --max-new-tokens or the end of the model's context",
                  file=sys.stderr)

    # the model generates all texts together, as far as the caller reads the longest
    return [stream_text(tokenizer, through_the_end(part, row), [] if answers else tokenizer.encode(prompt))
            for row, part in enumerate(itertools.tee(steps, num_samples))]


@torch.no_grad()
def fill_masks(model: MLM, tokenizer, text: str):
    """Yields a line for each [MASK] in a text: the five likeliest tokens with their probabilities. Raises
    UserError if the text has no [MASK] or is too long.
    """
    if "[MASK]" not in text:
        raise UserError('--fill needs a text with [MASK] in it, such as "The [MASK] sat on the mat".')
    ids = [tokenizer.eot, *tokenizer.encode_masked(text)]
    if len(ids) > model.config.seq_len:
        raise UserError(f"the text has {len(ids)} tokens, more than the {model.config.seq_len} of the model.")
    x = torch.tensor([ids], device=model.embed.weight.device)
    logits = model(x)[0].float()[:, :tokenizer.vocab_size]  # (T, V) without [MASK]
    for position in (x[0] == tokenizer.mask).nonzero()[:, 0].tolist():
        probabilities, best = logits[position].softmax(dim=-1).topk(5)
        yield "  ".join(f"{tokenizer.decode([i])!r} {p:.1%}"
                        for i, p in zip(best.tolist(), probabilities.tolist()))


def stream_text(tokenizer, ids, context=()):
    """Yields the text of a stream of ids in whole characters, because a token can end inside one. `context`
    are the ids before, which the text of an id depends on in some tokenizers; they too must end with a whole
    character.
    """
    context = [*context]
    pending = []
    for i in ids:
        pending.append(int(i))
        text = tokenizer.decode(context + pending)
        if not text.endswith("\ufffd"):
            yield text[len(tokenizer.decode(context)):]
            context, pending = pending, []
    yield tokenizer.decode(context + pending)[len(tokenizer.decode(context)):]


def first_pair(dataset) -> tuple[str, str]:
    """The prompt (with its condition) and the response of the first held-out sample. Both are "" if there is
    none, or if encoding the prompt's text gives other tokens.
    """
    marker_ids = dataset.marker_ids
    row = []
    for shards in [*dataset.val.values()][:1]:
        row = read_rows(shards, np.arange(1))[0][0, 1:].tolist()
    middle = row.index(marker_ids["response"]) if marker_ids["response"] in row else 0
    ends = marker_ids["start"], marker_ids["end"]
    prompt = dataset.tokenizer.decode(row[:middle])
    response = dataset.tokenizer.decode(
        itertools.takewhile(lambda token: token not in ends, row[middle + 1:]))
    same = middle and prompt_ids(dataset.tokenizer, prompt).tolist()[1:-1] == row[:middle]
    return (prompt, response) if same else ("", "")


def sample_prompt(args, dataset) -> tuple[str, str]:
    """The prompt for a run's samples, and the expected response. On pairs, the default is a held-out pair. In
    all other cases the response is "". Raises UserError if a prompt on pairs fills a row.
    """
    prompt, expected = args.sample_prompt, ""
    if dataset.marker_ids["response"] >= 0:
        if not prompt and not args.condition:
            prompt, expected = first_pair(dataset)
        tokens = len(prompt_ids(dataset.tokenizer, prompt, args.condition))
        if tokens >= args.seq_len:
            raise UserError(f"--sample-prompt has {tokens} tokens, but a row has {args.seq_len}: shorten it.")
    return prompt, expected
