"""A tokenizer.json. Ours encodes as the package `tokenizers` does and is read back. In one of another program
what is stored is switched off, text that it loses is counted, blanks and bytes come back.
"""

import functools
import json
import random
import re
from collections import Counter

import pytest
from shard_files import prepared, write_rows, write_texts
from tiny_models import export, gpt2, mlm
from tokenizer_files import allow_gpt2, byte_level, marking, word_level

from cli.errors import UserError
from prepare import pipeline
from prepare.pipeline import check_loss
from vocab import bpe
from vocab.tokenizer import (
    PATTERNS,
    Tokenizer,
    load_tokenizer,
    parse_tokenizer_json,
    prompt_ids,
    with_markers,
)
from vocab.tokenizer_json import HuggingFaceTokenizer
from vocab.vocabulary import EOT, MASK
from weights.sampling import stream_text

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import models  # noqa: E402

MARKING = ("llama", "gemma", "first")


# --------------------------------------------------------------------------------------- what is switched off


def test_stored_truncation_padding_and_dropout_are_switched_off():
    package = tokenizers.Tokenizer.from_str(word_level(["[UNK]", "a", "b"]))
    package.enable_truncation(2)
    package.enable_padding(length=8)
    tokenizer = parse_tokenizer_json("stored", package.to_str())
    assert tokenizer.encode("a b a b a").tolist() == [1, 2, 1, 2, 1]
    spec = json.loads(tokenizer.to_json())
    assert spec["truncation"] is spec["padding"] is None
    drops = models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.9)
    drops = parse_tokenizer_json("drops", tokenizers.Tokenizer(drops).to_str())
    assert drops.encode("ab" * 50).tolist() == [2] * 50


def test_no_id_has_two_tokens():
    dense = with_markers(parse_tokenizer_json("dense", word_level(["[UNK]", "a", "b"])))
    assert len({0, 1, 2, dense.eot, dense.mask, dense.marker_ids["response"]}) == 6
    gaps = json.loads(word_level(["[UNK]", "a", "b", "c"]))
    gaps["model"]["vocab"] |= {"b": 4, "d": 5}
    with pytest.raises(UserError, match="^the ids of odd "):
        parse_tokenizer_json("odd", json.dumps(gaps))


def test_a_tokenizer_that_reads_text_as_special_ids_is_refused():
    """One that has a special token among its own words; not one that has its unknown token there."""
    with pytest.raises(UserError, match=r"^odd .*\[MASK\]"):
        parse_tokenizer_json("odd", word_level(["[UNK]", "a", "[MASK]"], ("[UNK]", "[MASK]")))
    plain = with_markers(parse_tokenizer_json("plain", word_level(["[UNK]", "a"], ("[UNK]",))))
    assert plain.encode("a </s> [UNK]").tolist() == [1, 0, 0]


# ----------------------------------------------------------------------------------- text that has no tokens


def test_a_hundredth_of_lost_text_is_the_most():
    for lost in 0, 1, 100:
        assert bool(check_loss("odd", Counter({"all": 10_000, "lost": lost}))) == (lost > 0)
    assert check_loss("odd", Counter()) == ""
    with pytest.raises(UserError, match="^odd .*1.01%.*gpt2"):
        check_loss("odd", Counter({"all": 10_000, "lost": 101}))


def test_text_that_is_lost_after_the_first_shards_is_counted(tmp_path, monkeypatch, capsys):
    """Also by a second try, which would otherwise go on where the first ended."""
    monkeypatch.setattr(pipeline, "in_batches", functools.partial(pipeline.in_batches, chars=500))
    (tmp_path / "t.json").write_text(word_level(["[UNK]", "good", "river"], ("[UNK]",)))

    def said(unknown: int) -> str:
        source = write_texts(tmp_path / "x.jsonl",
                             ["good river"] * 900 + ["xy" * 5] * unknown)  # 9 or 10 letters in each
        prepared(source, tmp_path / f"{unknown}", str(tmp_path / "t.json"), shard_tokens=500)
        return capsys.readouterr().out

    for _ in range(2):
        with pytest.raises(UserError, match=r"t.json loses .*%"):
            said(300)
    capsys.readouterr()
    assert "0.25%" in said(2) and "WARNING" not in said(0)  # 20 of 8,120


def lost(text: str, name: str, spec: str) -> Counter:
    tokenizer = parse_tokenizer_json(name, spec)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer.lost_in(text, tokenizer.encode(text), "val")


def test_lowercasing_and_nfkc_are_no_loss():
    both = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    words = word_level(["[UNK]", "office", "hello"], ("[UNK]",), normalizer=both)
    counts = lost("HELLO o\ufb03ce " * 9, "words", words)  # the ligature has three bytes and three letters
    assert (counts["lost"], counts["all"], counts["val_bytes"]) == (0, 11 * 9, 13 * 9)
    assert lost("hello \u4f60\u597d", "words", words)["lost"] == 2


