"""Text in, shards of tokens on disk, batches out.

    python data.py prepare --dataset stdlib                                   # offline: Python's own source
    python data.py prepare --dataset 'text:books/*.txt' --tokenizer bpe:16384
    python data.py prepare --dataset wikipedia-es --tokenizer gpt2 --max-tokens 2B
    python data.py info   shards/stdlib-bpe4096        # what is in it
    python data.py verify shards/stdlib-bpe4096        # all bytes against their checksums
    python data.py peek   shards/stdlib-bpe4096        # a few rows as text

A shard is a header followed by an array (the format of llm.c and modded-nanogpt); it is memory-mapped.
`prepare` can be killed at any time: the manifest lists the finished shards and where they end in the source.
The order of samples is a pure function of seed and position on any number of ranks, so a checkpoint stores
only the number of samples consumed. Only the reader imports torch, so `prepare` starts five times faster.

What all commands of this project share is defined here, too: the errors that end them with one sentence
(UserError, NotNow), their flags (ArgumentParser, flag_group), and how they print (`say`).
"""

import argparse
import bisect
import bz2
import codecs
import contextlib
import datetime
import difflib
import errno
import fcntl
import functools
import glob
import gzip
import hashlib
import itertools
import json
import lzma
import mmap
import numbers
import os
import random
import re
import shlex
import socket
import sys
import sysconfig
import time
import urllib.parse
import urllib.request
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np


class UserError(Exception):
    """A mistake that the user can fix: printed as one sentence without a traceback, exit code 2."""

    exit_code = 2


class NotNow(UserError):
    """A failure that may not recur with the same command: no network, a full disk, a directory in use."""

    exit_code = 1


class RunError(Exception):
    """A failure that one sentence explains better than a traceback."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split("\n", 1)[0].split())[:300]


def listed(names: list[str]) -> str:
    """Names for a sentence: the first eight, then how many more."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


ROOMS = ("cluster", "weights")  # folders beside this file, each of its own use


def rooms_here() -> list[str]:
    """Those of ROOMS that are there. A deleted folder may have left a __pycache__."""
    return [name for name in ROOMS if Path(__file__).with_name(name).joinpath("__init__.py").is_file()]


@contextlib.contextmanager
def room(folder: str, asked: str = ""):
    """Where something is imported from one of ROOMS, which may have been deleted. If it was, UserError says
    what has `asked` for it; if nothing has, the rest of the block is skipped.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != folder:  # a package that is missing in there
            raise
        if asked:
            refuse_without(folder, asked)


def refuse_without(folder: str, asked: str):
    """UserError if one of ROOMS is not there, in which is what `asked` for it."""
    if folder not in rooms_here():
        raise UserError(f"{asked} needs the folder {folder}/, which is not beside data.py: copy it there, or "
                        "leave that out.") from None


def refuse_moved(module: str, name: str, places: dict[str, str]):
    """For __getattr__ of a module: UserError, for a copy of older code, where a name is in a room now."""
    for place, names in places.items():
        if name in names.split():
            raise UserError(f"{name} of {module}.py has moved: write `from {place} import {name}`, and "
                            f"{name} for {module}.{name}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


@contextlib.contextmanager
def access(path: str | Path = ""):
    """Where files are read: an OSError becomes NotNow, unless there is no such file. Only bytes that were
    read can show damage, so nothing is renamed, left out or begun anew because of an OSError. All commands
    run in it as well, because to ask what a path is can raise one, too.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        path = error.filename or path
        # about bytes, from gzip, bz2, or a seek that they ask for; or about no file
        if not path or error.errno in (None, errno.EINVAL):
            raise
        raise NotNow(f"{path} cannot be accessed ({error.strerror}): remove the cause, and "
                     "run the same command again; what it holds may be sound.") from None


def names_in(directory: Path) -> list[str]:
    """The sorted names in a directory, none if there is no directory. Raises NotNow if it cannot be listed,
    of which Path.glob says nothing.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), access(directory):
        return sorted(os.listdir(directory))
    return []


# flags of other programs, by ours; those that difflib finds by itself are not here
OTHER_NAMES = {
    "--lr": "learning-rate", "--steps": "max-steps max-iters iters", "--epochs": "num-train-epochs",
    "--schedule": "lr-scheduler-type", "--warmup": "warmup-steps",
    "--batch": "micro-batch-size per-device-train-batch-size", "--global-batch": "train-batch-size",
    "--grad-accum": "gradient-accumulation-steps accumulate-grad-batches", "--grad-clip": "max-grad-norm",
    "--weight-decay": "wd", "--seq-len": "block-size context-length max-length",
    "--d-model": "n-embd hidden-size", "--precision": "dtype fp16 bf16", "--init-from": "model-name-or-path",
    "--out": "out-dir output-dir", "--resume": "resume-from-checkpoint",
    "--log-every": "log-interval logging-steps", "--eval-every": "eval-interval eval-steps",
    "--checkpoint-activations": "gradient-checkpointing",
}


class ArgumentParser(argparse.ArgumentParser):
    """The parser of all commands. A mistake raises UserError; one process per node prints the help."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:  # it was closed, as by >&-
                setattr(sys, name, open(os.devnull, "r+"))
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):  # a terminal that cannot show every character; a notebook can
                stream.reconfigure(errors="replace")

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if near := self.nearest_flag(word):
                self.error(f"unrecognized arguments: {' '.join(unknown)}; the nearest flag to "
                           f"{word.partition('=')[0]} is {near}")
        return found, unknown

    def nearest_flag(self, word: str) -> str:
        """The flag that somebody may have meant who typed `word`, or ""."""
        name = word.partition("=")[0].replace("_", "-").lstrip("-")
        for flag, others in OTHER_NAMES.items():
            if name in others.split() and flag in self._option_string_actions:
                return flag
        ours = [flag.removeprefix("--") for flag in self._option_string_actions]
        near = difflib.get_close_matches(name, ours, 1, 0.65)
        return f"--{near[0]}" if near and word.startswith("--") else ""

    def error(self, message):
        raise UserError(f"{message}; --help lists all flags.")

    def print_help(self, file=None):
        if int(os.environ.get("LOCAL_RANK") or 0) == 0:
            super().print_help(file)


def parse_count(text: str) -> int:
    """'500k' → 500000; k, M and B stand for a thousand, a million and a billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbB]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count such as 5000, 500k, 20M or 1.5B")
    return round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2].lower()])


def flag_group(parser: ArgumentParser, title: str):
    """Begins a group of flags. Returns a function that adds a flag, given name, type, help and default. The
    type is bool, an action of argparse, a tuple of choices or a function.
    """
    group = parser.add_argument_group(title)

    def flag(name: str, flag_type, text: str, default=None):
        text += "" if default in (None, "") else f" ({default})"
        kind = {"type": flag_type, "default": default}
        if flag_type in (bool, argparse.BooleanOptionalAction):
            kind = {"action": "store_true" if flag_type is bool else flag_type}
        elif isinstance(flag_type, tuple):
            kind = {"choices": flag_type, "default": default}
        group.add_argument(name, help=text, **kind)

    return flag


say = functools.partial(print, flush=True)  # in a pipe, too, at once


def cpu_count() -> int:
    """Cores that this process may use (on macOS, which cannot tell, all cores)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -----------------------------------------------------------------------------------------------------------
# Tokenizers. tiktoken runs our byte-level BPEs; on disk each tokenizer is a Hugging Face tokenizer.json.

