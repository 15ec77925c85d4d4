"""Tokenizers by name and from files: which of them tiktoken runs, masks in a text, the ids of a prompt, and
whether a tokenizer is the one that data or weights have.
"""

import functools
import json
from types import SimpleNamespace

import pytest
from pair_data import RESPONSE, ROLES, START, pairs, prepare, samples, write  # noqa: F401
from tiny_models import export, gpt2
from tokenizer_files import allow_gpt2

import data
from cli.errors import UserError
from model import GPT2
from prepare import pipeline
from vocab.bpe import train_bpe
from vocab.tokenizer import load_tokenizer, prompt_ids, with_markers
from vocab.vocabulary import MASK
from weights.init_from import assert_ids, weights_of

TEXTS = ["the cat sat on the mat"] * 30
OTHER_TEXTS = ["she sells sea shells by the shore"] * 30


def refuses(named: str, what, *arguments) -> None:
    with pytest.raises(UserError, match="(?s)" + named):
        what(*arguments)


def run_here(function, *args):
    return function(*args)


def test_tokens_that_only_tokenizer_config_json_declares_are_refused(tmp_path):
    """transformers would add them. A text's would become pieces here."""
    tokenizer = load_tokenizer("bytes")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    for name in tokenizer.specials, ["<|im_end|>"]:
        config = {"added_tokens_decoder": {i: {"content": token} for i, token in enumerate(name)}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if name != ["<|im_end|>"]:
            assert load_tokenizer(str(tmp_path)).num_ids == tokenizer.num_ids
    refuses(r"<\|im_end\|>.*save_pretrained", load_tokenizer, str(tmp_path))


def test_what_is_no_tokenizer_json_is_refused(tmp_path):
    """The older form is two files in a directory."""
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    refuses("vocab.json.*merges.txt.*GPT2TokenizerFast", load_tokenizer, str(tmp_path))
    refuses("bpe:300", load_tokenizer, "bpe:300")
    for name in f"{tmp_path}/vocab.json", "some/model", "r50k_base":
        refuses(rf"{name}.*AutoTokenizer\S*save_pretrained.*--tokenizer", load_tokenizer, name)


def test_roles_are_no_conditions():
    tokenizer = with_markers(load_tokenizer("bytes"))
    assert tokenizer.marker_ids == ROLES and with_markers(tokenizer) is tokenizer
    for name in "endoftext", "response", "none":
        refuses(rf"<\|{name}\|>", prompt_ids, tokenizer, "a", f"<|{name}|>")
    assert prompt_ids(tokenizer, "a", MASK).tolist() == [START, 257, 97, RESPONSE]
    assert prompt_ids(tokenizer, "a", "<b> ").tolist() == [START, *b"<b> a", RESPONSE]


@pytest.mark.parametrize("name, text, before", [
    ("bytes", "the [MASK]", "the "), ("bpe", "the [MASK]", "the"), ("bpe", "the  [MASK]", "the "),
    ("bpe", "a\t[MASK]", "a\t"), ("bpe", "a\n[MASK]", "a\n")])
def test_a_mask_takes_one_blank_only_where_a_token_would(name, text, before):
    tokenizer = train_bpe(TEXTS, 300) if name == "bpe" else load_tokenizer(name)
    ids = [*tokenizer.encode(before).tolist(), tokenizer.mask]
    assert tokenizer.encode_masked(f"{text} b") == [*ids, *tokenizer.encode(" b").tolist()]


# ------------------------------------------------------------------------------ is it the same tokenizer?


def test_a_tokenizer_that_has_changed_under_its_name_is_refused(tmp_path, corpus, monkeypatch):
    """By prepare and by what opens the data. One that is gone is not needed."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.json"
    path.write_text(train_bpe(TEXTS, 300).to_json())

    def prepared():
        return pipeline.prepare(f"text:{corpus}", tmp_path / "out", "own.json")

    prepared()
    prepared()
    path.write_text(train_bpe(OTHER_TEXTS, 300).to_json())
    refuses("own.json", prepared)
    refuses("out.*own.json", data.Dataset, [tmp_path / "out"], 32, "own.json")
    path.unlink()
    prepared()


def test_data_are_opened_with_the_tokenizer_that_made_them(tmp_path, pairs):
    """By its ids: the name and the bytes of its file don't matter, nor that pairs add a marker."""
    theirs = tmp_path / "theirs.json"
    theirs.write_text(load_tokenizer("bytes").to_json() + " ")
    for name in None, "bytes", str(theirs):
        dataset = data.Dataset([pairs], 128, name)
        assert dataset.marker_ids == ROLES and dataset.fingerprint == data.Dataset([pairs], 128).fingerprint
    bpe = prepare(write(tmp_path / "x.jsonl", samples(100)), tmp_path / "bpe", "bpe:300")
    assert data.Dataset([bpe], 128, "bpe:300").tokenizer.name == "bpe:300"
    for name in "bytes", str(theirs), "bpe:301":
        refuses(f"bpe:300.*{name}", data.Dataset, [bpe], 128, name)
    refuses(f"{bpe}.*{pairs}", data.Dataset, [pairs, bpe], 128)


def test_the_ids_of_weights_and_of_data_are_compared(tmp_path, monkeypatch):
    """A tokenizer.json that another program has written again fits. One that cannot be read is warned of."""
    from tokenizers import Tokenizer as Package
    monkeypatch.setattr("weights.init_from.on_rank0", run_here)
    ours = train_bpe(TEXTS, 300)
    file = export(gpt2(vocab_size=ours.vocab_size, padded_vocab=320), ours, tmp_path) / "tokenizer.json"
    source, text = f"hf:{tmp_path}", file.read_text()
    swapped, with_gap = json.loads(text), json.loads(text)
    words = swapped["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    with_gap["model"]["vocab"]["new"] = 999

    def warnings(data_have, **changes) -> int:
        said = []
        run = SimpleNamespace(dataset=SimpleNamespace(tokenizer=data_have), say=said.append)
        assert_ids(weights_of(GPT2, source) | changes, run, data_have.vocab_size)
        return len(said)

    for written in text, Package.from_str(text).to_str():
        file.write_text(written)
        assert warnings(ours) == warnings(with_markers(ours)) == 0
        for other in load_tokenizer("bytes"), train_bpe(OTHER_TEXTS, 300):
            refuses(f"{source}.*{other.name}", warnings, other)
    # beside a checkpoint that records another
    refuses(f"{source}.*tokenizer.json", functools.partial(warnings, tokenizer="bpe:300 (0)"), ours)
    file.write_text(json.dumps(swapped))
    refuses(f"{source}.*bpe:300", warnings, ours)
    # ids that the weights don't know may mean anything
    assert warnings(ours, model_config={"vocab_size": ours.vocab["a"]}) == 0
    file.write_text(json.dumps(with_gap))
    assert warnings(ours) == 1
    file.unlink()
    assert warnings(ours) == 1


@pytest.mark.full
def test_weights_with_the_tokenizer_of_gpt2_take_that_of_tiktoken(tmp_path, monkeypatch):
    """Or their file if tiktoken has no network."""
    allow_gpt2(monkeypatch)
    monkeypatch.setattr("weights.init_from.on_rank0", run_here)
    export(gpt2(vocab_size=50257, padded_vocab=50304), load_tokenizer("gpt2"), tmp_path)
    source, file = f"hf:{tmp_path}", tmp_path / "tokenizer.json"
    assert weights_of(GPT2, source)["tokenizer_file"] == "gpt2"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # where it was loaded before
    assert weights_of(GPT2, source)["tokenizer_file"] == str(file)