@pytest.mark.parametrize("kind", MARKING)
def test_marks_of_blanks_are_no_loss_and_unknown_letters_are(kind, tmp_path, capsys):
    """As those of Llama 2, Mistral 7B and Gemma, also with the name of a special token as a condition."""
    text = "an  old\tman\n and the sea "
    assert lost(text, kind, marking(kind))["lost"] == 0
    ascii_only = marking(kind, every_byte=False)
    assert lost(text + "\u4f60" * 2, kind, ascii_only)["lost"] == 2
    (tmp_path / "t.json").write_text(marking(kind))
    source = write_rows(tmp_path / "x.jsonl", *[{"q": "a b", "a": "c", "kind": "<unk>"}] * 20)
    prepared(source, tmp_path / "pairs", str(tmp_path / "t.json"), prompt_field="q", response_field="a",
             condition_field="kind", val_split="hash:0.1")
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", MARKING)
def test_a_continuation_has_its_first_blank_and_whole_characters(kind):
    """The decoder of some would strip the blank, and a run of bytes is text from its beginning only."""
    tokenizer = parse_tokenizer_json(kind, marking(kind))
    ids = tokenizer.encode("the king of \u4f60\u597d\u4f60\u597d\u4f60\u597d! ").tolist()
    for text in "the king", "":
        prompt = tokenizer.encode(text).tolist()
        parts = [*stream_text(tokenizer, ids[len(prompt):], prompt)]
        assert text + "".join(parts) == tokenizer.decode(ids)
        assert all("\ufffd" not in part for part in parts)


# --------------------------------------------------------------------------------------------------- exports

CASES = ["the [MASK] of my lord", "[MASK] is here", "I am [MASK]", "[MASK]", "a [MASK] [MASK] b", "x[MASK]y",
         "The King\n[MASK] speaks", "KING [MASK]!", "tab\t[MASK] end", "two  [MASK] blanks"]


def words_of(build, tokenizer, directory, vocab_size: int, **config):
    """The tokenizer that transformers has for an export."""
    transformers = pytest.importorskip("transformers")
    model = build(vocab_size=vocab_size, padded_vocab=-(-tokenizer.num_ids // 64) * 64, seq_len=32, **config)
    return transformers.AutoTokenizer.from_pretrained(export(model, tokenizer, directory))


@pytest.mark.parametrize("kind", ["byte-level", "roberta", "first", "bytes"])
def test_fill_and_the_pipeline_see_the_same_ids(kind, tmp_path):
    """The mask takes the blank before it, only where tokens do. A causal export of that tokenizer holds no id
    beyond its table.
    """
    spec = {"first": marking, "bytes": lambda name: load_tokenizer(name).to_json()}.get(kind, byte_level)
    ours = parse_tokenizer_json(kind, spec(kind))
    assert ours.takes_blank == (kind != "bytes")
    words = words_of(mlm, ours, tmp_path / "mlm", ours.num_ids, eot=ours.eot)
    for text in CASES:
        found = words(text.replace("[MASK]", words.mask_token))["input_ids"]
        assert found == [ours.eot, *ours.encode_masked(text)], text
        assert found.count(ours.mask) == text.count("[MASK]")
    words = words_of(gpt2, ours, tmp_path / "gpt2", ours.vocab_size)
    ids = words(f"fill {ours.mask_token} in")["input_ids"]
    assert (ours.mask < ours.vocab_size) == (kind == "roberta")  # its mask is not the last id
    assert kind == "roberta" or max(ids) < ours.vocab_size == len(words)


@pytest.mark.parametrize("condition", ["Be brief.", "Answer:\n"])
def test_a_chat_has_the_ids_that_were_trained(condition, tmp_path):
    """Of a tokenizer that puts a blank before a text, and of a condition as a system message."""
    ids = with_markers(parse_tokenizer_json("first", marking("first")))
    words = words_of(gpt2, ids, tmp_path, ids.vocab_size, **ids.marker_ids)
    turns = [{"role": "system", "content": condition}, {"role": "user", "content": "what is two?"}]
    found = words.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert found == prompt_ids(ids, "what is two?", condition).tolist()
    turns.append({"role": "assistant", "content": "it is 3"})
    whole = words.apply_chat_template(turns, return_dict=False)
    assert whole == [*found, *ids.encode("it is 3").tolist(), words.eos_token_id]


# -----------------------------------------------------------------------------------------------------------
# Our byte-level BPEs, compared with the package
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


def test_a_lone_surrogate_becomes_a_question_mark(tokenizer):
    """JSON can spell them."""
    for text in ("a\ud800b", "\udc00", "\ud800" + " " * 100_000 + "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == re.sub("[\ud800-\udfff]", "?", text)
    learned = bpe.train_bpe(["\ud83d half an emoji"] * 9, 300)
    assert learned.decode(learned.encode("\ud83d half")) == "? half" and learned.num_ids <= 300
