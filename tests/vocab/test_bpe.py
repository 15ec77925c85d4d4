"""vocab/bpe.py, and the byte-level BPEs of vocab/tokenizer.py, compared with the package `tokenizers`."""

import json
import random
import re

import pytest
from tokenizer_files import allow_gpt2

from cli.errors import UserError
from vocab import bpe
from vocab.tokenizer import PATTERNS, Tokenizer, load_tokenizer, parse_tokenizer_json
from vocab.tokenizer_json import HuggingFaceTokenizer
from vocab.vocabulary import EOT, MASK

TRICKY = [
    "", " ", "\n", "Hello world", "  two  spaces   three\t\ttabs \n \n\n x  ",
    "line\r\nline\r\n\r\n  end\r", "  def f(x):\n\t\treturn x  # done\n",
    "I'm you're he'll we've it's they'd I'M YOU'RE HE'LL IT'\u017f 'tis o'clock 's 'S", "don\u2019t",
    "1 12 123 1234 12345 1,234.56 ½ ² \u0661\u0662\u0663 Ⅷ", "!!! ... ?!?! --- #### _snake_case_ $x^{2}$",
    "mañana façade naïve Ångström e\u0301 straße", "日本語 한국어 русский עברית",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1ea\U0001f1f8 \u2764\ufe0f",
    "a\u00a0b\u3000c\u2003d\u2028e\u0085f\u200bg\ufeffh\x1ci\x0bj\x00k",
    f"a {EOT} b{EOT}{EOT}[MASK] [MASK]", "x" * 5000, "\n" * 300 + " " * 300 + "a"]
ATOMS = [*" \n\r\t'!.7aZñ中한½²", "  ", "\r\n", "'s", "'LL", "2024", "e\u0301", "<|", "|>", EOT, "[MASK]",
         *"\u00a0\u3000\u2028\u0085\x1c\x00\u200b\ufeff\u017f\u212a\u2019\u05d0\u0661\u200d\ufffd",
         "\U0001f600", "\U00010fff"]


@pytest.fixture(scope="module")
def trained(corpus) -> Tokenizer:
    return bpe.train_bpe([corpus.read_text(encoding="utf-8"), *TRICKY], 700)


@pytest.fixture(scope="module", params=["gpt2", "bpe:700", "bytes"])
def tokenizer(request, trained) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gpt2":
            allow_gpt2(patch)
        return trained if request.param == "bpe:700" else load_tokenizer(request.param)


@pytest.fixture(scope="module")
def exported(tokenizer) -> str:
    return tokenizer.to_json()


def run_by_the_package(spec: str | dict, special: bool = False):
    import tokenizers
    package = tokenizers.Tokenizer.from_str(spec if isinstance(spec, str) else json.dumps(spec))
    package.encode_special_tokens = not special  # <|endoftext|> inside a text is text like any other
    return package


def same(tokenizer, package, texts) -> bool:
    return all(tokenizer.encode(text).tolist() == package.encode(text, add_special_tokens=False).ids
               for text in texts)


def test_our_encoding_is_that_of_the_package(tokenizer, exported, corpus):
    package = run_by_the_package(exported)
    chance = random.Random(3)
    texts = ["".join(chance.choices(ATOMS, k=chance.randrange(1, 25))) for _ in range(600)]
    texts += [*TRICKY, corpus.read_text(encoding="utf-8")[:100_000]]
    assert same(tokenizer, package, texts)
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text == package.decode(ids, skip_special_tokens=False)
        assert max(ids, default=0) < min(tokenizer.specials.values())
    # the control: the texts tell another pattern and special tokens
    assert not same(tokenizer, run_by_the_package(exported, special=True), TRICKY)
    if tokenizer.pattern:
        spec = json.loads(exported)
        other = PATTERNS["cl100k_base" if tokenizer.name == "gpt2" else "gpt2"]
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = other
        assert not same(tokenizer, run_by_the_package(spec), TRICKY)