EOT = "<|endoftext|>"
MASK = "[MASK]"
RESPONSE = "<|response|>"
# HRM-Text's tokens for the start of a sample, the start of its response and its end. Other tokenizers use
# <|endoftext|>, <|response|> and the start of the next sample.
HRM_TEXT_ROLES = ("<|im_start|>", "<|im_end|>", "<|box_end|>")
TIKTOKEN_IDS = {"gpt2": 50_258, "cl100k_base": 100_278, "o200k_base": 200_020}  # including [MASK]
TOKENIZERS = f"{', '.join(TIKTOKEN_IDS)}, bytes, bpe:N (trained on the data) or a tokenizer.json"
# The published patterns. tiktoken's patterns use possessive quantifiers and "$", which the regex engine of
# `tokenizers` reads differently. The tests show that the published patterns cut the same pieces in both.
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                   r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
GPT2_DIGEST = "ce2c7b368254)"  # with which tokenizer_id ends
BPE_TRAIN_CHARS = 100_000_000  # bpe:N is trained on the first 100 M characters of the training split
LINE_EVERY = 30  # seconds between lines of `prepare` where there is no progress bar
LONGEST_RUN = 2000  # bpe:N is trained in a time that grows with the square of a run without a break
LONGEST_SPACE = 50_000  # longer runs of white space overflow the stack of tiktoken's regex engine
# The 256 printable characters that stand for bytes in a tokenizer.json (from GPT-2's encoder).
BYTE_TO_CHAR = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
BYTE_TO_CHAR |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTE_TO_CHAR)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def without_surrogates(text: str) -> str:
    """The text with "?" for lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def spelled(token: bytes) -> str:
    """The token in the characters that stand for bytes in a tokenizer.json."""
    return "".join(BYTE_TO_CHAR[b] for b in token)


class Vocabulary:
    """The tokens of a tokenizer, as its tokenizer.json spells them. `takes_blank`: whether tokens hold the
    blank before their word, so that a mask replaces that, too. `num_ids` counts all ids. `vocab_size`
    excludes [MASK] if it is the last id, because only masked language models need it. `roles` has the ids
    that mark a sample's `start`, `response` and `end` (−1: the next start), or is None.
    """

    def __init__(self, name: str, vocab: dict[str, int], specials: dict[str, int], eot: str, mask: str,
                 byte_level: bool):
        self.name = name
        self.vocab = vocab | specials
        self.specials = specials
        self.eot = specials[eot]
        self.mask = specials[mask]
        self.mask_token = mask
        self.num_ids = max(self.vocab.values()) + 1
        self.vocab_size = self.num_ids - (self.mask == self.num_ids - 1)
        self.roles = None
        if all(name in specials for name in HRM_TEXT_ROLES):
            self.roles = dict(zip(("start", "response", "end"), map(specials.get, HRM_TEXT_ROLES)))
        elif RESPONSE in specials:
            self.roles = {"start": self.eot, "response": specials[RESPONSE], "end": -1}
        self.takes_blank = any(re.match("[\u0120\u2581].", word) for word in vocab)
        self._byte_level = byte_level

    def lengths(self) -> dict[int, int]:
        """The number of bytes of each ordinary id, with a leading space where a word begins."""
        word_piece = any(word.startswith("##") for word in self.vocab)  # it marks the continuation of a word

        def length(word: str) -> int:
            if self._byte_level and all(c in CHAR_TO_BYTE for c in word):
                return len(word)
            if re.fullmatch("<0x[0-9A-F]{2}>", word):  # of SentencePiece
                return 1
            word = word.removeprefix("##") if word.startswith("##") else " " * word_piece + word
            return len(word.replace("\u2581", " ").encode())  # the space of SentencePiece

        return {i: length(word) for word, i in self.vocab.items() if word not in self.specials}


class Tokenizer(Vocabulary):
    """A byte-level BPE: `ranks` maps the bytes of a token to its id, which is also its merge priority. Text
    never encodes to a special id.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str | None, specials: dict[str, int]):
        self.ranks = ranks
        self.pattern = pattern
        specials = {MASK: max(*ranks.values(), *specials.values()) + 1} | specials
        words = {spelled(token): i for token, i in ranks.items()}
        super().__init__(name, words, specials, EOT, MASK, byte_level=True)
        self._bytes = {i: token for token, i in ranks.items()}
        self._bytes |= {i: special.encode() for special, i in specials.items()}
        self._encoding = None
        if pattern is not None:  # without a pattern there are no merges: plain bytes
            import tiktoken
            self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                               special_tokens=specials)

    def encode(self, text: str) -> np.ndarray:
        """Ids (n,) of ordinary text; `<|endoftext|>` inside it is text like any other."""
        if self._encoding is None:
            return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a lone surrogate is replaced, a very long run of white space is cut
            text = without_surrogates(text)
            cuts = [cut for run in re.finditer(r"\s+", text)
                    for cut in range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE)]
            parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            return np.concatenate([self._encoding.encode_to_numpy(p, disallowed_special=()) for p in parts])

    def lost_in(self, text: str, ids: np.ndarray) -> Counter:
        """No characters: all bytes have tokens."""
        return Counter()

    def encode_masked(self, text: str) -> list[int]:
        """The ids of a text in which each [MASK] is the mask, and takes one blank before it."""
        *before, last = text.split(MASK)
        found = []
        for part in before:
            part = part.removesuffix(" " * self.takes_blank)
            found += [*self.encode(part).tolist(), self.mask]
        return found + self.encode(last).tolist()

    def decode(self, ids) -> str:
        """The text of `ids`. Some tokenizers have ids without a token; these count as empty."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def to_json(self) -> str:
        """A Hugging Face `tokenizer.json` that encodes and decodes like this tokenizer."""
        tokens = sorted(self.ranks, key=self.ranks.get)
        merges = [[*map(spelled, last_merge(t, self.ranks))] for t in tokens if len(t) > 1]
        model = {"type": "BPE", "vocab": {spelled(t): self.ranks[t] for t in tokens}, "merges": merges}
        added = []
        for text in sorted(self.specials, key=self.specials.get):
            added.append({"id": self.specials[text], "content": text, "single_word": False,
                          "lstrip": text == MASK, "rstrip": False, "normalized": False, "special": True})
        stage = BYTE_LEVEL
        if self.pattern is not None:
            cut = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated",
                   "invert": False}
            stage = {"type": "Sequence", "pretokenizers": [cut, BYTE_LEVEL]}
        return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
                           "normalizer": None, "pre_tokenizer": stage, "post_processor": None,
                           "decoder": BYTE_LEVEL, "model": model}, ensure_ascii=False)


class HuggingFaceTokenizer(Vocabulary):
    """Any tokenizer.json that this file did not write, run by the `tokenizers` package."""

    def __init__(self, name: str, text: str):
        import tokenizers
        self._tokenizer = package = tokenizers.Tokenizer.from_str(text)
        package.encode_special_tokens = True  # "</s>" inside a text is text like any other
        package.no_truncation()
        package.no_padding()
        if hasattr(package.model, "dropout"):  # with which a text has other ids each time
            package.model.dropout = None
        vocab = package.get_vocab()
        ends = (EOT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]", HRM_TEXT_ROLES[0])
        eot = next((s for s in ends if s in vocab), EOT)
        mask = next((s for s in (MASK, "<mask>") if s in vocab), MASK)
        package.add_special_tokens([eot, mask])
        vocab = package.get_vocab()
        added = package.get_added_tokens_decoder()
        specials = {token.content: i for i, token in added.items() if token.special}
        super().__init__(name, vocab, specials, eot, mask, "ByteLevel" in str(package.decoder))
        spec = json.loads(text)
        declared = {token["content"]: token["id"] for token in spec["added_tokens"]}
        if len({*vocab.values()}) < len(vocab) or vocab != vocab | declared:  # tokenizers fills gaps
            raise UserError(f"the ids of {name} have gaps, so that special tokens would get those of others: "
                            "number its tokens from 0 without gaps.")
        unknown = spec["model"].get("unk_id", vocab.get(spec["model"].get("unk_token")))
        for special in self.specials:
            if {*self.encode(f"{special} a{special}a").tolist()} & {*self.specials.values()} - {unknown}:
                raise UserError(f"{name} encodes the text {special} to a special id, so a text could forge "
                                "the end of a document: use another tokenizer, such as gpt2 or bpe:N.")

    def lost_in(self, text: str, ids: np.ndarray) -> Counter:
        """Of the characters of a text, normalized and without white space, how many there are in `all`, and
        how many are `lost` in its ids, to which special ones may be added.
        """
        normalizer = self._tokenizer.normalizer
        text = without_surrogates(text)
        wanted = Counter("".join((normalizer.normalize_str(text) if normalizer else text).split()))
        found = Counter(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        return Counter({"all": wanted.total(), "lost": (wanted - found).total()})

    def encode(self, text: str) -> np.ndarray:
        # unlike `encode`, this releases Python's lock; a batch of one text takes one core
        found, = self._tokenizer.encode_batch([without_surrogates(text)], add_special_tokens=False)
        return np.array(found.ids, dtype=np.uint32)

    def encode_masked(self, text: str) -> list[int]:
        """As an export does it: the parts between masks are no texts of their own, before which some
        tokenizers put a blank, and the mask takes all white space before it.
        """
        import tokenizers
        whole = tokenizers.Tokenizer.from_str(self.to_json())
        mask = tokenizers.AddedToken(self.mask_token, lstrip=self.takes_blank)
        whole.add_special_tokens([mask])
        whole.no_truncation()
        return whole.encode(text.replace(MASK, self.mask_token), add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._tokenizer.to_str()


def tokenizer_id(tokenizer) -> str:
    """Name and digest, because bpe:4096 trained on another text is another tokenizer."""
    return f"{tokenizer.name} ({hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:12]})"


def last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that merge into `token`: those left after merging its bytes by all earlier ranks."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def short_runs(texts):
    """Yields the texts for train_bpe, in pieces of LONGEST_RUN characters if one piece is a single run."""
    for text in map(without_surrogates, texts):
        pieces = [text[i:i + LONGEST_RUN] for i in range(0, len(text), LONGEST_RUN)]
        one_run = rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}"
        yield from pieces if any(re.match(one_run, piece) for piece in pieces) else [text]


def train_bpe(texts, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE on texts; end-of-text and [MASK] are among its `vocab_size` ids."""
    try:
        from tokenizers import Regex, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Trainable
    except ImportError:
        raise UserError("bpe:N needs the tokenizers package: pip install tokenizers, or use bytes.")
    pattern = PATTERNS["cl100k_base"]
    bpe = Trainable(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.train_from_iterator(short_runs(texts), trainers.BpeTrainer(
        vocab_size=vocab_size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    ranks = {bytes(CHAR_TO_BYTE[c] for c in token): i for token, i in bpe.get_vocab().items()}
    return Tokenizer(f"bpe:{vocab_size}", ranks, pattern, {EOT: len(ranks), MASK: len(ranks) + 1})


def byte_level_bpe(name: str, spec: dict) -> Tokenizer | None:
    """What Tokenizer.to_json wrote, or GPT-2's as others write it, as a Tokenizer; None for any other."""
    model = spec["model"]
    stage = spec["pre_tokenizer"]
    others = model.keys() - {"type", "vocab", "merges"}
    ours = not others
    pattern = None
    if ours and stage["type"] == "Sequence":
        pattern = stage["pretokenizers"][0]["pattern"]["Regex"]
        stage = stage["pretokenizers"][-1]
    elif stage.get("use_regex", True):
        ours = False
        pattern = PATTERNS["gpt2"]
        stage = stage | {"use_regex": False}
    if stage != BYTE_LEVEL or spec.get("normalizer") or any(model[key] for key in others):
        return None
    specials = {token["content"]: token["id"] for token in spec["added_tokens"]}
    words = sorted(model["vocab"].keys() - specials.keys(), key=model["vocab"].get)
    merged = ["".join(parts).replace(" ", "") for parts in model["merges"]]
    if [word for word in words if len(word) > 1] != merged:
        return None
    ranks = {bytes(CHAR_TO_BYTE[c] for c in word): model["vocab"][word] for word in words}
    found = Tokenizer(name, ranks, pattern, specials)
    return found if ours or tokenizer_id(found).endswith(GPT2_DIGEST) else None


def parse_tokenizer_json(name: str, text: str) -> Tokenizer | HuggingFaceTokenizer:
    """Reads a tokenizer.json. If it is not a `byte_level_bpe`, the package `tokenizers` runs it."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        if found := byte_level_bpe(name, json.loads(text)):
            return found
    try:
        return HuggingFaceTokenizer(name, text)
    except ImportError:
        raise UserError(f"the tokenizer {name} needs the tokenizers package: pip install tokenizers.")
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise UserError(f"{name} is not a Hugging Face tokenizer.json that tokenizers can read: {error}. Of "
                        "a vocab.json with merges.txt, name the directory.")


def load_tokenizer(name: str) -> Tokenizer | HuggingFaceTokenizer:
    """Loads a tokenizer by name, or from a tokenizer.json or its directory. (For `bpe:N` see train_bpe.)"""
    if name == "bytes":
        return Tokenizer("bytes", {bytes([i]): i for i in range(256)}, None, {EOT: 256, MASK: 257})
    if name in TIKTOKEN_IDS:
        import tiktoken
        try:
            encoding = tiktoken.get_encoding(name)
        except OSError as error:  # requests raises subclasses of OSError
            raise UserError(f"the vocabulary of {name} cannot be downloaded ({type(error).__name__}): set "
                            "TIKTOKEN_CACHE_DIR to a cache that has it, or use --tokenizer bytes or "
                            "bpe:16384.")
        return Tokenizer(name, encoding._mergeable_ranks, PATTERNS.get(name, encoding._pat_str),
                         encoding._special_tokens)
    with access(name):
        path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
        if path.is_file():
            return parse_tokenizer_json(str(path), path.read_text(encoding="utf-8", errors="replace"))
    merges = Path(name, "merges.txt")
    if merges.is_file():  # the older form of GPT-2's tokenizer
        try:
            from tokenizers import ByteLevelBPETokenizer
            old = ByteLevelBPETokenizer(str(merges.with_name("vocab.json")), str(merges))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{merges} and vocab.json beside it cannot be read by tokenizers: {error}.")
        old.add_special_tokens([EOT])
        return parse_tokenizer_json(name, old.to_str())
    if re.fullmatch(r"bpe:\d+", name):
        raise UserError(f"{name} is trained on a text: name the tokenizer.json that prepare wrote for it.")
    raise UserError(f"unknown tokenizer {name!r}, and no such file: use {TOKENIZERS}.")


def with_roles(tokenizer: Tokenizer | HuggingFaceTokenizer) -> Tokenizer | HuggingFaceTokenizer:
    """The tokenizer with ids that mark a response: its own, or otherwise an additional <|response|>."""
    if tokenizer.roles:
        return tokenizer
    spec = json.loads(tokenizer.to_json())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"].append({"id": tokenizer.num_ids, "content": RESPONSE, "special": True} | plain)
    return parse_tokenizer_json(tokenizer.name, json.dumps(spec, ensure_ascii=False))


def prompt_ids(tokenizer, prompt: str, condition: str = "") -> np.ndarray:
    """Ids (n,) of a sample through the marker of its response. The condition is the name of a special token,
    or text that is one with the prompt, as a chat template puts a system message before a question. Raises
    UserError if it is a marker itself or looks like a special token that is missing.
    """
    roles = tokenizer.roles
    ids = tokenizer.specials.get(condition)
    if ids in roles.values() or ids is None and re.fullmatch(r"<\|.*\|>", condition):
        known = ", ".join(name for name, i in tokenizer.specials.items() if i not in roles.values())
        raise UserError(f"the tokenizer has no condition {condition}, but {known}.")
    text = condition + prompt if ids is None else prompt
    before = [] if ids is None else [ids]
    return np.concatenate([[roles["start"], *before], tokenizer.encode(text), [roles["response"]]])


# -----------------------------------------------------------------------------------------------------------
# Sources

SHORT_NAMES = {  # repository, configuration
    "imdb": ("stanfordnlp/imdb", None),
    "wikipedia-en": ("wikimedia/wikipedia", "20231101.en"),
    "wikipedia-es": ("wikimedia/wikipedia", "20231101.es"),
    "c4": ("allenai/c4", "en"),
    "c4-es": ("allenai/c4", "es"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
SOURCES = ("stdlib, task:addition, text:GLOB, jsonl:GLOB, parquet:GLOB, hf:REPO[:CONFIG], "
           + ", ".join(SHORT_NAMES))
FILE_PREFIXES = ("text", "jsonl", "parquet")  # each has a method of Source, such as _jsonl
BLOCK = 1 << 20  # bytes or characters per read; a piece has fewer than twice as many


class Source:
    """Documents in a fixed order, readable from any index on. `fields` names the text field, or for pairs the
    fields of prompt, response and optionally condition; the field of the validation set, if any, comes last.
    A resumed `prepare` must find the same `identity`. The progress bar shows `done` of `total` bytes.
    """

    def __init__(self, dataset: str, settings: dict):
        self.dataset = dataset
        self.pairs = settings.get("row") is not None
        self.val_field = settings.get("val_field")
        self.tokenizer = ""  # as a flag, for a command in an error
        if settings.get("tokenizer"):
            self.tokenizer = f" --tokenizer {shlex.quote(settings['tokenizer'])}"
        names = ("prompt_field", "response_field", "condition_field") if self.pairs else ("text_field",)
        self.fields = [settings[name] for name in (*names, "val_field") if settings.get(name)]
        self.split_on = settings.get("split_on")
        self.divided = False  # whether split_on occurred
        self.seen = 0  # documents that were read to their end, or skipped
        self.named = {}  # the value behind the name of each validation set
        self.unread = {}  # other fields that there are, in their order
        self.done = 0
        self.total = None
        self.files = []
        prefix, _, where = dataset.partition(":")
        refuse_saved(where or dataset)
        if dataset == "task:addition":
            self.identity = f"{dataset}, the harder half of the levels held out"
        elif dataset == "stdlib":
            self.files = stdlib_files()
        elif prefix in FILE_PREFIXES and where:
            self.files = find_files(where, print)
            if not self.files:
                hint = f": of a directory give its files, '{dataset}/*'" if Path(where).is_dir() else ""
                raise UserError(f"no file matches {where!r}{hint}.")
        elif dataset in SHORT_NAMES or prefix == "hf" and where:
            self.repo, self.config = SHORT_NAMES.get(dataset) or [*where.split(":"), None][:2]
            self.repo = os.path.expanduser(self.repo)
            prefix = "hub"
            self.identity = f"{self.repo}:{self.config}"
            self.files = find_files(f"{self.repo}/**")  # if it is a directory here
        elif Path(dataset).is_file():
            raise UserError(f"{dataset} is a file: use 'text:{dataset}', or jsonl: or parquet: before it.")
        else:
            raise UserError(f"unknown data set {dataset!r}: use {SOURCES}, or a prepared directory.")
        self._read = getattr(self, f"_{prefix}")
        if self.files:
            sizes = [[p.name, p.stat().st_size] for p in self.files]
            self.total = sum(size for _, size in sizes)
            self.identity = f"{prefix}, {len(sizes)} files, {self.total} bytes, {digest_json(sizes)[:16]}"
            digest = sha256_of if self.total < 64 * BLOCK else sample_digest
            content = digest_json([prefix == "hub" and where, *map(digest, self.files)])[:16]
            self.identity += f", content {content}"
        val_split = settings["val_split"]
        self.tail = float(val_split[5:]) if val_split.startswith("tail:") else None
        if self.tail and prefix != "text":
            raise UserError("--val-split tail:F needs a text: source, whose length is known: use hash:F.")

    def documents(self, start: int):
        """Yields (document, split, name of the validation set) from document `start` on. A document is blocks
        of text, or a tuple with the fields of a pair. If split is None, a hash of the text or prompt decides.
        """
        for texts, split in itertools.islice(self._read(), start, None):  # skipped texts stay unread
            name = ""
            if self.val_field:
                *texts, value = texts
                name = re.sub(r"[^\w-]+", "-", value).strip("-") or "none"
                if self.named.setdefault(name, value) != value:
                    raise UserError(f"the values {self.named[name]!r} and {value!r} of {self.val_field} "
                                    f"would share the validation set val_{name}: rename one in the data.")
            yield (tuple(texts) if self.pairs else texts), split, name

    def _stdlib(self):
        for path in self.files:
            raw = path.read_bytes()
            self.done += len(raw)
            try:
                yield [raw.decode("utf-8")], None
            except UnicodeDecodeError:  # Python's own tests include a few files in other encodings
                yield [], None

    def _task(self):
        """Each sample is a function of its number. Its level names its validation set. All samples of the
        harder half of the levels are held out.
        """
        for number in itertools.count():
            some = random.Random(f"addition {number}")
            untrained = some.random() < UNTRAINED
            level = some.randint(1, LEVELS // 2) + untrained * LEVELS // 2
            name = f"{'un' * untrained}trained-{level}"
            yield (*addition(some, level), name), "val" if untrained else None

    def _text(self):
        """One document per file, or one between two --split-on; tail:F divides the file at the boundary."""
        sizes = [self._length(path) for path in self.files]
        self.total = sum(sizes)
        train_bytes = int(self.total * (1 - (self.tail or 0)))
        for path, size in zip(self.files, sizes):
            if self.tail is None:
                yield from self._documents(path, 0, size, None)
                continue
            cut = min(max(train_bytes, 0), size)
            with self._open(path) as file:
                file.seek(cut)
                while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:  # inside a UTF-8 character
                    cut += 1
            if cut:
                yield from self._documents(path, 0, cut, "train")
            if cut < size:
                yield from self._documents(path, cut, size, "val")
            train_bytes -= size

    def _length(self, path):
        with self._open(path) as file:
            return file.seek(0, os.SEEK_END)

    def _documents(self, path, begin, end, split):
        blocks = self._text_blocks(path, begin, end)
        if not self.split_on:
            yield blocks, split
            return
        rest = ""
        for block in blocks:
            *texts, rest = (rest + block).split(self.split_on)
            self.divided |= bool(texts)
            yield from (([text], split) for text in texts)
            if len(rest) > 64 * BLOCK:
                raise UserError(f"{path} has {len(rest):,} characters without a {self.split_on!r}: leave "
                                "--split-on out, or name what is between its documents.")
        yield [rest], split

    def _text_blocks(self, path, begin, end):
        decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()  # without its mark
        with self._open(path) as file:
            file.seek(begin)
            while raw := file.read(min(BLOCK, end - begin)):
                try:
                    text = decoder.decode(raw, final=begin + len(raw) == end)
                    refuse_zero(raw)
                except UnicodeDecodeError as error:
                    at = begin + len(raw) - len(error.object) + error.start
                    file.seek(0)
                    line = 1 + sum(end <= at for end in itertools.accumulate(map(len, file)))
                    raise not_utf8(path, f"byte {at + 1} in line {line}", error)
                begin += len(raw)
                self.done += len(raw)
                yield text

    def _jsonl(self):
        for path in self.files:
            before = self.done
            with self._open(path) as file:
                for number, line in enumerate(file, 1):
                    self.done = before + self._raw.tell()
                    if not line.isspace():
                        yield self._json_texts(path, number, line), None

    def _json_texts(self, path, number, line):
        where = f"{path}, line {number},"
        try:
            text = line.decode("utf-8-sig", "surrogatepass")
            refuse_zero(line)
            row = json.loads(text, parse_float=str, parse_int=str, parse_constant=constant)
        except UnicodeDecodeError as error:
            raise not_utf8(path, f"byte {error.start + 1} of line {number}", error)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{where} is not JSON, or nested too deeply, or no object: each line must be one "
                            "JSON object.")
        self._check_fields(where, row)
        yield from self._texts(where, [row[field] for field in self.fields])

    def _texts(self, where, values):
        return [text_of(value, f"{where} field {field!r},") for field, value in zip(self.fields, values)]

    def _parquet(self):
        from pyarrow import parquet

        def batches(path):
            file = parquet.ParquetFile(path)
            self._check_fields(path, file.schema_arrow.names)
            for batch in file.iter_batches(1000, columns=self.fields):
                yield batch.to_pydict()

        for path in self.files:
            yield from self._rows(path, batches(path))
            self.done += path.stat().st_size

    def _hub(self):
        def batches():
            hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
            if not Path(self.repo).exists() and not reachable(hub):
                raise NotNow(f"no network, so {self.repo} cannot be read: use local files (text:, jsonl:, "
                             "parquet:) or the source stdlib, which every machine has.")
            import datasets  # takes 1.2 s
            rows = datasets.load_dataset(self.repo, self.config, split="train", streaming=True)
            if rows.column_names:
                self._check_fields(self.repo, rows.column_names)
            yield from rows.select_columns(self.fields).iter(batch_size=1000)  # row by row is far slower

        return self._rows(self.repo, batches())

    def _rows(self, name, batches):
        """The documents of batches of rows, each with a list for each field."""
        try:
            for batch in batches:
                for values in zip(*(batch[field] for field in self.fields)):
                    yield self._texts(name, values), None
        except (UserError, MemoryError):
            raise
        except Exception as error:  # missing, damaged, in need of a script, or any of httpx
            reason = first_line(error).rstrip(".")
            raise UserError(f"{name} cannot be read ({reason}): check it, and run the same command again.")

    def _check_fields(self, where, there):
        self.unread |= dict.fromkeys(name for name in there if name not in self.fields)
        if missing := [field for field in self.fields if field not in there]:
            flag = "--prompt-field NAME --response-field NAME" if self.pairs else "--text-field NAME"
            flag = "--val-field NAME" if missing[0] == self.val_field else flag
            raise UserError(f"{where} has no field {missing[0]!r} but {', '.join(there)}: choose among them "
                            f"in python data.py prepare --dataset {shlex.quote(self.dataset)}"
                            f"{self.tokenizer} {flag} and train on the directory that this makes. Rows that "
                            "lack it need a null there, and fields inside of others have to be moved out.")

    @contextlib.contextmanager
    def _open(self, path):
        """Opens a file for reading, unpacked. An error while it is open becomes a UserError."""
        try:
            with access(path), open(path, "rb") as self._raw:
                head = self._raw.peek(10)[:10]
                unpack = next((unpack for magic, unpack in PACKED.items() if re.match(magic, head)), iter)
                if unpack == "zstd":
                    raise UserError(f"{path} is packed: unpack it with zstd -d, and name what that writes.")
                yield unpack(self._raw)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read to its end ({reason}): check it, or copy it again.")


PACKED = {rb"\x1f\x8b": gzip.open, rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open, rb"\xfd7zX": lzma.open,
          rb"\x28\xb5\x2f\xfd": "zstd"}  # by the first bytes of a file


def stdlib_files() -> list[Path]:
    """The sources of Python's standard library, sorted."""
    skipped = {"site-packages", "dist-packages"}
    files = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    return sorted(path for path in files if not skipped & {*path.parts})


def find_files(where: str, say=lambda text: None) -> list[Path]:
    """The files of a path or pattern, sorted, each real file once. Brackets may be part of a name."""
    path = Path(os.path.expanduser(where))
    for pattern in (path, *path.parents):
        if glob.has_magic(pattern.name):
            for folder in glob.glob(f"{pattern.parent}/", recursive=True):
                names_in(Path(folder))  # glob leaves out what cannot be listed
    names = glob.glob(str(path), recursive=True) if not path.is_file() else [path]
    names = names or glob.glob(str(path).replace("[", "[[]"), recursive=True)
    found = sorted(filter(Path.is_file, map(Path, names)), reverse=True)
    # some file systems give no numbers
    files = {(path.stat().st_dev, path.stat().st_ino or path): path for path in found}
    if len(files) < len(found):
        say(f"note: {len(found)} names of {where} lead to {len(files)} files: each is read once")
    return sorted(files.values())


def refuse_saved(where: str):
    """Raises UserError for a folder that save_to_disk of datasets has written, or files in it."""
    path = Path(os.path.expanduser(where))
    for folder in (path, path.parent):
        part = ""
        if (several := folder / "dataset_dict.json").is_file():
            names = re.findall(r'"([^"]+)"', several.read_text(encoding="utf-8").partition("[")[2])
            part = f"[{'train' if 'train' in names else names[0]!r}]" if names else ""
        single = (folder / "state.json").is_file() and [*folder.glob("*.arrow")]
        if several.is_file() or single:
            raise UserError(f"{folder} was written by save_to_disk, for load_from_disk alone: in Python, "
                            f"datasets.load_from_disk({str(folder)!r}){part}.to_parquet('x.parquet') makes a "
                            "file for parquet:x.parquet.")


def refuse_zero(raw: bytes):
    """Raises UnicodeDecodeError for a zero byte, as in UTF-16."""
    if (zero := raw.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", raw, zero, zero + 1, "a zero byte")


def constant(text: str) -> str | None:
    """NaN, Infinity or -Infinity in JSON; numbers stay as they are written."""
    return None if text == "NaN" else text


def text_of(value, where: str) -> str:
    """A value of JSON or of a table as text, "" for null and NaN. Raises UserError for what is no text."""
    if isinstance(value, numbers.Number) and value != value:  # missing, among numbers
        return ""
    if isinstance(value, bytes):
        value = value.decode()  # ValueError if it is no text
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str | None):
        return value or ""
    if not isinstance(value, numbers.Number | datetime.date | datetime.time):
        raise UserError(f"{where} holds a {type(value).__name__} and no text: name another field, or write a "
                        'jsonl file of lines such as {"prompt": "…", "response": "…"} for --prompt-field '
                        "prompt --response-field response (cluster/RUNS.md, Chats).")
    return str(value)


def not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> UserError:
    """Names the first byte of a file that is not UTF-8, and commands that mend it."""
    name = shlex.quote(str(path))
    return UserError(f"{path}, {where}, is not UTF-8 text (it is 0x{error.object[error.start]:02x}): convert "
                     f"a text from Windows with iconv -f CP1252 -t UTF-8 {name} > new.txt (or -f UTF-16 if "
                     "it begins with 0xff or 0xfe, or -f UTF-16LE if each second byte is zero), "
                     f"drop what is damaged with iconv -c -f UTF-8 -t UTF-8 {name} > new.txt, or zero bytes "
                     f"with tr -d '\\000' < {name} > new.txt. A packed file has to be unpacked before that, "
                     "and a parquet file named as parquet:.")


def addition(some: random.Random, level: int) -> tuple[str, str]:
    """Two twelve-digit numbers and their sum, highest digit first. The longest run of columns whose digits
    add up to 9 has `level` columns, so a carry from the right passes through all.
    """
    while True:
        begin = some.randrange(13 - level)
        first = some.choices(range(10), k=12)
        second = [9 - a if begin <= i < begin + level else some.randrange(10) for i, a in enumerate(first)]
        nines = "".join("9" if a + b == 9 else " " for a, b in zip(first, second))
        if max(map(len, nines.split())) == level:
            a, b = (int("".join(map(str, digits))) for digits in (first, second))
            return f"{a:012}+{b:012}", f"{a + b:013}"


LEVELS = 8  # of task:addition; training has the lower half
TASK_TOKENS, TASK_ROW = 2_500_000, 256  # what 600 steps of `puzzle` need
UNTRAINED = 0.025  # fraction of samples from the upper half, all held out; also fraction held out of the rest
LARGEST_ROW = 1024  # the largest default for pairs


def reachable(url: str, seconds: float = 1.0) -> bool:
    """Whether the host of `url`, or the proxy in front of it, accepts a connection within `seconds`."""
    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError):  # in a thread, because a DNS look-up has no time-out
        connecting = ThreadPoolExecutor(1).submit(socket.create_connection, (parts.hostname, port), seconds)
        connecting.result(seconds).close()
        return True
    return False


def pieces(blocks):
    """Cuts a document, unless it is a pair, into about BLOCK characters that end with a line or a word."""
    if isinstance(blocks, tuple):
        yield blocks
        return
    rest = ""
    for block in blocks:
        for i in range(0, len(block), BLOCK):
            rest += block[i:i + BLOCK]
            if len(rest) >= BLOCK:
                cut = rest.rfind("\n") + 1 or max(rest.rfind(" ", 1), 0) or len(rest)
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


# -----------------------------------------------------------------------------------------------------------
# Shards: 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens; as in llm.c.
# Each machine that torch has a build for is little-endian.

HEADER_BYTES = 1024
# of a damaged file: with its manifest there, `prepare` would say that it is prepared
WAY_BACK = "copy it, or delete its directory and prepare it again."
FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}


def shard_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size < 65_536 else "uint32"  # < because [MASK] may be one more id


def fsync_directory(path: Path):
    """Makes a rename in this directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # CIFS, VirtualBox and SMB in WSL sync no directories
        os.fsync(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path):
    """A file to write that replaces `path` at the end: readers see all or nothing, even after a crash."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.unlink(missing_ok=True)  # it could be a link to a file elsewhere
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except Exception:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def lock_file(file, when_held) -> str:
    """Locks an open file for this process until it is closed. If another process holds it, calls when_held(),
    which may raise, and waits. Returns "", or why the file system has no locks.
    """
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_held()
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        return error.strerror
    return ""


def why_not_made(directory: Path, error: OSError) -> str:
    """Why a directory cannot be made: the system's reason, or the link to nothing that leads to it."""
    for path in (directory, *directory.parents):
        if os.path.islink(path) and not os.path.exists(path):  # which, unlike Path's, raise nothing
            return f"{path} is a link to {os.readlink(path)}, which is not there"
    return error.strerror


def write_atomically(path: Path, *chunks):
    """Writes a whole file (see `replacing`), or raises NotNow."""
    try:
        with replacing(path) as file:
            file.writelines(chunks)
    except OSError as error:
        raise NotNow(f"{path} cannot be written: {error.strerror}; free some space or choose another "
                     "place, and run the same command again.")


def write_shard(path: Path, arrays: list[np.ndarray], dtype: str) -> str:
    """Writes the arrays as one shard. Returns its sha256."""
    header = np.zeros(256, dtype="int32")
    header[:3] = *FORMATS[dtype], sum(map(len, arrays))
    write_atomically(path, header, *(a.astype(dtype, copy=False) for a in arrays))
    return sha256_of(path)


def map_file(file) -> mmap.mmap | bytes:
    """The content of an open file, read into memory where its file system cannot map it (some FUSE)."""
    try:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)  # fewer can map it as shared
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return file.read()


