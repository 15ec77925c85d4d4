"""Tokenizers of other programs: what is stored in them is switched off, text that they lose is counted,
blanks and bytes come back, and their exports encode as the pipeline does.
"""

import functools
import json
from collections import Counter

import pytest
from shard_files import prepared, write_rows, write_texts
from tiny_models import export, gpt2, mlm
from tokenizer_files import byte_level, marking, word_level

from cli.errors import UserError
from prepare import pipeline
from prepare.pipeline import check_loss
from vocab.tokenizer import load_tokenizer, parse_tokenizer_json, prompt_ids, with_markers
from vocab.tokenizer_json import HuggingFaceTokenizer
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
