"""The ids of a tokenizer, all that training on shards needs of it, and where to find its tokenizer.json."""

import functools
import hashlib
import re
from pathlib import Path

import numpy as np

EOT = "<|endoftext|>"
MASK = "[MASK]"
RESPONSE = "<|response|>"
# HRM-Text's tokens for the start of a sample, the start of its response, and its end. With other tokenizers
# these are <|endoftext|>, <|response|>, and the start of the next sample.
HRM_TEXT_MARKERS = ("<|im_start|>", "<|im_end|>", "<|box_end|>")
# The first of ENDS that a tokenizer has is its end of text, unless it declares one. The same goes for MASKS.
ENDS = (EOT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]", HRM_TEXT_MARKERS[0])
MASKS = (MASK, "<mask>")
# The 256 printable characters that stand for bytes in a tokenizer.json (from GPT-2's encoder).
BYTE_CHARS = {*map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])}


def ends_in(spec: dict) -> list[str]:
    """Tokens that may be the end of text, best first: what the post-processor of a tokenizer.json puts after
    a text (as ModernBERT's does), then ENDS. The marker of a response is left out.
    """
    single = str(spec.get("post_processor")).partition("'pair'")[0]
    ends = re.findall(r"(?:'sep': \[|'A'.*?'SpecialToken': {'id': )'(.*?)'", single)
    return [end for end in (*ends, *ENDS) if end not in (RESPONSE, HRM_TEXT_MARKERS[1])]


class Vocabulary:
    """The tokens of a tokenizer and their ids. `spec` is the parsed content of its tokenizer.json, and `text`
    the same as text. Subclasses also encode and decode.

    `num_ids` counts all ids. `vocab_size` excludes [MASK] if it is the last id, because only masked language
    models need it. `takes_blank` says whether tokens include the space before their word; a mask then
    replaces that space, too.
    """

    def __init__(self, name: str, spec: dict, text: str = ""):
        words = spec["model"]["vocab"]
        if isinstance(words, list):  # a Unigram model, with scores
            words = {word: i for i, (word, _) in enumerate(words)}
        added = spec["added_tokens"]
        specials = {token["content"]: token["id"] for token in added if token["special"]}
        self.name = name
        self.vocab = words | {token["content"]: token["id"] for token in added}
        self.specials = specials
        self.eot = next(specials[end] for end in ends_in(spec) if end in specials)
        self.mask_token = next(mask for mask in MASKS if mask in specials)
        self.mask = specials[self.mask_token]
        self.num_ids = max(self.vocab.values()) + 1
        self.vocab_size = self.num_ids - (self.mask == self.num_ids - 1)
        self.takes_blank = any(re.match("[\u0120\u2581].", word) for word in self.vocab)
        self._byte_level = "ByteLevel" in str(spec["decoder"])
        self.exact = self._byte_level  # whether the `lengths` of a text's tokens add up to its bytes
        self._text = text

    @property
    def marker_ids(self) -> dict[str, int] | None:
        """The ids that mark a sample's `start`, `response` and `end`, or None if the tokenizer has none. An
        `end` of −1 means that a sample ends where the next one starts.
        """
        if all(name in self.specials for name in HRM_TEXT_MARKERS):
            return dict(zip(("start", "response", "end"), map(self.specials.get, HRM_TEXT_MARKERS)))
        if RESPONSE in self.specials:
            return {"start": self.eot, "response": self.specials[RESPONSE], "end": -1}

    def to_json(self) -> str:
        """The content of its tokenizer.json, as text."""
        return self._text

    def lengths(self) -> dict[int, int]:
        """The number of bytes of text for each id that is not special, including the space before a word."""
        word_piece = any(word.startswith("##") for word in self.vocab)  # ## marks the continuation of a word

        def length(word: str) -> int:
            if self._byte_level and all(c in BYTE_CHARS for c in word):
                return len(word)
            if re.fullmatch("<0x[0-9A-F]{2}>", word):  # SentencePiece's token for a single byte
                return 1
            if word.startswith("##"):
                word = word.removeprefix("##")
            elif word_piece:
                word = f" {word}"
            return len(word.replace("\u2581", " ").encode())  # SentencePiece's mark for a space

        return {i: length(word) for word, i in self.vocab.items() if word not in self.specials}

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """`lengths` as an array, int64 (num_ids,), with 0 for special tokens."""
        lengths = self.lengths()
        return np.array([lengths.get(i, 0) for i in range(self.num_ids)])


def tokenizer_id(tokenizer) -> str:
    """A tokenizer's name and digest. The name isn't enough: bpe:4096 trained on another text is another
    tokenizer.
    """
    return f"{tokenizer.name} ({hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:12]})"


def tokenizer_of_run(directory: Path, settings: dict) -> dict[str, str | None]:
    """The tokenizer.json of a run, and the --tokenizer to name it by: the run's own flag, or its
    tokenizer.json if the flag names a file that no longer exists.
    """
    own = tokenizer_in(directory)
    flag = settings.get("tokenizer")
    gone = flag and flag.endswith(".json") and not Path(flag).exists()
    return {"tokenizer_file": own, "tokenizer_flag": own if gone else flag}


def tokenizer_in(directory: Path) -> str | None:
    """The path of the tokenizer.json in a directory; None if there is none."""
    path = directory / "tokenizer.json"
    return str(path) if path.is_file() else None
