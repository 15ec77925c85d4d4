"""Tokenizers that encode and decode. tiktoken runs our byte-level BPEs; tokenizer_json.py runs all others. On
disk each is a Hugging Face tokenizer.json.
"""

import contextlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

from cli.errors import UserError, oserror_as_retryable
from cli.files import without_surrogates
from vocab.tokenizer_json import HuggingFaceTokenizer
from vocab.vocabulary import BYTE_CHARS, EOT, MASK, RESPONSE, Vocabulary, tokenizer_id

TIKTOKEN_IDS = {"gpt2": 50_258, "cl100k_base": 100_278, "o200k_base": 200_020}  # including [MASK]
TOKENIZERS = "gpt2 (r50k_base), cl100k_base, o200k_base, bytes, bpe:N (from the data) or a tokenizer.json"
FROM_OTHERS = ("AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR) of transformers writes one, for "
               "--tokenizer DIR; MODEL is a hub id or the whole folder of a model, and a folder with just "
               "vocab.json and merges.txt needs GPT2TokenizerFast, one with just vocab.txt BertTokenizerFast")
# The published patterns that cut a text into words. tiktoken's own versions use possessive quantifiers and
# "$", which the package tokenizers reads differently. Tests check that these cut the same words in both.
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                   r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
GPT2_DIGEST = "ce2c7b368254)"  # how the tokenizer_id of GPT-2's tokenizer ends
LONGEST_SPACE = 50_000  # longer runs of white space overflow the stack of tiktoken's regex engine
# in the order of GPT-2's encoder: first the bytes that are printable characters, then the others
CHAR_TO_BYTE = dict(zip(sorted(BYTE_CHARS), sorted(range(256), key=lambda b: chr(b) not in BYTE_CHARS)))
BYTE_TO_CHAR = {b: c for c, b in CHAR_TO_BYTE.items()}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def spelled(token: bytes) -> str:
    """A token as tokenizer.json spells it, with one printable character for each byte."""
    return "".join(BYTE_TO_CHAR[b] for b in token)


class Tokenizer(Vocabulary):
    """A byte-level BPE. `ranks` maps the bytes of each token to its id, which is also its merge priority
    (lowest first). `pattern` cuts a text into words; None means plain bytes without merges. `specials` maps
    special tokens to ids; no text encodes to these.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str | None, specials: dict[str, int]):
        self.ranks = ranks
        self.pattern = pattern
        specials = {MASK: max(*ranks.values(), *specials.values()) + 1} | specials
        vocab = {spelled(token): ranks[token] for token in sorted(ranks, key=ranks.get)}
        added = [added_token(text, specials[text]) for text in sorted(specials, key=specials.get)]
        stage = BYTE_LEVEL
        self._encoding = None
        if pattern is not None:
            import tiktoken
            self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                               special_tokens=specials)
            cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            stage = {"type": "Sequence", "pretokenizers": [cut, BYTE_LEVEL]}
        # the content of its tokenizer.json, without the merges, which take long to compute
        self._spec = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
                      "normalizer": None, "pre_tokenizer": stage, "post_processor": None,
                      "decoder": BYTE_LEVEL, "model": {"type": "BPE", "vocab": vocab}}
        super().__init__(name, self._spec)
        self._bytes = ({i: token for token, i in ranks.items()}
                       | {i: special.encode() for special, i in specials.items()})

    def encode(self, text: str) -> np.ndarray:
        """Ids (n,) of a text, in which `<|endoftext|>` is text like any other."""
        if self._encoding is None:
            return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # replace lone surrogates, and cut very long runs of white space
            text = without_surrogates(text)
            cuts = [cut for run in re.finditer(r"\s+", text)
                    for cut in range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE)]
            parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            return np.concatenate([self._encoding.encode_to_numpy(p, disallowed_special=()) for p in parts])

    def lost_in(self, text: str, ids: np.ndarray, split: str) -> Counter:
        """No characters are lost, because every byte has a token. See HuggingFaceTokenizer.lost_in."""
        return Counter()

    def encode_masked(self, text: str) -> list[int]:
        """The ids of a text, with the mask id for each [MASK]. If tokens include the space before their word,
        the mask replaces the space before it, too.
        """
        *before, last = text.split(MASK)
        ids = []
        for part in before:
            if self.takes_blank:
                part = part.removesuffix(" ")
            ids += [*self.encode(part).tolist(), self.mask]
        return ids + self.encode(last).tolist()

    def decode(self, ids) -> str:
        """The text of `ids`. Ids without a token, which some tokenizers have, count as empty."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The content of a tokenizer.json that encodes and decodes like this tokenizer."""
        merges = [[*map(spelled, last_merge(token, self.ranks))]
                  for token in sorted(self.ranks, key=self.ranks.get) if len(token) > 1]
        model = self._spec["model"] | {"merges": merges}
        return json.dumps(self._spec | {"model": model}, ensure_ascii=False)


def added_token(text: str, i: int) -> dict:
    return {"id": i, "content": text, "single_word": False, "lstrip": text == MASK, "rstrip": False,
            "normalized": False, "special": True}


