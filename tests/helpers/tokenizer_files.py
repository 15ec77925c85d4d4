"""Tokenizers of other programs, made small: the content of their tokenizer.json."""

import json

import pytest
from conftest import SHARED

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import decoders, models, normalizers, pre_tokenizers  # noqa: E402

TEXT = ["the cat sat on the mat, and the king speaks to my lord: to be or not to be"] * 30


def word_level(vocab: list[str], special: tuple = (), **changes) -> str:
    """A tokenizer.json of whole words, of which the first is the unknown one."""
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, vocab[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*special])
    return json.dumps(json.loads(made.to_str()) | changes)


def byte_level(kind: str) -> str:
    """A trained one; that of RoBERTa puts a blank in front of a text."""
    made = tokenizers.ByteLevelBPETokenizer(add_prefix_space=kind == "roberta")
    special = ["<s>", "</s>", "<mask>"] if kind == "roberta" else ["<|endoftext|>"]
    made.train_from_iterator(TEXT, vocab_size=600, special_tokens=special, show_progress=False)
    return made.to_str()


def marking(kind: str, *without: str, every_byte: bool = True) -> str:
    """One of characters and one word, whose normalizer or pre-tokenizer marks blanks. Without `every_byte` it
    knows ASCII only.
    """
    words = ["<unk>", "</s>", "\u2581", "\n", *map(chr, range(33, 127)), "\u2581t"]
    words += map("<0x{:02X}>".format, range(256 * every_byte))
    vocab = {word: i for i, word in enumerate(w for w in words if not w.startswith(without or "none"))}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[] if without else [("\u2581", "t")],
                                           unk_token="<unk>", byte_fallback=every_byte))
    made.add_special_tokens(["<unk>", "</s>"])
    unmark = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(unmark + [decoders.Strip(" ", 1, 0)] * (kind != "gemma"))
    if kind == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    else:
        made.normalizer = normalizers.Sequence([*[normalizers.Prepend("\u2581")] * (kind == "llama"),
                                                normalizers.Replace(" ", "\u2581")])
    return made.to_str()


def allow_gpt2(patch) -> None:
    """Lets tiktoken find the vocabulary of gpt2, or skips a test."""
    if not (SHARED / "tiktoken").is_dir():
        pytest.skip("the vocabulary of gpt2 is not in the cache")
    patch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