def open_shard(path: Path) -> np.ndarray:
    """Maps the tokens of a shard, (n,) uint16 or uint32. Raises UserError if header and length disagree."""
    try:
        with access(path), open(path, "rb") as file:
            content = map_file(file)
        header = np.frombuffer(content[:HEADER_BYTES], dtype="int32")
        size = len(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "too short")
        raise UserError(f"{path} cannot be read ({reason}): {WAY_BACK}")
    dtype = next((d for d, magic in FORMATS.items() if tuple(header[:2]) == magic), None)
    if dtype is None or len(header) < 256:
        raise UserError(f"{path} is not a shard: the header that data.py and llm.c write is missing. A file "
                        "of nanoGPT becomes one in an existing directory x with python -c \"import data, "
                        "numpy; data.write_shard(data.Path('x/train_000000.bin'), [numpy.fromfile("
                        "'train.bin', 'uint16')], 'uint16')\", and val.bin as x/val_000000.bin.")
    expected = HEADER_BYTES + int(header[2]) * np.dtype(dtype).itemsize
    if size != expected:
        raise UserError(f"{path} has {size} bytes instead of {expected}: {WAY_BACK}")
    return np.frombuffer(content, dtype, offset=HEADER_BYTES)


def check_types(part: dict, **types: type):
    for name, expected in types.items():
        if not isinstance(part[name], expected):
            raise ValueError(f"{name} is of the wrong type")