def test_the_older_form_of_gpt2_is_read_as_ours(tokenizer, exported):
    """The file on the hub leaves the pattern to ByteLevel and writes merges as strings."""
    spec = json.loads(exported)
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    older = parse_tokenizer_json("older", json.dumps(spec))
    assert (type(older) is Tokenizer) == (tokenizer.name == "gpt2")
    assert same(older, run_by_the_package(spec), TRICKY)
    for field in ("eot", "mask", "num_ids"):
        assert getattr(older, field) == getattr(tokenizer, field)
    spec["model"]["dropout"] = 0.1
    assert type(parse_tokenizer_json("drops", json.dumps(spec))) is HuggingFaceTokenizer


def test_a_tokenizer_json_is_read_back(tokenizer, exported):
    again = parse_tokenizer_json(tokenizer.name, exported)
    assert type(again) is Tokenizer and again.to_json() == exported
    for field in ("ranks", "pattern", "specials", "eot", "mask", "vocab_size", "num_ids"):
        assert getattr(again, field) == getattr(tokenizer, field)
    assert tokenizer.vocab_size == tokenizer.mask == tokenizer.eot + 1 == tokenizer.num_ids - 1
    spec = json.loads(exported)
    spec["added_tokens"].pop()  # [MASK], the last id
    assert parse_tokenizer_json("without mask", json.dumps(spec)).mask == tokenizer.mask


@pytest.mark.parametrize("change", [
    "merges", "alphabet", {"normalizer": {"type": "Lowercase"}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}], ids=str)
def test_a_changed_tokenizer_json_is_run_by_the_package(change):
    """Also one without all bytes. tiktoken encodes by the ids, so it would not do what the file says."""
    spec = json.loads(bpe.train_bpe(["the cat sat on the mat"] * 9, 300).to_json())
    merges, vocab = (spec["model"][key] for key in ("merges", "vocab"))
    if change == "merges":
        merges[0], merges[1] = merges[1], merges[0]
    elif change == "alphabet":
        vocab["unused"] = vocab.pop("\u00c3")
    else:
        spec |= change
    other = parse_tokenizer_json("other", json.dumps(spec))
    assert type(other) is HuggingFaceTokenizer and same(other, run_by_the_package(spec), TRICKY)


@pytest.mark.parametrize("change", [
    {"vocab": []}, {"vocab": {"a": "b"}}, {"merges": [1]}, {"merges": None}], ids=str)
def test_a_malformed_tokenizer_json_is_refused(trained, change):
    spec = json.loads(trained.to_json())
    spec["model"] |= change
    with pytest.raises(UserError, match="broken"):
        parse_tokenizer_json("broken", json.dumps(spec))


def test_an_id_without_a_token_is_empty_text():
    """cl100k_base has such gaps, and an untrained model samples them."""
    specials = {EOT: 256, MASK: 300}
    tokenizer = Tokenizer("gaps", {bytes([i]): i for i in range(256)}, r"\s+|\S+", specials)
    assert tokenizer.num_ids == 301 and tokenizer.decode([97, 280, 98]) == "ab"


@pytest.mark.parametrize("part", [" ", "a", " \n"])
def test_a_million_of_anything(trained, part):
    text = part * (1_000_000 // len(part))
    assert trained.decode(trained.encode(text)) == text


def test_a_lone_surrogate_becomes_a_question_mark(tokenizer):
    """JSON can spell them."""
    for text in ("a\ud800b", "\udc00", "\ud800" + " " * 100_000 + "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == re.sub("[\ud800-\udfff]", "?", text)
    learned = bpe.train_bpe(["\ud83d half an emoji"] * 9, 300)
    assert learned.decode(learned.encode("\ud83d half")) == "? half" and learned.num_ids <= 300


@pytest.mark.parametrize("unit", ["a", " "])
def test_long_runs_are_cut_for_training(unit):
    long, usual = "x " + unit * 100_000 + " y", f"{unit * 500} y " * 99
    *cut, last = bpe.short_runs([long, usual])
    assert max(map(len, cut)) == bpe.LONGEST_RUN and "".join(cut) == long and last == usual
