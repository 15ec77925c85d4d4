"""Trains the byte-level BPE tokenizer bpe:N."""

import re

from cli.errors import needed
from cli.files import without_surrogates
from vocab.tokenizer import CHAR_TO_BYTE, PATTERNS, Tokenizer
from vocab.vocabulary import EOT, MASK

BPE_TRAIN_CHARS = 100_000_000  # bpe:N is trained on the first 100 M characters of the training split
LONGEST_RUN = 2000  # characters; training time grows with the square of a run without a word break


def short_runs(texts):
    """Yields the texts for train_bpe. A text with a very long run without white space, or of nothing but
    white space, is cut into pieces of LONGEST_RUN characters.
    """
    for text in map(without_surrogates, texts):
        pieces = [text[i:i + LONGEST_RUN] for i in range(0, len(text), LONGEST_RUN)]
        one_run = rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}"
        yield from pieces if any(re.match(one_run, piece) for piece in pieces) else [text]


def train_bpe(texts, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE on texts. Its `vocab_size` ids include end-of-text and [MASK]. Raises UserError
    if the package tokenizers is missing.
    """
    with needed("tokenizers", "bpe:N"):
        from tokenizers import Regex, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Trainable
    pattern = PATTERNS["cl100k_base"]
    bpe = Trainable(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.train_from_iterator(short_runs(texts), trainers.BpeTrainer(
        vocab_size=vocab_size - 2, initial_alphabet=[*CHAR_TO_BYTE]))
    ranks = {bytes(CHAR_TO_BYTE[c] for c in token): i for token, i in bpe.get_vocab().items()}
    return Tokenizer(f"bpe:{vocab_size}", ranks, pattern, {EOT: len(ranks), MASK: len(ranks) + 1})