def read_manifest(directory: Path) -> dict | None:
    """The manifest of a prepared directory, None if it has none. Raises UserError if it is malformed."""
    path = directory / "manifest.json"
    try:
        manifest = read_json(path)
        check_types(manifest, dataset=str, settings=dict, complete=bool, dtype=str, tokenizer=dict,
                    shards=list)
        check_types(manifest["tokenizer"], name=str, sha256=str, vocab_size=int, mask=int)
        if "roles" in manifest:
            check_types(manifest, row=int, roles=dict)
            check_types(manifest["roles"], start=int, response=int, end=int)
        if "lowest_hash" in manifest:
            check_types(manifest, lowest_hash=int)
        if manifest["format"] != 1:
            raise ValueError("another format")
        for shard in manifest["shards"]:
            check_types(shard, tokens=int, documents=int, sha256=str, end=list)
            # never a path elsewhere
            match = re.fullmatch(r"(train|val|val_[\w-]+)_[0-9]{6}\.bin", shard["file"])
            if not match or match[1] != shard["split"]:
                raise ValueError(f"the shard name {shard['file']!r}")
        if manifest["checksum"] != manifest_digest(manifest):
            raise ValueError("its checksum is wrong")
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}): delete {directory} and prepare it again.")


def manifest_digest(manifest: dict) -> str:
    return digest_json(manifest | {"checksum": None})