def last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that BPE merges last to form `token`, found by merging its bytes by rank until two parts
    are left.
    """
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def byte_level_bpe(name: str, spec: dict) -> Tokenizer | None:
    """The Tokenizer for the content of a tokenizer.json that Tokenizer.to_json wrote, or for GPT-2's from
    another program. None for any other.
    """
    model = spec["model"]
    vocab = model["vocab"]
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
    words = sorted(vocab.keys() - specials.keys(), key=vocab.get)
    merged = ["".join(parts).replace(" ", "") for parts in model["merges"]]
    if EOT not in specials or [word for word in words if len(word) > 1] != merged:
        return None
    ranks = {bytes(CHAR_TO_BYTE[c] for c in word): vocab[word] for word in words}
    tokenizer = Tokenizer(name, ranks, pattern, specials)
    return tokenizer if ours or tokenizer_id(tokenizer).endswith(GPT2_DIGEST) else None


def parse_tokenizer_json(name: str, text: str) -> Vocabulary:
    """Reads the text of a tokenizer.json; errors mention `name`. If it is not a `byte_level_bpe`, the package
    tokenizers runs it. Raises UserError if it cannot be read.
    """
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        if tokenizer := byte_level_bpe(name, json.loads(text)):
            return tokenizer
    try:
        return HuggingFaceTokenizer(name, text)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise UserError(f"{name} is not a Hugging Face tokenizer.json that tokenizers can read ({error}): "
                        f"{FROM_OTHERS}.")


def refuse_undeclared(path: Path):
    """Raises UserError if tokenizer_config.json declares tokens that the tokenizer.json at `path` doesn't:
    transformers adds them when it loads both, but here a text's would become pieces.
    """
    missing = set()
    with contextlib.suppress(Exception):  # there is no such file, or it has no such tokens
        config, spec = (json.loads(path.with_name(name).read_text(encoding="utf-8"))
                        for name in ("tokenizer_config.json", path.name))
        declared, own = ({token["content"] for token in tokens} for tokens in (
            config["added_tokens_decoder"].values(), spec["added_tokens"]))
        missing = declared - own
    if missing:
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}, which only tokenizer_config.json "
                        f"declares: {FROM_OTHERS}.")


def load_tokenizer(name: str) -> Vocabulary:
    """Loads a tokenizer by name, or from a tokenizer.json or its directory. Raises UserError, also for bpe:N,
    which vocab/bpe.py trains.
    """
    if name == "bytes":
        return Tokenizer("bytes", {bytes([i]): i for i in range(256)}, None, {EOT: 256, MASK: 257})
    if name in TIKTOKEN_IDS:
        import tiktoken
        try:
            encoding = tiktoken.get_encoding(name)
        except OSError as error:  # requests raises subclasses of OSError
            raise UserError(f"the vocabulary of {name} cannot be downloaded ({type(error).__name__}): set "
                            "TIKTOKEN_CACHE_DIR to a cache that contains it, or use --tokenizer bytes or "
                            "bpe:16384.")
        return Tokenizer(name, encoding._mergeable_ranks, PATTERNS.get(name, encoding._pat_str),
                         encoding._special_tokens)
    with oserror_as_retryable(name):
        for path in (Path(name), Path(name, "tokenizer.json")):
            if path.is_file():
                refuse_undeclared(path)
                return parse_tokenizer_json(str(path), path.read_text(encoding="utf-8", errors="replace"))
    if Path(name).is_dir():
        raise UserError(f"{name} has no tokenizer.json: {FROM_OTHERS}.")
    if re.fullmatch(r"bpe:\d+", name):
        raise UserError(f"{name} depends on its training text: name the tokenizer.json that prepare wrote.")
    raise UserError(f"unknown tokenizer {name!r}, and no such file: use {TOKENIZERS}; {FROM_OTHERS}.")


def with_markers(tokenizer: Vocabulary) -> Vocabulary:
    """A tokenizer that has ids to mark a response: the same one if it has them, otherwise one with an
    additional token <|response|>.
    """
    if tokenizer.marker_ids:
        return tokenizer
    spec = json.loads(tokenizer.to_json())
    spec["added_tokens"].append(added_token(RESPONSE, tokenizer.num_ids))
    marked = parse_tokenizer_json(tokenizer.name, json.dumps(spec, ensure_ascii=False))
    marked.eot = tokenizer.eot
    return marked


def prompt_ids(tokenizer, prompt: str, condition: str = "") -> np.ndarray:
    """Ids (n,) of a sample up to and including the marker of its response. The condition is the name of a
    special token, or a text to put in front of the prompt, as a chat template does with a system message.
    Raises UserError if it is a marker, or looks like a special token that the tokenizer lacks.
    """
    marker_ids = tokenizer.marker_ids
    ids = tokenizer.specials.get(condition)
    if ids in marker_ids.values() or ids is None and re.fullmatch(r"<\|.*\|>", condition):
        known = ", ".join(name for name, i in tokenizer.specials.items() if i not in marker_ids.values())
        raise UserError(f"the tokenizer has no condition {condition}: use one of {known}, or plain text.")
    before = [marker_ids["start"]]
    if ids is None:
        prompt = condition + prompt
    else:
        before.append(ids)
    return np.concatenate([before, tokenizer.encode(prompt), [marker_ids["response"]]])