def write_manifest(directory: Path, manifest: dict):
    manifest["checksum"] = manifest_digest(manifest)
    write_atomically(directory / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")


def read_json(path: Path):
    """The content of a JSON file, see `access`. Raises ValueError if it is no JSON."""
    with access(path):
        return json.loads(path.read_text(encoding="utf-8"))


def sha256_of(path: Path) -> str:
    with access(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tokenizer_json(directory: Path, manifest: dict, name: str | None = None) -> str:
    """The tokenizer.json beside a manifest. Raises UserError if it has changed or is not that of `name`."""
    path = directory / "tokenizer.json"
    recorded = manifest["tokenizer"]
    digest = None
    with contextlib.suppress(FileNotFoundError):
        digest = sha256_of(path)
    if digest != recorded["sha256"]:
        raise UserError(f"{path} is missing or has changed: {WAY_BACK}")
    text = path.read_text(encoding="utf-8")
    if name is None or name == recorded["name"] and not Path(name).exists():
        return text
    named = None if name.startswith("bpe:") else load_tokenizer(name)
    named = with_roles(named) if named and "roles" in manifest else named
    if not named or named.to_json() != parse_tokenizer_json(name, text).to_json():
        raise UserError(f"{directory} was made with the tokenizer {recorded['name']}, not with {name} as it "
                        "is now: name that directory without --tokenizer, or prepare the data in another.")
    return text


# -----------------------------------------------------------------------------------------------------------
# prepare


def parse_val_split(text: str) -> str:
    match = re.fullmatch(r"(hash|tail):0\.\d+", text if ":" in text else f"{text}:0.01")
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not hash:F or tail:F with a fraction F such as 0.01")
    return match[0]


def default_tokenizer(dataset: str) -> str:
    return {"stdlib": "bpe:4096", "task": "bytes"}.get(dataset.partition(":")[0], "gpt2")


def default_directory(dataset: str, tokenizer: str) -> Path:
    """shards/<source>-<tokenizer>, such as shards/quijote-bpe4096 for text:books/quijote.txt."""
    prefix, _, where = dataset.partition(":")
    source = dataset if prefix == "task" else where or prefix
    if prefix in FILE_PREFIXES:  # in books/*.txt only the directory has a name
        path = Path(where)
        source = next((p for p in (path.stem, *reversed(path.parts[:-1])) if re.search(r"\w", p)), prefix)
    if os.path.exists(tokenizer):  # runs/any/hf/tokenizer.json is named `any`
        path = Path(tokenizer)
        named = (part for part in (path.stem, *reversed(path.parts[:-1])) if part not in ("tokenizer", "hf"))
        tokenizer = next(named, "tokenizer")
    tokenizer = tokenizer.replace(":", "")
    return Path("shards", re.sub(r"[^\w.]+", "-", f"{source}-{tokenizer}").strip("-"))


@dataclass
class Packer:
    """Packs whole samples into rows of `row` tokens. Each goes into the open row with the tightest fit; at
    most WINDOW rows are open. Start tokens fill the rest of a row. If they also end samples, each row keeps
    room for one. With `truncate`, a response that is too long is cut and loses its end; otherwise the sample
    is dropped. Samples whose prompt is too long or whose response is empty are always dropped.
    """

    WINDOW = 1000

    row: int
    roles: dict[str, int]
    truncate: bool
    counts: Counter

    def __post_init__(self):
        self.space = self.row - (self.roles["end"] < 0)
        self.open: list[tuple[int, int, list[np.ndarray]]] = []  # free tokens, a number, samples; ascending

    def add(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Adds a sample; returns the rows that this closes."""
        prompt = 1 + int((tokens == self.roles["response"]).argmax())
        dropped = None
        if len(tokens) - (self.roles["end"] >= 0) == prompt:
            dropped = "empty responses"
        elif prompt >= self.row:
            dropped = "too long prompts"
        elif len(tokens) > self.space and not self.truncate:
            dropped = "too long responses"
        if dropped:
            self.counts[dropped] += 1
            return []
        if len(tokens) > self.space:
            self.counts["truncated responses"] += 1
            tokens = tokens[:self.row]
        if prompt == 2:  # the start and the marker alone
            self.counts["empty prompts"] += 1
        self.counts["samples"] += 1
        self.counts["tokens"] += len(tokens)
        at = bisect.bisect_left(self.open, (len(tokens),))
        free, number, samples = self.open.pop(at) if at < len(self.open) else (
            self.space, self.counts["samples"], [])
        bisect.insort(self.open, (free - len(tokens), number, [*samples, tokens]))
        return self.close(1) if len(self.open) > self.WINDOW else []

    def close(self, count: int) -> list[np.ndarray]:
        """Closes the `count` fullest open rows and returns them."""
        rows = []
        for _, _, samples in self.open[:count]:
            used = np.concatenate(samples)
            rows.append(np.pad(used, (0, self.row - len(used)), constant_values=self.roles["start"]))
        del self.open[:count]
        return rows


@dataclass
class ShardWriter:
    """Collects tokens and writes them as shards in a thread. Pairs are packed into rows; their shard ends
    with one more start token, because a row is read with the token after it. All splits are committed
    together, so a resumed run needs only one position: the end of the newest shard.
    """

    MOST_SETS = 16  # validation sets

    directory: Path
    manifest: dict
    thread: ThreadPoolExecutor

    def __post_init__(self):
        shards = self.manifest["shards"]
        self.position = shards[-1]["end"] if shards else [0, 0]  # [document, piece]
        self.splits = {shard["split"] for shard in shards}
        self.packers: dict[str, Packer] = {}
        self.writing = self.thread.submit(lambda: None)  # the last write, a Future
        self.lost = Counter(self.manifest.get("lost"))
        self.lowest = self.manifest.get("lowest_hash", 2**64)  # of the documents, until one is held out
        self.counts = Counter(self.manifest.get("pairs"))
        if not self.counts:
            self.counts["read"] = sum(s["tokens"] for s in shards if s["split"] == "train")  # before packing
            self.counts["documents"] = sum(s["documents"] for s in shards)
        self._begin_shard()

    def _begin_shard(self):
        self.arrays = defaultdict(list)
        self.tokens = Counter()
        self.documents = Counter()

    def add(self, document: int, piece: int, split: str, tokens: np.ndarray):
        settings = self.manifest["settings"]
        arrays = [tokens]
        self.splits.add(split)
        if len(self.splits - {"train"}) > self.MOST_SETS:
            raise UserError(f"--val-field {settings['val_field']} has more than {self.MOST_SETS} values, and "
                            "each would be a validation set: name another field, or leave it out.")
        if roles := self.manifest.get("roles"):
            if split not in self.packers:
                truncate = settings["long"] == "truncate"
                self.packers[split] = Packer(settings["row"], roles, truncate, self.counts)
            arrays = self.packers[split].add(tokens)
        self.arrays[split] += arrays
        self.tokens[split] += len(tokens)
        self.documents[split] += piece == 0
        self.counts["read"] += len(tokens) * (split == "train")
        self.counts["documents"] += piece == 0
        self.position = [document, piece + 1]
        if self.tokens[split] >= settings["shard_tokens"]:
            self.commit()

    def commit(self, complete: bool = False):
        """Starts writing the collected tokens. Raises UserError if the previous write failed."""
        self.writing.result()
        for split, packer in self.packers.items():
            self.arrays[split] += packer.close(Packer.WINDOW)
            if self.arrays[split]:
                self.arrays[split].append(self.arrays[split][0][:1])
        if not complete and not any(self.arrays.values()):
            return  # all pairs so far were dropped; only a shard records the position
        if self.packers:
            self.manifest["pairs"] = dict(self.counts)
        if self.splits == {"train"}:
            self.manifest["lowest_hash"] = self.lowest
        else:
            self.manifest.pop("lowest_hash", None)
        if self.lost["lost"]:
            self.manifest["lost"] = dict(self.lost)
        self.writing = self.thread.submit(self._write, self.arrays, self.documents, self.position, complete)
        self._begin_shard()

    def _write(self, arrays: dict, documents: Counter, position: list, complete: bool):
        shards = self.manifest["shards"]
        number = int(shards[-1]["file"][-10:-4]) + 1 if shards else 0
        for split in sorted(arrays):
            if arrays[split]:
                file = f"{split}_{number:06d}.bin"
                digest = write_shard(self.directory / file, arrays[split], self.manifest["dtype"])
                shards.append({"split": split, "file": file, "tokens": sum(map(len, arrays[split])),
                               "documents": documents[split], "sha256": digest, "end": position})
        self.manifest["complete"] = complete
        write_manifest(self.directory, self.manifest)


def prepare(dataset: str, out: Path | None = None, tokenizer_name: str | None = None,
            workers: int | None = None, **options) -> Path:
    """Tokenizes `dataset` into shards in `out` and returns that directory. The options are those of the
    command line, see `settings_of`. After a kill, the same call resumes. Resuming and the number of workers
    do not change the bytes. Raises UserError.
    """
    tokenizer_name = tokenizer_name or default_tokenizer(dataset)
    out = Path(out or default_directory(dataset, tokenizer_name))
    settings = settings_of(dataset, **options)
    if workers is not None and workers < 1:
        raise UserError("--workers must be 1 or more.")
    source = Source(dataset, settings | {"tokenizer": tokenizer_name})
    settings = {"source": source.identity, "tokenizer": tokenizer_name, **settings}
    with lock_directory(out), ThreadPoolExecutor(1) as thread:  # the thread ends before the lock is released
        manifest = read_manifest(out)
        if not manifest or not manifest["shards"]:
            manifest = start_manifest(dataset, out, source, settings)
        if dataset == "stdlib" and options.get("val_split") is None:  # shards of an older default stay
            settings["val_split"] = manifest["settings"]["val_split"]
        settings["row"] = settings["row"] or manifest.get("row")
        for key in manifest["settings"] | settings:
            before = manifest["settings"].get(key)
            now = settings.get(key)
            if before != now:
                raise UserError(f"{out} was prepared with another {key} ({before}, now {now}): delete "
                                "it, or give data.py prepare another --out.")
        tokenizer_json = read_tokenizer_json(out, manifest, tokenizer_name)
        if manifest["complete"]:
            say(f"{out} is already prepared: {describe(manifest)}")
            return out
        if manifest["shards"]:
            say(f"{out} resumes after {len(manifest['shards'])} shards")
        writer = ShardWriter(out, manifest, thread)
        tokenizer = parse_tokenizer_json(tokenizer_name, tokenizer_json)
        tokenize(writer, source, tokenizer, workers or cpu_count())
        if not writer.counts["read"] or writer.packers and not writer.counts["samples"]:
            raise UserError(f"{dataset} holds no text to train on: it is empty, shorter than --min-words or "
                            "longer than --row, or all of it fell into the validation split.")
        writer.commit(complete=True)
        writer.writing.result()
    say(f"{out} is ready: {describe(manifest)}")
    return out


def settings_of(dataset: str, *, val_split: str | None = None, val_field: str | None = None,
                max_samples: int | None = None, max_tokens: int | None = None,
                min_words: int | None = None, text_field: str = "text", shard_tokens: int = 10**8,
                prompt_field: str | None = None, response_field: str | None = None,
                condition_field: str | None = None, row: int | None = None, long: str | None = None,
                split_on: str | None = None) -> dict:
    """The settings that determine the bytes `prepare` writes, besides the text and the tokenizer, with
    defaults. Raises UserError for options that conflict.
    """
    prefix = dataset.partition(":")[0]
    if val_split is None:
        # each text file is one document, so a few of them cannot be split by a hash
        few = prefix == "text" and not split_on and len(find_files(dataset[5:])) < 100
        small = (max_tokens or 1e9) < 1e7 or (max_samples or 1e9) < 1e4
        # Python as Linux distributions have it lacks its tests, the larger half
        small = small or prefix == "stdlib" and len(stdlib_files()) < 1000
        fraction = UNTRAINED if prefix == "task" else 0.1 if small else 0.01
        val_split = "tail:0.1" if few else f"hash:{fraction}"
    if val_split.startswith("tail:") and max_samples:
        raise UserError("--max-samples does not go with --val-split tail:F, also the default for a few text "
                        "files, which reads the text to its end: use --max-tokens, or name fewer files.")
    if split_on and prefix != "text":
        raise UserError(f"--split-on is for text: sources, and {dataset} needs none: leave it out.")
    if not 1 <= shard_tokens < 2**30:
        raise UserError("--shard-tokens must be between 1 and 1B.")
    for flag, limit in (("--max-samples", max_samples), ("--max-tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise UserError(f"{flag} must be 1 or more.")

    fieldless = prefix in ("text", "stdlib")
    if prefix == "task":
        if not (max_tokens or max_samples):
            raise UserError(f"{dataset} is endless: say how much with --max-samples or --max-tokens.")
        val_field = val_field or "level"
    elif val_field and fieldless:
        raise UserError(f"{dataset} has no field {val_field}: --val-field is for jsonl:, parquet: and hf:.")
    pairs = prefix == "task" or bool(prompt_field or response_field or condition_field)
    if text_field != "text" and (pairs or fieldless):
        raise UserError(f"--text-field {text_field} is for rows of text, and here would be ignored: leave it "
                        "out.")
    if pairs and fieldless:
        raise UserError(f"{dataset} has no fields for pairs: use a jsonl:, parquet: or hf: source.")
    if pairs and prefix != "task" and not (prompt_field and response_field):
        raise UserError("--prompt-field and --response-field go together: name both.")
    if pairs:
        if row is not None and row < 4:
            raise UserError("--row, in training --seq-len, must be 4 or more.")
        row, long = row or (TASK_ROW if prefix == "task" else 0), long or "truncate"  # 0: see row_for
    elif row or long:
        raise UserError("--row and --long are for pairs: name their --prompt-field and --response-field.")
    return {"val_split": val_split, "val_field": val_field, "max_samples": max_samples,
            "max_tokens": max_tokens, "min_words": min_words or 0, "text_field": text_field,
            "shard_tokens": shard_tokens, "prompt_field": prompt_field, "response_field": response_field,
            "condition_field": condition_field, "row": row, "long": long, "split_on": split_on}


@contextlib.contextmanager
def lock_directory(out: Path):
    """Creates the directory of a data set and locks it for one process. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in out.iterdir() if p.name[0] != "." and p.name != "tokenizer.json")
        if others and "manifest.json" not in others:
            raise UserError(f"{out} holds {others[0]} but no manifest: empty it, or give data.py "
                            "prepare another --out.")
        lock = open(out / ".lock", "a")  # if this is a link, its target stays as it is
    except OSError as error:
        kind = NotNow if error.errno == errno.ENOSPC else UserError
        reason = why_not_made(out, error)
        raise kind(f"{out} cannot be written: {reason}; give data.py prepare another --out.")
    with lock:
        lock_file(lock, lambda: say(f"waiting for another process that is preparing {out}"))
        yield


def row_of(dataset: str) -> int | None:
    """The row length of prepared pairs; otherwise None."""
    with contextlib.suppress(UserError):  # a damaged manifest is reported later, to all ranks
        return (read_manifest(Path(dataset)) or {}).get("row")


def start_manifest(dataset: str, out: Path, source: Source, settings: dict) -> dict:
    """Writes tokenizer.json, training it for bpe:N, and a manifest without shards. Returns the manifest."""
    name = settings["tokenizer"]
    if bpe := re.fullmatch(r"bpe:(\d+)", name):
        if not 300 <= int(bpe[1]) <= 1_000_000:
            raise UserError(f"{name} is out of range: use bpe:300 to bpe:1000000.")
        say(f"training {name} on {dataset}")
        texts = first_texts(source, settings)
        (_, tokenizer), = in_order([texts], 1, train_bpe, int(bpe[1]))  # in a thread, for Ctrl-C's sake
        if tokenizer.num_ids < int(bpe[1]):
            say(f"note: {name} has only {tokenizer.num_ids} ids, because the text is short")
    else:
        tokenizer = load_tokenizer(name)
    if source.pairs:
        tokenizer = with_roles(tokenizer)
        settings["row"] = settings["row"] or row_for(source, settings, tokenizer)
    write_atomically(out / "tokenizer.json", tokenizer.to_json().encode())
    recorded = {"name": name, "sha256": sha256_of(out / "tokenizer.json"),
                "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot, "mask": tokenizer.mask}
    manifest = {"format": 1, "dataset": dataset, "settings": settings, "complete": False, "shards": [],
                "dtype": shard_dtype(tokenizer.vocab_size), "tokenizer": recorded}
    manifest |= {"row": settings["row"], "roles": tokenizer.roles} if source.pairs else {}
    write_manifest(out, manifest)  # before the first shard, because shards alone would be refused
    return manifest


def check_loss(name: str, counts: Counter) -> str:
    """A warning if a tokenizer has lost some characters of a text, else "". UserError if more than 1 %."""
    lost = counts["lost"] / max(counts["all"], 1)
    text = f"{name} loses {lost:.2%} of the characters of this text, for which it has no tokens"
    if lost > 0.01:
        raise UserError(f"{text}: use another --tokenizer, such as gpt2 or bpe:N.")
    return f"WARNING: {text}" if lost else ""


def row_for(source: Source, settings: dict, tokenizer) -> int:
    """The multiple of 64, up to LARGEST_ROW, that holds the longest of the first pairs. With longer rows, a
    small data set would fill only a few, and one step would pass over it several times.
    """
    first = itertools.islice(read_pieces(source, settings), 10_000)
    arrays, _ = encode(first, source, tokenizer)
    return min(64 * (max(map(len, arrays), default=0) // 64 + 1), LARGEST_ROW)


def first_texts(source: Source, settings: dict) -> list[str]:
    """About the first BPE_TRAIN_CHARS characters of the training split."""
    texts = []
    budget = BPE_TRAIN_CHARS
    for _, _, split, text in read_pieces(source, settings):
        if split == "train":
            parts = text if source.pairs else [text]
            texts += parts
            budget -= sum(map(len, parts))
        if budget <= 0:
            break
    return texts


def tokenize(writer: ShardWriter, source: Source, tokenizer, workers: int):
    """Encodes the source from the writer's position to its end or to max_tokens. The last text is cut there,
    but no pair. With tail:F, what is held out follows.
    """
    from tqdm import tqdm  # comes with datasets
    settings = writer.manifest["settings"]
    counts = writer.counts
    marks = 0
    without = 0
    limit = settings["max_tokens"]
    full = bool(limit) and counts["read"] >= limit
    source.done = 0  # beginnings may have been read
    found = read_pieces(source, settings, writer.position, counts["documents"])
    batches = in_batches(item for item in found if not full or item[2] != "train")
    lines = not sys.stderr.isatty() or bool(os.environ.get("TQDM_DISABLE"))
    said = time.monotonic()
    with tqdm(total=limit or source.total, unit="tok" if limit else "B", unit_scale=True, disable=lines,
              mininterval=0.5) as bar:
        for batch, (arrays, lost) in in_order(batches, workers, encode, source, tokenizer):
            for (document, piece, split, text), tokens, counted in zip(batch, arrays, lost):
                if full and (split == "train" or not source.tail):
                    continue
                if limit and split == "train":
                    left = limit - counts["read"]
                    full = len(tokens) >= left
                    if source.pairs and len(tokens) > left:
                        continue
                    tokens = tokens[:left]
                if counts["read"] < 10_000_000:  # counting costs 8 % of the time of `bytes`
                    marks += str(text).count(EOT)  # of a text or of a pair
                if piece == 0 and writer.splits <= {"train"}:
                    writer.lowest = min(writer.lowest, hash64(text[0] if source.pairs else text))
                writer.lost += counted
                writer.add(document, piece, split, tokens)
                if not full:
                    without = document + 1 - counts["documents"]
            check_loss(tokenizer.name, writer.lost)
            bar.set_postfix_str(f"{counts['read'] / 1e6:.1f}M tokens", refresh=False)
            if lines and time.monotonic() > said + LINE_EVERY:
                said = time.monotonic()
                say(f"{counts['read'] / 1e6:.1f}M tokens so far")
            bar.update((counts["read"] if limit else source.done) - bar.n)
            if full and not source.tail:
                break
        if not full:
            without = source.seen - counts["documents"]
    if warning := check_loss(tokenizer.name, writer.lost):
        say(warning)
    if source.split_on and not source.divided:
        say(f"WARNING: {source.split_on!r} of --split-on divides none of the files")
    if marks:
        say(f"note: {EOT} occurs {marks:,} times in the first 10M tokens, as plain text; with a text: source "
            f"--split-on '{EOT}' makes documents of what is between")
    if source.unread:
        say(f"note: fields that were not read: {', '.join([*source.unread][:8])}")
    if without:
        say(f"note: {without:,} documents have no text or fewer words than --min-words")


def read_pieces(source: Source, settings: dict, position=(0, 0), samples: int = 0):
    """Yields (document, piece, split, text) from `position` on, up to max_samples documents in total. A text
    is a string, or a tuple with the fields of a pair.
    """
    fraction = float(settings["val_split"].partition(":")[2])
    first, skip = position
    samples -= skip > 0  # a document that is resumed in the middle has been counted already
    for document, (blocks, split, name) in enumerate(source.documents(first), first):
        for piece, text in enumerate(pieces(blocks)):
            if piece == 0:
                content = whole(text)
                least = settings["min_words"]
                if content.isspace() or least and len(content.split()) < least:
                    break
                if settings["max_samples"] and samples >= settings["max_samples"]:
                    return
                samples += 1
                if split is None:  # a pair's prompt decides, so no prompt is in both
                    decides = text[0] if source.pairs else text
                    split = "val" if hash64(decides) < fraction * 2**64 else "train"
                if split == "val" and name:
                    split = f"val_{name}"
            if document > first or piece >= skip:
                yield document, piece, split, text
        source.seen = document + 1


def hash64(text: str) -> int:
    """A number below 2^64 that depends on the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def whole(text: str | tuple) -> str:
    """A piece of a document as it is, or the fields of a pair as lines."""
    return text if isinstance(text, str) else "\n".join(text)


def in_batches(items, chars: int = BLOCK // 2):
    """Groups pieces, or pairs, into lists of about `chars` characters, the unit of work of a thread."""
    batch = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(whole(item[-1]))
        if size >= chars:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def in_order(batches, workers: int, function, *arguments):
    """Yields (batch, function(batch, *arguments)) in the order of the batches, reading only a few batches
    ahead. The function runs in threads, which help because tokenizers release Python's lock.
    """
    pool = ThreadPoolExecutor(workers)
    begun = ((batch, pool.submit(function, batch, *arguments)) for batch in batches)
    try:
        ahead = deque(itertools.islice(begun, 2 * workers))
        while ahead:
            ahead.extend(itertools.islice(begun, 1))
            batch, result = ahead.popleft()
            yield batch, result.result()
    finally:  # without waiting, so that Ctrl-C ends the process at once
        pool.shutdown(wait=False, cancel_futures=True)


def encode(items, source: Source, tokenizer) -> tuple[list[np.ndarray], list[Counter]]:
    """Token ids of each piece, and the characters that it loses, see HuggingFaceTokenizer.lost_in. A
    document's first piece starts with end-of-text, unless it is a pair. Raises UserError with the number of
    the document that cannot be encoded.
    """
    arrays = []
    lost = []
    dtype = shard_dtype(tokenizer.vocab_size)
    for document, piece, _, text in items:
        try:
            if source.pairs:
                prompt, response, *condition = text
                parts = [prompt_ids(tokenizer, prompt, *condition), tokenizer.encode(response)]
                if (end := tokenizer.roles["end"]) >= 0:
                    parts.append([end])
            else:
                parts = [[tokenizer.eot][:piece == 0], tokenizer.encode(text)]
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust is not an Exception
            reason = str(error).rstrip(".") if isinstance(error, UserError) else repr(error)
            raise UserError(f"{source.dataset}, document {document + 1}, cannot be encoded: {reason}.")
        arrays.append(np.concatenate([np.asarray(part, dtype) for part in parts]))
        lost.append(tokenizer.lost_in(whole(text), arrays[-1]))
    return arrays, lost


def would_split(manifest: dict) -> str:
    """A --val-split with which there would be a validation set, if there is none."""
    if "lowest_hash" not in manifest:
        return "hash:0.1 or a larger fraction"
    if sum(shard["documents"] for shard in manifest["shards"]) == 1:
        return "tail:0.1"
    return f"hash:{max(100 * manifest['lowest_hash'] // 2**64 + 1, 10) / 100:g}"  # holds out that document


def describe(manifest: dict) -> str:
    shards = manifest["shards"]
    train = sum(s["tokens"] for s in shards if s["split"] == "train")
    val = sum(s["tokens"] for s in shards) - train
    documents = sum(s["documents"] for s in shards)
    text = (f"{train:,} training and {val:,} validation tokens of {manifest['tokenizer']['name']}, "
            f"{documents:,} documents")
    if not val:
        text += (f" (nothing to evaluate: prepare with --val-split {would_split(manifest)} in another "
                 "directory)")
    if counts := manifest.get("pairs"):
        fill = counts.get("tokens", 0) / max(train + val, 1)
        shown = sorted(counts.keys() - {"read", "documents", "tokens"})
        parts = [f"{counts[what]:,} {what}" for what in shown]
        text += f" in rows of {manifest['row']}, {fill:.1%} full: {', '.join(parts)}"
    return text


# -----------------------------------------------------------------------------------------------------------
# Order: which rows make up which batch. A pure function of the seed and the number of samples consumed.


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Hashes uint64 values (Steele, Lea and Flood, 2014): close inputs give unrelated outputs."""
    x = x + 0x9E3779B97F4A7C15
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Elements `index` (int64 array, each in [0, n)) of the permutation of range(n) for (seed, epoch).

    A Feistel network of four rounds on an even number of bits, reapplied while the result is outside [0, n)
    (cycle walking; Black and Rogaway, 2002). Nothing is stored, however large n is.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = splitmix64(splitmix64(np.array([seed % 2**64], np.uint64)) ^ epoch)
    keys = splitmix64(key ^ np.arange(4, dtype=np.uint64))

    def encrypt(x):
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (splitmix64(right ^ k) & mask)
        return left << half | right

    x = encrypt(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = encrypt(x[outside])
    return x.astype(np.int64)


def shuffled(positions: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Rows (int64) of the samples at `positions` (int64) in endless shuffled epochs."""
    epochs = positions // rows
    found = np.empty_like(positions)
    for epoch in np.unique(epochs):
        found[epochs == epoch] = permute(positions[epochs == epoch] % rows, rows, seed, int(epoch))
    return found


class Masker:
    """Chooses the tokens to mask and predict, as a pure function of seed, epoch, row and position.

    In each row it picks the K = rate · seq_len positions with the smallest hashes, never a special id. K is
    fixed, so all batches have the same shape. Of the picked tokens, 80 % become [MASK], 10 % a random id, and
    10 % stay (Devlin et al., 2019).
    """

    def __init__(self, tokenizer, seq_len: int, rate: float, seed: int):
        self.k = max(1, round(rate * seq_len))
        self.mask = tokenizer.mask
        self.positions = np.arange(seq_len, dtype=np.uint64)
        self.seed = splitmix64(np.array([seed], np.uint64) ^ 0x6D61736B)
        self.special = np.zeros(tokenizer.num_ids, dtype=bool)
        self.special[list(tokenizer.specials.values())] = True
        self.ordinary = np.flatnonzero(~self.special)

    def __call__(self, x: np.ndarray, rows: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Masks x (B, T) in place; returns positions and labels, int64 (B, K) each, positions ascending. If a
        row has fewer than K ordinary tokens, its other labels are −1, which the loss ignores.
        """
        of_row = splitmix64(splitmix64(self.seed ^ epochs.astype(np.uint64)) ^ rows.astype(np.uint64))
        hashes = splitmix64(of_row[:, None] ^ self.positions)  # (B, T)
        order = np.where(self.special.take(x), np.uint64(2**64 - 1), hashes)
        low = np.uint64((1 << (x.shape[1] - 1).bit_length()) - 1)  # the low bits hold the position
        order &= ~low
        order |= self.positions
        order.partition(self.k - 1, axis=1)
        picked = (order[:, :self.k] & low).astype(np.int64)
        picked.sort(axis=1)
        at = picked + np.arange(0, x.size, x.shape[1])[:, None]  # in the flat x
        old = x.take(at).astype(np.int64)
        ordinary = ~self.special.take(old)
        number, tenth = np.divmod(splitmix64(hashes.take(at)), 10)
        random = self.ordinary.take((number % len(self.ordinary)).astype(np.int64))
        new = np.where(tenth == 8, random, np.where(tenth == 9, old, self.mask))
        np.put(x, at, np.where(ordinary, new, old))
        return picked, np.where(ordinary, old, -1)


# -----------------------------------------------------------------------------------------------------------
# Reading


def documents(idx, start: int, response: int) -> tuple:
    """For tokens idx (B, T), an int64 tensor, returns three int64 (B, T) tensors: the number of each token's
    document in its row, the document's first position, and the position of its <|response|>, or −1. A
    document runs from one `start` to the next.
    """
    import torch
    T = idx.size(1)
    t = torch.arange(T, device=idx.device).expand_as(idx)
    number = (idx == start).cumsum(1)
    first = torch.where(idx == start, t, 0).cummax(1).values
    # the last <|response|> up to each position, and the first from there on; ordinary text has none
    before = torch.where(idx == response, t, -1).cummax(1).values
    after = torch.where(idx == response, t, T - 1).flip(1).cummin(1).values.flip(1)
    follows = (idx.gather(1, after) == response) & (number.gather(1, after) == number)
    return number, first, torch.where(before >= first, before, torch.where(follows, after, -1))


def learned(x: np.ndarray, roles: dict[str, int], loss: str) -> np.ndarray:
    """Which positions of rows of pairs x (B, T) have a label to learn, bool (B, T). With the loss `response`,
    these are the positions from <|response|> on; with `all`, whole samples. The last position of a row, an
    `end` token (nothing follows it) and padding (documents of a `start` token alone) are never learned.
    """
    import torch
    t = np.arange(x.shape[1])
    idx = torch.from_numpy(x.astype(np.int64))
    response = documents(idx, roles["start"], roles["response"])[2].numpy()
    some = (response >= 0) & (x != roles["end"]) & (t < len(t) - 1)
    return some & (t >= response) if loss == "response" else some


def check_ids(path: Path, tokens: np.ndarray, tokenizer):
    """Raises UserError if `tokens` of a file hold an id that no text has with this tokenizer (None: any)."""
    if tokenizer and (largest := int(tokens.max(initial=0))) >= tokenizer.vocab_size:
        raise UserError(f"{path} holds the id {largest}, but {tokenizer.name} has {tokenizer.vocab_size} "
                        f"ids: name the right one with --tokenizer, or {WAY_BACK}")


class Shards:
    """Token files as rows x of `seq_len` tokens, and labels y. A label is the next token, or −1 where
    `learned`, a function of x, is False. A row never spans two files; the rest of a file is unused. A file
    that is named twice counts twice. Reading a row raises UserError if it has an id that the tokenizer lacks.
    """

    def __init__(self, paths: list[Path], seq_len: int, learned=None, tokenizer=None):
        self.paths = paths
        self.tokenizer = tokenizer
        self.tokens = [open_shard(path) for path in paths]
        self.seq_len = seq_len
        self.dtype = self.tokens[0].dtype
        self.learned = learned
        if any(tokens.dtype != self.dtype for tokens in self.tokens):
            raise UserError(f"{paths[0].parent} mixes 16-bit and 32-bit shards: prepare it again.")
        self.num_tokens = sum(map(len, self.tokens))
        self.rows = 0
        self.grids = []  # per file: its first row, its rows (n, T), and the token after each row (n,)
        for tokens in self.tokens:
            n = max(len(tokens) - 1, 0) // seq_len
            rows = tokens[:n * seq_len].reshape(n, seq_len)
            self.grids.append((self.rows, rows, tokens[seq_len::seq_len][:n]))
            self.rows += n

    def take(self, rows: np.ndarray, x: np.ndarray, y: np.ndarray):
        """Copies rows (B,), int64 and ascending, into x (B, T), and their labels into y (B, T), int32."""
        begin = 0
        for path, (first, grid, following) in zip(self.paths, self.grids):
            end = rows.searchsorted(first + len(grid))
            if begin < end:
                local = rows[begin:end] - first
                grid.take(local, 0, x[begin:end], "clip")  # "raise", the default mode, would buffer x
                check_ids(path, x[begin:end], self.tokenizer)
                check_ids(path, following[local], self.tokenizer)
                y[begin:end, -1] = following[local]
                begin = end
        if begin < len(rows):
            raise IndexError(f"row {rows[-1]} of {self.rows}")
        y[:, :-1] = x[:, 1:]
        if self.learned:
            y[~self.learned(x)] = -1


def unigram_entropy(sets: list[Shards], limit: int = 2_000_000) -> float:
    """Entropy in nats of the labels' frequencies, in the first `limit` of them: the loss of the best model
    that ignores all context. For text it does not depend on the length of rows.
    """
    found = []
    for shards in sets:
        if not shards.learned:
            shards = Shards(shards.paths, 1, tokenizer=shards.tokenizer)
        _, y = read_rows(shards, np.arange(min(limit // len(sets) // shards.seq_len + 1, shards.rows)))
        found.append(y[y >= 0])
    counts = np.bincount(np.concatenate(found))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


class Dataset:
    """Directories of shards as rows of `seq_len` tokens. One that is named twice is read twice per epoch.

    Has `train` (Shards), `val` (Shards by the name of the validation set), `tokenizer`,
    `roles`, `name`, and `fingerprint`, which is the same on two machines with the same data. Raises UserError
    for a directory that is damaged, unfinished or too small, or whose tokenizer is not that of the first.
    """

    def __init__(self, directories: list[Path], seq_len: int, tokenizer_name: str | None = None,
                 loss: str | None = None):
        found = {directory: read_directory(directory, seq_len, tokenizer_name)
                 for directory in dict.fromkeys(directories)}
        manifest, self.tokenizer = found[directories[0]]
        self.roles = manifest.get("roles", {"start": self.tokenizer.eot, "response": -1, "end": -1})
        for directory, (other, tokenizer) in [*found.items()][1:]:
            if (tokenizer.to_json(), other.get("roles")) != (self.tokenizer.to_json(), manifest.get("roles")):
                raise UserError(f"{directory} and {directories[0]} have unlike tokenizers, or only one has "
                                "pairs: prepare one with the --tokenizer and fields of the other.")
        pairs = self.roles["response"] >= 0
        if loss == "response" and not pairs:
            raise UserError("--loss response needs pairs: leave it out, or prepare the data with "
                            "--prompt-field and --response-field.")
        self.loss = loss or ("response" if pairs else "all")
        which = functools.partial(learned, roles=self.roles, loss=self.loss) if pairs else None
        train = []
        held_out = defaultdict(list)
        for directory in directories:
            train += [directory / shard["file"] for shard in found[directory][0]["shards"]
                      if shard["split"] == "train"]
        splits = [split for manifest, _ in found.values()
                  for split in {shard["split"] for shard in manifest["shards"]}]
        labels = [directory.name for directory in found]
        for directory, (manifest, _) in found.items():
            label = directory.name if labels.count(directory.name) == 1 else str(directory)
            for shard in manifest["shards"]:
                split = shard["split"]
                # of several directories, sets without a name of their own have that of the directory
                own = len(found) == 1 or split != "val" and splits.count(split) == 1
                name = split[4:] if own else f"{label}-{split[4:]}".strip("-")
                if split != "train":
                    held_out[name].append(directory / shard["file"])
        names = ", ".join(map(str, found))
        if not train:
            raise UserError(f"{names} holds no training shard.")
        self.train = Shards(train, seq_len, which, self.tokenizer)
        if not self.train.rows:
            raise UserError(f"{names} is too small: {self.train.num_tokens} training tokens fill no row "
                            f"of {seq_len}; lower --seq-len or prepare more text.")
        sets = {name: Shards(paths, seq_len, which, self.tokenizer) for name, paths in held_out.items()}
        self.val = {name: shards for name, shards in sets.items() if shards.rows}
        short = {name or "val": max(map(len, shards.tokens)) for name, shards in sets.items()
                 if not shards.rows}
        self.would_split = would_split(manifest)
        self.too_short = ""  # a sentence about validation sets that fill no row
        if short:
            listed = " and ".join(f"{name} ({n} tokens)" for name, n in short.items())
            self.too_short = (f"an evaluation leaves out the validation set {listed}, which fills no row of "
                              f"{seq_len}")
            if min(short.values()) > 1:
                self.too_short += (f"; --seq-len {min(short.values()) - 1} would hold it, in a new run or "
                                   "with --eval-only")
        ids = self.tokenizer.to_json(), self.roles
        for shards in (self.train, *self.val.values()):
            shards.ids = ids
        self.name = "+".join(directory.name for directory in directories)
        digests = [digest_of(found[directory][0]) for directory in directories]
        self.fingerprint = digests[0] if len(digests) == 1 else digest_json(digests)

    def splits(self) -> dict[str, Shards]:
        """All sets by split: `train`, `val` or `val_NAME`."""
        held_out = {f"val_{name}".rstrip("_"): shards for name, shards in self.val.items()}
        return {"train": self.train, **held_out}

    @functools.cached_property
    def token_bytes(self):
        """The number of bytes that each id stands for, int64 (ids,); 0 for special tokens."""
        import torch
        lengths = self.tokenizer.lengths()
        return torch.tensor([lengths.get(i, 0) for i in range(self.tokenizer.num_ids)])

    def first_pair(self) -> tuple[str, str]:
        """Prompt (with its condition) and response of the first held-out sample. Both are "" if there is
        none, or if the text of the prompt encodes to other tokens.
        """
        roles = self.roles
        row = []
        for shards in [*self.val.values()][:1]:
            row = shards.tokens[0][1:shards.seq_len].tolist()
        middle = row.index(roles["response"]) if roles["response"] in row else 0
        ends = roles["start"], roles["end"]
        prompt = self.tokenizer.decode(row[:middle])
        response = self.tokenizer.decode(
            itertools.takewhile(lambda token: token not in ends, row[middle + 1:]))
        same = middle and prompt_ids(self.tokenizer, prompt).tolist()[1:-1] == row[:middle]
        return (prompt, response) if same else ("", "")


def read_directory(directory: Path, seq_len: int,
                   tokenizer_name: str | None = None) -> tuple[dict, Tokenizer | HuggingFaceTokenizer]:
    """Manifest and tokenizer of a directory of shards, whose sizes are checked. A directory written by llm.c
    has no manifest and gets a substitute. Raises UserError if the directory is damaged or unfinished, or its
    rows of pairs have another length.
    """
    if manifest := read_manifest(directory):
        row = manifest.get("row")
        if row and seq_len not in (1, row):  # 1: only to look at it
            raise UserError(f"{directory} has rows of {row} tokens: use --seq-len {row}, or prepare it with "
                            f"--row {seq_len}.")
        if not manifest["complete"]:
            raise UserError(f"{directory} is not complete: run its prepare command again.")
        text = read_tokenizer_json(directory, manifest, tokenizer_name)
        tokenizer = parse_tokenizer_json(manifest["tokenizer"]["name"], text)
    else:
        manifest, tokenizer = manifest_of_plain_shards(directory, tokenizer_name)
    for i, shard in enumerate(manifest["shards"]):
        tokens = open_shard(directory / shard["file"])
        if len(tokens) != shard["tokens"]:
            raise UserError(f"{directory / shard['file']} has {len(tokens)} tokens instead of "
                            f"{shard['tokens']}: {WAY_BACK}")
        if i == 0:  # the others as they are read, see Shards.take
            check_ids(directory / shard["file"], tokens[:1_000_000], tokenizer)
    return manifest, tokenizer


def manifest_of_plain_shards(directory: Path, tokenizer_name: str | None) -> tuple:
    """A substitute for the manifest of shards that llm.c wrote, and their tokenizer."""
    paths = [directory / name for name in names_in(directory) if name.endswith(".bin")]
    if not paths:
        refuse_saved(str(directory))
        raise UserError(f"{directory} holds no data: prepare it first, or use one of {SOURCES}.")
    if not tokenizer_name:
        raise UserError(f"{directory} has no manifest: name its tokenizer, as in --tokenizer gpt2.")
    tokenizer = load_tokenizer(tokenizer_name)
    val = re.compile(r"(?<![a-z])(e?val|valid|validation)(?![a-z])")  # not of "retrieval"
    shards = [{"split": "val" if val.search(path.name) else "train", "file": path.name, "documents": 0,
               "tokens": len(open_shard(path)), "sha256": sample_digest(path)} for path in paths]
    return {"dataset": str(directory), "settings": {}, "shards": shards,
            "tokenizer": {"name": tokenizer_name, "sha256": tokenizer_name}}, tokenizer


def sample_digest(path: Path) -> str:
    """A digest of a file's length, front, middle and end: enough to tell two corpora apart."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with access(path), open(path, "rb") as file:
        for offset in (0, size // 2, max(size - 65536, 0)):
            file.seek(offset)
            digest.update(file.read(65536))
    return digest.hexdigest()


def digest_json(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest_of(manifest: dict) -> str:
    shards = [[shard["file"], shard["sha256"]] for shard in manifest["shards"]]
    return digest_json([manifest["tokenizer"]["sha256"], *shards])


def read_rows(shards: Shards, rows: np.ndarray, epochs: np.ndarray | None = None,
              masker: Masker | None = None) -> list[np.ndarray]:
    """x and labels (B, T) of `rows` (B,), ascending; or with a masker masked x (B, T), positions and labels
    (B, K), which also depend on the epochs (B,).
    """
    x = np.empty((len(rows), shards.seq_len), shards.dtype)
    y = np.empty(x.shape, np.int32)
    shards.take(rows, x, y)
    return [x, *masker(x, rows, epochs)] if masker else [x, y]


class Loader:
    """The endless training steps of one rank. A thread reads three ahead.

    In each micro-batch, the ranks share batch × world_size positions of the global order. Rank r gets the
    r-th slice, sorted so that it reads forward through the files. `world` has this process's rank, the
    world_size and the device, see ddp_utils.World. `samples` is the number consumed before.
    """

    def __init__(self, shards: Shards, batch: int, world, seed: int, samples: int = 0,
                 masker: Masker | None = None):
        self.shards = shards
        self.batch = batch
        self.seed = seed
        self.masker = masker
        self.position = samples + world.rank * batch  # of the next step
        self.stride = batch * world.world_size
        self.device = world.device
        self._micro_batches = 0  # in each step that is read ahead
        self._steps = None  # see in_order

    def step(self, micro_batches: int) -> tuple[int, list[tuple]]:
        """Returns this rank's number of labels in the next step, and its micro-batches on `device`: x and y
        (B, T), or with a masker x (B, T), positions and labels (B, K), all int64. A label of −1 is not
        learned. Steps are fastest if `micro_batches` does not change. Raises what reading raised.
        """
        if micro_batches != self._micro_batches:
            self.close()
            positions = itertools.count(self.position, micro_batches * self.stride)
            self._steps = in_order(positions, 1, self._read, micro_batches)
            self._micro_batches = micro_batches
        position, (parts, labels) = next(self._steps)
        self.position = position + micro_batches * self.stride
        parts = to_device(parts, self.device)
        return labels, [tuple(part.long() for part in micro_batch) for micro_batch in zip(*parts)]

    def _read(self, position: int, micro_batches: int) -> tuple[list, int]:
        """The step at `position` as tensors (micro_batches, B, …) on the CPU, and its number of labels."""
        import torch
        batches = []
        for _ in range(micro_batches):
            samples = np.arange(position, position + self.batch)
            epochs = samples // self.shards.rows
            rows = shuffled(samples, self.shards.rows, self.seed)
            order = np.argsort(rows)
            batches.append(read_rows(self.shards, rows[order], epochs[order], self.masker))
            position += self.stride
        parts = [torch.from_numpy(np.stack(arrays)) for arrays in zip(*batches)]
        return parts, int((parts[-1] >= 0).sum())

    def close(self):
        """Ends the thread."""
        if self._steps:
            self._steps.close()


def to_device(parts: list, device) -> list:
    """Tensors on a device. A GPU copies them while the host goes on; torch then reuses pinned memory."""
    if device.type == "cuda":
        parts = [part.pin_memory() for part in parts]
    return [part.to(device, non_blocking=True) for part in parts]


def validation_batches(shards: Shards, batch: int, world, limit: int | None = None,
                       masker: Masker | None = None):
    """Yields batches like Loader's, and reads ahead like it: the first `limit` rows (None: all) in order,
    equally many on each rank. Past the last row, labels are −1, which the loss ignores, so each row counts
    once on any number of ranks.
    """
    import torch
    total = min(shards.rows, limit or shards.rows)
    stride = batch * world.world_size

    def read(begin: int) -> list:
        rows = np.arange(begin, begin + batch)
        arrays = read_rows(shards, np.minimum(rows, total - 1), np.zeros_like(rows), masker)
        arrays[-1][rows >= total] = -1
        return [torch.from_numpy(array.astype(np.int64)) for array in arrays]

    for _, parts in in_order(range(world.rank * batch, -(-total // stride) * stride, stride), 1, read):
        yield tuple(to_device(parts, world.device))


def sources_of(data: str) -> list[str]:
    """The sources of a trainer's --data: one, or several prepared directories."""
    first, *others = data.split(",")
    return [first, *others] if others and Path(first).is_dir() and not Path(data).is_dir() else [data]


def directory_of(data: str, tokenizer_name: str | None) -> Path:
    """The directory of a trainer's --data: itself, or the directory in which the source is prepared."""
    if Path(data).is_dir() or (":" not in data and os.sep in data):
        return Path(data)
    return default_directory(data, tokenizer_name or default_tokenizer(data))


def expected_ids(data: str, tokenizer_name: str | None) -> int:
    """How many ids a trainer's --data and --tokenizer have, [MASK] included, before anything is prepared."""
    if manifest := read_manifest(directory_of(data, tokenizer_name)):
        return max(manifest["tokenizer"]["vocab_size"], manifest["tokenizer"]["mask"] + 1)
    name = tokenizer_name or default_tokenizer(data)
    if re.fullmatch(r"bpe:\d+", name):
        return int(name[4:])
    return TIKTOKEN_IDS.get(name) or load_tokenizer(name).num_ids


def locate(data: str, tokenizer_name: str | None, useful: int, local_rank: int, watch=lambda: None,
           row: int | None = None, **limits: int | None) -> Path:
    """Returns directory_of(data), prepared if necessary, up to the limits max_tokens, max_samples and
    min_words. Without max_tokens, a source on the hub is prepared up to `useful` tokens. Raises UserError if
    it was prepared with other limits.

    The first process of each node prepares. The others watch for the finished manifest instead of waiting in
    a collective, because preparing can take hours. Meanwhile, watch() raises an error if a process is lost.
    """
    out = directory_of(data, tokenizer_name)
    manifest = read_manifest(out)
    if manifest and not manifest["shards"]:  # `prepare` failed early and starts over
        manifest = None
    for flag, limit in limits.items():
        before = manifest["settings"].get(flag) if manifest else None
        if limit not in (None, before) and (manifest or out == Path(data)):
            flag = f"--{flag.replace('_', '-')}"
            raise UserError(f"{out} was prepared with another {flag} ({before}, now {limit}): leave it out, "
                            "delete that directory, or give data.py prepare another --out, and name that.")
    if out == Path(data):
        return out
    if local_rank > 0:
        while not (manifest and manifest["complete"]):
            watch()
            time.sleep(0.2)
            manifest = read_manifest(out)
        return out

    prefix = data.partition(":")[0]
    max_tokens = limits.get("max_tokens")
    endless = prefix in ("task", "hf") or data in SHORT_NAMES
    useful = TASK_TOKENS if prefix == "task" else useful
    if manifest:
        settings = manifest["settings"]
    else:
        settings = limits | {"max_tokens": max_tokens or (useful if endless else None)}
        if prefix == "task":
            settings["row"] = row
    if manifest and manifest["complete"]:
        check_source(data, out, settings)
    else:
        if endless and not max_tokens:
            why = "" if prefix == "task" else ", 20 for each parameter"
            say(f"{data} is prepared up to {settings['max_tokens']:,} tokens{why}: --max-tokens chooses "
                "another number")
        options = {key: value for key, value in settings.items() if key not in ("source", "tokenizer")}
        prepare(data, out, tokenizer_name, **options)
    return out


def check_source(data: str, out: Path, settings: dict):
    """Raises UserError if `out` was prepared from other files than --data names now."""
    try:
        identity = Source(data, settings).identity
    except (UserError, OSError) as error:  # the source is gone; the shards suffice
        return say(f"note: {str(error).rstrip('.')}; {out}, prepared before, is used")
    if identity != settings["source"]:
        raise UserError(f"{out} was prepared from another text ({settings['source']}, now {identity}): "
                        "delete it, or prepare this one with another --out of data.py prepare, and name that "
                        "with --data; either needs another --out in training. "
                        f"To go on with the old text, use --data {out}.")


# -----------------------------------------------------------------------------------------------------------
# Command line


def verify(directory: Path):
    """Compares every byte of tokenizer and shards with the manifest. Raises UserError if one differs."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise UserError(f"{directory} has no manifest.json, so there is nothing to compare with.")
    read_tokenizer_json(directory, manifest)
    for shard in manifest["shards"]:
        path = directory / shard["file"]
        open_shard(path)  # which says what is wrong with a header or a length
        if sha256_of(path) != shard["sha256"]:
            raise UserError(f"{path} has changed: {WAY_BACK}")
        print(f"{shard['file']}: {shard['tokens']:,} tokens, checksum OK")
    print(f"{directory}: OK" + ("" if manifest["complete"] else ", but incomplete: run its prepare again"))


def info(directory: Path, tokenizer_name: str | None):
    manifest, _ = read_directory(directory, 1, tokenizer_name)
    dataset = Dataset([directory], row_of(str(directory)) or 1, tokenizer_name)
    print(f"{manifest['dataset']}: {describe(manifest)}")
    print("settings: " + ", ".join(f"{k} {v}" for k, v in manifest["settings"].items() if v))
    for split, shards in dataset.splits().items():
        entropy = unigram_entropy([shards])
        print(f"{split}: {shards.num_tokens:,} tokens in {len(shards.tokens)} shards of {shards.dtype}, "
              f"unigram entropy {entropy:.4f} nats")
    tokenizer = dataset.tokenizer
    print(f"tokenizer: {tokenizer.name}, {tokenizer.vocab_size} ids, end of text is {tokenizer.eot}, "
          f"[MASK] is {tokenizer.mask}\nfingerprint: {dataset.fingerprint}")


def peek(directory: Path, tokenizer_name: str | None, rows: int, split: str, seq_len: int | None,
         seed: int):
    if seq_len is None:
        seq_len = row_of(str(directory)) or 128
    if min(rows, seq_len) < 1:
        raise UserError("--rows and --seq-len must be 1 or more.")
    dataset = Dataset([directory], seq_len, tokenizer_name)
    splits = dataset.splits()
    if split not in splits:
        raise UserError(f"{directory} has nothing for --split {split}, but for {', '.join(splits)}.")
    shards = splits[split]
    picked = np.sort(shuffled(np.arange(min(rows, shards.rows)), shards.rows, seed))
    for row, tokens in zip(picked, read_rows(shards, picked)[0]):
        print(f"--- {split} row {row}\n{dataset.tokenizer.decode(tokens)}")


def main():
    parser = ArgumentParser(description="Prepares and inspects shards of tokens.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="tokenize a data set into shards; run again to resume")
    p.add_argument("--dataset", required=True, help=f"one of {SOURCES}")
    p.add_argument("--out", type=Path, help="directory to write (default: shards/<dataset>-<tokenizer>)")
    p.add_argument("--tokenizer", dest="tokenizer_name",
                   help=f"{TOKENIZERS} (default: bpe:4096 for stdlib, bytes for task:addition, else gpt2)")
    flag = flag_group(p, "settings")
    flag("--max-samples", parse_count, "stop after this many documents: 500k, 2M")
    flag("--max-tokens", parse_count, "take at most this many training tokens, of pairs before they are "
         "packed")
    flag("--min-words", int, "skip documents with fewer words", 0)
    flag("--text-field", str, "field or column that holds the text", "text")
    flag("--split-on", str, "text between the documents of a text: file, such as '<|endoftext|>', or "
         "$'\\n<|endoftext|>\\n' if newlines around it belong to it (default: a file is one document)")
    flag("--val-split", parse_val_split, "hash:F: a fraction F of the documents, by a hash of their "
         "text; tail:F: the last part of the text (default: tail:0.1 for fewer than 100 text files, else "
         "hash:0.01, for less than 10M tokens or 10k documents 0.1, as for stdlib of less than 1,000 "
         "files, for task:addition 0.05)")
    flag("--val-field", str, "field with a validation set for each of its values, val_VALUE, at most "
         "16 (default: none; for task:addition the level)")
    flag("--shard-tokens", parse_count, "tokens per shard", "100M")
    flag("--workers", int, "threads that tokenize (default: one per core)")
    flag = flag_group(p, "pairs of prompt and response")
    flag("--prompt-field", str, "field that holds the prompt of a pair")
    flag("--response-field", str, "field that holds the response of a pair")
    flag("--condition-field", str, "field to put in front of the prompt: text, or the name of a "
         "special token of the tokenizer")
    flag("--row", int, "tokens in a row, into which whole pairs are packed: the --seq-len of the "
         "trainer (default: the multiple of 64 that holds the longest of the first 10,000 pairs, up to "
         f"{LARGEST_ROW}; {TASK_ROW} for task:addition)")
    flag("--long", ("truncate", "drop"), "truncate or drop a response that does not fit into a row "
         "(default: truncate)")
    p.set_defaults(run=prepare)
    for run, text in ((info, "what a prepared directory holds"),
                      (verify, "compare every byte with its checksum"), (peek, "print a few rows as text")):
        p = commands.add_parser(run.__name__, help=text)
        p.add_argument("directory", type=Path)
        p.set_defaults(run=run)
        if run is not verify:
            p.add_argument("--tokenizer", dest="tokenizer_name", help="for shards without a manifest")
        if run is peek:
            flag = flag_group(p, "which rows")
            flag("--rows", int, "how many", 3)
            flag("--split", str, "train, val, or val_NAME", "train")
            flag("--seq-len", int, "tokens in a row (default: 128; pairs have their own)")
            flag("--seed", int, "of their choice", 0)
    args = vars(parser.parse_args())
    del args["command"]
    args.pop("run")(**args)


if __name__ == "__main__":
    code = 0
    try:
        with access():
            main()
    except UserError as error:
        code = error.exit_code
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:  # from `peek … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.unraisablehook = lambda _: None  # from half-made objects, such as a progress bar
        code = 130
        print("\nstopped: finished shards are kept; run the same command again to resume", file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)  # pyarrow's threads can abort a process that shuts down while they still run
