"""Tokenizers of other people: what is stored in them, gaps, text that would become a marker, text they lose;
blanks before a mask; and the files of weights of other people.
"""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import SHARED
from runs import Trainer, evaluations_of
from test_model_gpt2_mlm import export, tiny

import data
from cli.errors import UserError
from model import GPT2, MLM
from prepare.packing import write_manifest
from prepare.pipeline import prepare
from vocab import bpe as prepare_bpe
from vocab import tokenizer_json
from vocab.tokenizer import GPT2_DIGEST, load_tokenizer, parse_tokenizer_json, with_markers
from vocab.vocabulary import EOT, tokenizer_id
from weights.huggingface import from_hf
from weights.use import tokenizer_of


@pytest.fixture
def tokenizer():
    return load_tokenizer("bytes")


@pytest.fixture
def gpt2(monkeypatch):
    if not (SHARED / "tiktoken").exists():
        pytest.skip("the vocabulary of gpt2 is not in the cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
    return load_tokenizer("gpt2")


def word_level(vocab: dict, **changes) -> str:
    """A tokenizer.json of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    built = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return json.dumps(json.loads(built.to_str()) | changes)


def test_stored_truncation_and_padding_are_switched_off():
    vocab = {"[UNK]": 0, "a": 1, "b": 2}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
           "pad_type_id": 0, "pad_token": "[UNK]"}
    for changes in {"truncation": cut}, {"padding": pad}, {"truncation": cut, "padding": pad}:
        tokenizer = parse_tokenizer_json("stored", word_level(vocab, **changes))
        assert tokenizer.encode("a b a b a").tolist() == [1, 2, 1, 2, 1]
        exported = json.loads(tokenizer.to_json())
        assert exported["truncation"] is None and exported["padding"] is None


def test_gaps_in_the_ids_give_no_id_two_tokens():
    with pytest.raises(UserError, match="gaps.*without gaps"):
        parse_tokenizer_json("gaps", word_level({"[UNK]": 0, "a": 1, "b": 4, "c": 3, "d": 5}))
    tokenizer = with_markers(parse_tokenizer_json("dense", word_level({"[UNK]": 0, "a": 1, "b": 2})))
    ids = [tokenizer.eot, tokenizer.mask, tokenizer.marker_ids["response"]]
    assert len({0, 1, 2, *ids}) == 6


def test_a_tokenizer_that_reads_text_as_special_ids_is_refused():
    """A Unigram or WordLevel model that has a special token among its own pieces; not one that has its
    unknown token there.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), ("a", -3.0)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens(["<unk>", "</s>"])
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "[MASK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["[UNK]", "[MASK]"])
    for built, special in (unigram, "</s>"), (words, r"\[MASK\]"):
        with pytest.raises(UserError, match=f"the text {special} to a special id"):
            parse_tokenizer_json("forged", built.to_str())
    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.add_special_tokens(["[UNK]"])
    tokenizer = with_markers(parse_tokenizer_json("plain", plain.to_str()))
    assert tokenizer.encode("a </s> [UNK]").tolist() == [1, 0, 0]


def test_stored_dropout_is_switched_off():
    from tokenizers import Tokenizer, models
    stored = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.9)).to_str()
    tokenizer = parse_tokenizer_json("stored", stored)
    assert tokenizer.encode("ab" * 50).tolist() == [2] * 50


# ---------------------------------------------------------------------------------- text that has no tokens


def test_text_without_tokens_is_counted_and_refused_above_a_hundredth(tmp_path, capsys):
    """A BPE without an unknown token, which would drop its letters without a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.train_from_iterator(["hello world and more"] * 9, trainers.BpeTrainer(show_progress=False))
    bpe.save(str(tmp_path / "t.json"))

    def prepared(text: str, name: str):
        (tmp_path / f"{name}.txt").write_text(text)
        return prepare(f"text:{tmp_path / name}.txt", tmp_path / name, str(tmp_path / "t.json"))

    with pytest.raises(UserError, match=r"loses 50\.00% of the characters of this text.* gpt2 or bpe:N"):
        prepared("hello 你好你好你 " * 90, "half")
    capsys.readouterr()
    prepared("hello " * 999 + "你", "few")
    assert "WARNING" in (said := capsys.readouterr().out) and "loses 0.02% of the characters" in said
    prepared("hello world " * 99, "none")
    assert "loses" not in capsys.readouterr().out
    known = "hello world " * 120_000  # more than the beginning that is looked at first
    for _ in range(2):  # nor does a second try go on where the first ended
        with pytest.raises(UserError, match=r"loses [0-9.]+% of the characters of this text.* gpt2 or bpe:N"):
            prepared(known + "你好 " * 100_000, "later")
    capsys.readouterr()
    prepared(known + "你好 " * 200, "later few")
    assert "WARNING" in (said := capsys.readouterr().out) and "loses 0.03% of the characters" in said


def test_the_end_of_one_document_and_the_next_make_no_unknown_word(tmp_path, capsys):
    """One that has all words of each row loses none, although the rows have no white space at their ends."""
    (tmp_path / "t.json").write_text(word_level({"[UNK]": 0, "good": 1, "river": 2}))
    (tmp_path / "x.jsonl").write_text('{"text": "good river"}\n' * 99)
    prepare(f"jsonl:{tmp_path}/x.jsonl", tmp_path / "out", str(tmp_path / "t.json"))
    assert "loses" not in capsys.readouterr().out


def test_lowercasing_and_nfkc_are_no_loss(tmp_path, capsys):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    bpe = Tokenizer(models.BPE(unk_token="[UNK]"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.train_from_iterator(["office hello"] * 9, trainers.BpeTrainer(special_tokens=["[UNK]"]))
    bpe.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("HELLO o\ufb03ce " * 90)
    prepare(f"text:{tmp_path}/a.txt", tmp_path / "out", str(tmp_path / "t.json"))
    assert "loses" not in capsys.readouterr().out


def marking(kind: str, every_byte: bool = True) -> str:
    """A tokenizer.json of characters, whose normalizer or pre-tokenizer marks blanks. Without `every_byte` it
    knows ASCII only.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    words = ["<unk>", "</s>", "\u2581", "\n", *map(chr, range(33, 127))]
    words += map("<0x{:02X}>".format, range(256 * every_byte))
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=every_byte))
    made.add_special_tokens(["<unk>", "</s>"])
    mark = normalizers.Replace(" ", "\u2581")
    first = decoders.Strip(" ", 1, 0)
    unmark = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), mark])
        made.decoder = decoders.Sequence([*unmark, first])
    elif kind == "gemma":
        made.normalizer = mark
        made.decoder = decoders.Sequence(unmark)
    elif kind == "t5":
        runs = normalizers.Replace(Regex(" {2,}"), "\u2581")
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), runs])
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        made.decoder = decoders.Sequence([*unmark, *[first] * (kind != "never")])
    return made.to_str()


MARKING = ("llama", "gemma", "t5", "first", "always", "never")


@pytest.mark.parametrize("kind", MARKING)
def test_marks_of_blanks_are_no_loss_and_two_hundredths_are(kind, tmp_path, capsys):
    """As those of Llama 2, Mistral 7B and Gemma, also with the name of a special token as a condition."""
    (tmp_path / "t.json").write_text(marking(kind))
    (tmp_path / "ascii.json").write_text(marking(kind, every_byte=False))
    (tmp_path / "a.txt").write_text("an  old\tman\n and the sea " * 90)
    (tmp_path / "b.txt").write_text("an old man and the sea of glass " * 50 + "\u4f60" * 25)
    (tmp_path / "c.jsonl").write_text('{"q": "a b", "a": "c", "kind": "<unk>"}\n' * 20)
    for name in "t", "ascii":
        prepare(f"text:{tmp_path}/a.txt", tmp_path / name, str(tmp_path / f"{name}.json"))
    prepare(f"jsonl:{tmp_path}/c.jsonl", tmp_path / "pairs", str(tmp_path / "t.json"), prompt_field="q",
            response_field="a", condition_field="kind", val_split="hash:0.1")
    assert "loses" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"loses 2\.04% of the characters"):
        prepare(f"text:{tmp_path}/b.txt", tmp_path / "b", str(tmp_path / "ascii.json"))


@pytest.mark.parametrize("kind", MARKING)
def test_a_continuation_has_its_first_blank_and_whole_characters(kind, monkeypatch):
    """The decoder of some would strip the blank, and a run of bytes is text from its beginning only."""
    from weights import sampling
    tokenizer = parse_tokenizer_json(kind, marking(kind))
    ids = tokenizer.encode("the king of \u4f60\u597d\u4f60\u597d\u4f60\u597d! ").tolist()
    prompt = tokenizer.encode("the king").tolist()
    flags = SimpleNamespace(max_new_tokens=99, temperature=0, top_k=0, seed=0)
    model = SimpleNamespace(config=SimpleNamespace(response=-1, seq_len=64))
    for text in "the king", "":
        rest = torch.tensor(ids[len(prompt) if text else 0:])
        monkeypatch.setattr(sampling, "generate", lambda *_, rest=rest, **__: iter(rest[:, None]))
        parts = [*sampling.samples_of(model, tokenizer, "cpu", text, flags)[0]]
        assert text + "".join(parts) == tokenizer.decode(ids)
        assert all("\ufffd" not in part for part in parts)


# ------------------------------------------------------------------------------------ blanks before a mask


@pytest.mark.parametrize("name, lstrip", [("bytes", False), ("bpe", True)])
def test_a_mask_takes_one_blank_only_where_a_token_would(tmp_path, name, lstrip):
    trained = lstrip and prepare_bpe.train_bpe(["the cat sat on the mat"] * 30, 300)
    tokenizer = trained or load_tokenizer(name)
    export(tiny(MLM, 0, vocab_size=tokenizer.num_ids), tokenizer, tmp_path)
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["lstrip"] for token in added} == {EOT: False, "[MASK]": lstrip}
    special = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert special["mask_token"]["lstrip"] is lstrip


@pytest.mark.parametrize("name, text, before", [
    ("bytes", "the [MASK]", "the "), ("bpe", "the [MASK]", "the"), ("bpe", "the  [MASK]", "the "),
    ("bytes", "a\t[MASK]", "a\t"), ("bpe", "a\t[MASK]", "a\t"), ("bpe", "a\n[MASK]", "a\n")])
def test_fill_asks_about_the_position_of_the_mask(name, text, before):
    from weights.sampling import fill_masks
    bpe = prepare_bpe.train_bpe(["the cat sat on the mat"] * 30, 300)
    tokenizer = bpe if name == "bpe" else load_tokenizer("bytes")
    seen = []

    class Spy(MLM):
        def forward(self, idx, *rest):
            seen.append(idx[0].tolist())
            return super().forward(idx, *rest)

    config = MLM.Config(vocab_size=tokenizer.num_ids, padded_vocab=320, seq_len=32, n_layer=1, n_head=2,
                        d_model=16, ff=16, eot=tokenizer.eot)
    list(fill_masks(Spy(config), tokenizer, text))
    assert seen == [[tokenizer.eot, *tokenizer.encode(before).tolist(), tokenizer.mask]]


# ----------------------------------------------------------------------------------- other people's files


@pytest.mark.full
def test_data_of_another_tokenizer_than_that_of_the_weights_are_refused(tmp_path, shards, corpus):
    """Where it is not known they are warned of. One that lies there but is refused counts as not known."""
    bpe = prepare_bpe.train_bpe([corpus.read_text()[:20000]], 300)
    export(tiny(GPT2, 0, vocab_size=300, seq_len=32), bpe, tmp_path / "hf")
    other = prepare(f"text:{corpus}", tmp_path / "other", str(tmp_path / "hf" / "tokenizer.json"))
    trainer = Trainer("train_gpt2.py", steps=1, d_model=None, n_layer=None, n_head=None)
    warning = "WARNING: hf:.* only if the ids mean the same"
    same = trainer.train(0, other, tmp_path / "same", init_from=f"hf:{tmp_path / 'hf'}")
    foreign = trainer.train(0, shards, tmp_path / "foreign", init_from=f"hf:{tmp_path / 'hf'}")
    assert foreign.code == 2 and "was trained with the tokenizer" in foreign.out, foreign.out
    file = tmp_path / "hf" / "tokenizer.json"
    file.write_text(word_level({"[UNK]": 0, "a": 1, "b": 4, "c": 3, "d": 5}))  # has gaps
    refused = trainer.train(0, other, tmp_path / "refused", init_from=f"hf:{tmp_path / 'hf'}")
    file.unlink()
    unknown = trainer.train(0, other, tmp_path / "unknown", init_from=f"hf:{tmp_path / 'hf'}")
    for done, warned in ((same, False), (refused, True), (unknown, True)):
        assert done.code == 0 and bool(re.search(warning, done.out)) == warned, done.out


def as_on_the_hub(gpt2, **changes) -> dict:
    """GPT-2's tokenizer.json as transformers writes it."""
    own = json.loads(gpt2.to_json())["model"]
    end = {"id": 50256, "content": EOT, "special": True, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": True}
    stage = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
             "fuse_unk": False, "vocab": own["vocab"] | {EOT: 50256},
             "merges": [" ".join(pair) for pair in own["merges"]]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": stage, "post_processor": None, "decoder": stage, "model": words | changes}


@pytest.mark.full
def test_gpt2_from_the_hub_is_that_of_tiktoken(gpt2, tmp_path, corpus):
    """Shards of one load with the other. What differs from it in anything is not taken for it."""
    hub = as_on_the_hub(gpt2)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "tokenizer.json").write_text(json.dumps(hub))
    tokenizer = load_tokenizer(str(tmp_path / "hub"))
    assert tokenizer.to_json() == gpt2.to_json() and tokenizer_id(tokenizer).endswith(GPT2_DIGEST)
    shards = prepare(f"text:{corpus}", tmp_path / "shards", str(tmp_path / "hub"))
    assert data.Dataset([shards], 32, "gpt2").tokenizer.to_json() == gpt2.to_json()
    one, *others = hub["model"]["merges"]
    for changes in {"dropout": 0.1}, {"merges": [*others, one]}, {"merges": others}:
        parsed = parse_tokenizer_json("odd", json.dumps(as_on_the_hub(gpt2, **changes)))
        assert isinstance(parsed, tokenizer_json.HuggingFaceTokenizer), changes
    for key, odd in {"normalizer": {"type": "Lowercase"},
                     "pre_tokenizer": hub["pre_tokenizer"] | {"add_prefix_space": True}}.items():
        parsed = parse_tokenizer_json("odd", json.dumps(hub | {key: odd}))
        assert isinstance(parsed, tokenizer_json.HuggingFaceTokenizer), key


@pytest.mark.parametrize("kind", ["spaces", "no alphabet", "own"])
def test_other_byte_level_tokenizers_are_run_by_the_package(kind, corpus):
    """With added tokens that are ordinary text, without all bytes, or one's own: as tokenizers has them."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    made = ByteLevelBPETokenizer()
    made.train_from_iterator([corpus.read_text(encoding="ascii", errors="ignore")], vocab_size=400,
                             special_tokens=[EOT], show_progress=False)
    if kind == "spaces":
        made.add_tokens(["    ", "        "])
    spec = json.loads(made.to_str())
    if kind == "no alphabet":
        spec["model"]["vocab"] = {word: i for word, i in spec["model"]["vocab"].items() if word != "\u00c3"}
        free = set(range(400)) - {*spec["model"]["vocab"].values()}
        spec["model"]["vocab"]["unused"] = free.pop()
    found = parse_tokenizer_json(kind, json.dumps(spec))
    package = Tokenizer.from_str(json.dumps(spec))
    assert isinstance(found, tokenizer_json.HuggingFaceTokenizer)
    for text in "x        y", "    def f():", "caf\u00e9":
        assert found.encode(text).tolist() == package.encode(text, add_special_tokens=False).ids


def test_the_older_form_is_refused_with_a_way_to_convert_it(tmp_path):
    """vocab.json and merges.txt in a directory; one of them as a file is no tokenizer.json."""
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    for name, words in ((tmp_path, "vocab.json and merges.txt, .*save_pretrained"),
                        (tmp_path / "vocab.json", "is not a Hugging Face tokenizer.json")):
        with pytest.raises(UserError, match=words):
            load_tokenizer(str(name))


@pytest.mark.full
def test_without_a_network_the_file_beside_the_weights_will_do(gpt2, tmp_path, corpus, monkeypatch):
    export(tiny(GPT2, 0, vocab_size=50257, padded_vocab=50304, seq_len=32), gpt2, tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # which has loaded it before
    trainer = Trainer("train_gpt2.py", steps=1, d_model=None, n_layer=None, n_head=None)
    done = trainer.train(0, f"text:{corpus}", None, init_from=f"hf:{tmp_path / 'hf'}")
    assert done.code == 0 and "mean the same" not in done.out, done.out


def test_a_tokenizer_that_has_changed_under_its_name_is_refused(tmp_path, shards, corpus, monkeypatch):
    """By prepare and by a trainer; one that is gone is not needed."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.json"
    path.write_text(prepare_bpe.train_bpe([corpus.read_text()[:20000]], 300).to_json())
    for _ in range(2):
        prepare(f"text:{corpus}", tmp_path / "out", "own.json")
    path.write_text(prepare_bpe.train_bpe([corpus.read_text()[20000:40000]], 300).to_json())
    with pytest.raises(UserError, match="with the tokenizer own.json, not with own.json as it is now"):
        prepare(f"text:{corpus}", tmp_path / "out", "own.json")
    trainer = Trainer("train_gpt2.py", steps=1)
    done = trainer.train(0, tmp_path / "out", tmp_path / "run", tokenizer="own.json")
    assert done.code == 2 and "not with own.json as it is now" in done.out, done.out
    path.unlink()
    prepare(f"text:{corpus}", tmp_path / "out", "own.json")


@pytest.mark.full
def test_weights_with_gpt2s_files_take_the_name_gpt2(gpt2, tmp_path, corpus, monkeypatch):
    """And so README's directories."""
    export(tiny(GPT2, 0, vocab_size=50257, padded_vocab=50304, seq_len=32), gpt2, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(as_on_the_hub(gpt2)))
    monkeypatch.chdir(tmp_path)
    trainer = Trainer("train_gpt2.py", steps=1, d_model=None, n_layer=None, n_head=None)
    done = trainer.train(0, f"text:{corpus}", None, init_from=f"hf:{tmp_path / 'hf'}")
    assert done.code == 0 and "-gpt2 is ready" in done.out and "mean the same" not in done.out, done.out


def test_the_index_decides_which_files_are_read(tokenizer, tmp_path):
    """Shards left over from another saving lie beside those of the index."""
    import safetensors.torch
    ours = tiny(GPT2, 0)
    file = export(ours, tokenizer, tmp_path) / "model.safetensors"
    file = file.rename(tmp_path / "model-00001-of-00001.safetensors")
    tensors = safetensors.torch.load_file(file)
    left = {name: t + 1 for name, t in tensors.items()}
    safetensors.torch.save_file(left, tmp_path / "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))
    back = from_hf(GPT2, tmp_path)
    assert torch.equal(back.transformer["blocks"][0].qkv.weight, ours.transformer["blocks"][0].qkv.weight)
    for content in "{", "[]", "{}", '{"weight_map": 1}':
        index.write_text(content)
        with pytest.raises(UserError, match="no readable config.json with"):
            from_hf(GPT2, tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "missing.safetensors")}))
    with pytest.raises(UserError, match="missing.safetensors cannot be read"):
        from_hf(GPT2, tmp_path)
    (tmp_path / "inside").mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).rename(tmp_path / "inside" / name)
    outside = dict.fromkeys(tensors, f"../{file.name}")
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(UserError, match=f"inside/{file.name} cannot be read"):  # no file outside is
        from_hf(GPT2, tmp_path / "inside")


def test_a_second_file_without_an_index_is_not_read(tokenizer, tmp_path, monkeypatch):
    """As in transformers, model.safetensors counts, with an index beside it, too; and ~ is the home."""
    import safetensors.torch
    ours = tiny(GPT2, 0)
    file = export(ours, tokenizer, tmp_path / "mine") / "model.safetensors"
    left = {name: torch.zeros_like(t) for name, t in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(left, tmp_path / "mine" / "training.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        back = from_hf(GPT2, "~/mine")
        assert torch.equal(back.transformer["blocks"][0].qkv.weight, ours.transformer["blocks"][0].qkv.weight)
        index = {"weight_map": dict.fromkeys(left, "training.safetensors")}
        (tmp_path / "mine" / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_later_name_of_gelu_new_is_read(tokenizer, tmp_path):
    ours = tiny(GPT2, 0)
    path = export(ours, tokenizer, tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_function": "gelu_pytorch_tanh"}))
    assert from_hf(GPT2, tmp_path).config == ours.config


def test_weights_of_torch_save_are_named_with_the_way_to_convert_them(tokenizer, tmp_path):
    export(tiny(GPT2, 0), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin.*save_pretrained"):
        from_hf(GPT2, tmp_path)


@pytest.mark.full
def test_ids_decide_whether_data_fit_the_weights(tmp_path, shards):
    """A tokenizer.json that transformers has written again fits; one with two ids exchanged does not."""
    transformers = pytest.importorskip("transformers")
    words = load_tokenizer("bytes")
    export(tiny(GPT2, 0, vocab_size=257, seq_len=32), words, tmp_path / "hf")
    file = tmp_path / "hf" / "tokenizer.json"
    before = json.loads(file.read_text())
    transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "hf")
    assert json.loads(file.read_text()) != before
    trainer = Trainer("train_gpt2.py", steps=1, d_model=None, n_layer=None, n_head=None)
    same = trainer.train(0, shards, tmp_path / "same", init_from=f"hf:{tmp_path / 'hf'}")
    assert same.code == 0 and "mean the same" not in same.out, same.out
    vocab = before["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(before))
    other = trainer.train(0, shards, tmp_path / "other", init_from=f"hf:{tmp_path / 'hf'}")
    assert other.code == 2 and "was trained with the tokenizer" in other.out, other.out


@pytest.mark.full
def test_a_tokenizer_beside_a_checkpoint_that_is_not_its_own_is_refused(tmp_path, shards, corpus):
    """As after a copy of a checkpoint into the directory of another run."""
    trainer = Trainer("train_gpt2.py", steps=2, max_new_tokens=2)
    assert trainer.train(0, shards, tmp_path / "run").code == 0
    bpe = prepare_bpe.train_bpe([corpus.read_text()[:20000]], 300)
    (tmp_path / "run" / "tokenizer.json").write_text(bpe.to_json())
    other = prepare(f"text:{corpus}", tmp_path / "other", str(tmp_path / "run" / "tokenizer.json"))
    done = trainer.train(0, other, tmp_path / "new", init_from=tmp_path / "run")
    assert done.code == 2 and "replace the tokenizer.json next to it" in done.out, done.out


# ------------------------------------------------------------------ exports with tokenizers of other programs

TEXT = ["the cat sat on the mat, and the king speaks to my lord: to be or not to be"] * 30
CASES = ["the [MASK] of my lord", "[MASK] is here", "I am [MASK]", "to [MASK] or not to [MASK]", "[MASK]",
         "a [MASK] [MASK] b", "x[MASK]y", "The King\n[MASK] speaks", "KING [MASK]!", "tab\t[MASK] end",
         "two  [MASK] blanks"]


def foreign(kind: str) -> str:
    """A tokenizer.json as another program writes it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    made = tokenizers.Tokenizer(models.BPE())
    special = {"byte-level": ["<|endoftext|>"], "roberta": ["<s>", "</s>", "<mask>"],
               "llama": ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]}[kind]
    if kind == "llama":
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                          decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "roberta")
        made.decoder = decoders.ByteLevel()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(spec)


@pytest.mark.parametrize("kind", ["byte-level", "roberta", "llama"])
def test_fill_and_the_pipeline_see_the_same_ids(kind, tmp_path):
    """And a causal export of that tokenizer holds no id beyond its table."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "theirs.json").write_text(foreign(kind))
    ours = load_tokenizer(str(tmp_path / "theirs.json"))
    assert isinstance(ours, tokenizer_json.HuggingFaceTokenizer)
    rows = -(-ours.num_ids // 64) * 64
    export(tiny(MLM, 0, vocab_size=ours.num_ids, padded_vocab=rows, eot=ours.eot), ours, tmp_path / "mlm")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "mlm")
    for text in CASES:
        found = words(text.replace("[MASK]", words.mask_token))["input_ids"]
        assert found == [ours.eot, *ours.encode_masked(text)], text
        assert found.count(ours.mask) == text.count("[MASK]")
    export(tiny(GPT2, 0, vocab_size=ours.vocab_size, padded_vocab=rows), ours, tmp_path / "gpt2")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    ids = words(f"fill {ours.mask_token} in", return_tensors="pt")["input_ids"]
    assert int(ids.max()) < ours.vocab_size == words.vocab_size or ours.mask < ours.vocab_size
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")(ids)


# -------------------------------------------------------------------------------- the end that a model knows

ENDED = ["<|endoftext|>", "</s>", "[CLS]", "[SEP]", "[MASK]", "<sep>", "<|response|>"]  # with the ids 2 to 8


def ended(kind: str) -> str:
    """A tokenizer.json with several tokens that may be its end of text, and a post-processor."""
    from tokenizers import Tokenizer, processors
    made = Tokenizer.from_str(word_level({"[UNK]": 0, "a": 1}))
    made.add_special_tokens(ENDED)

    def template(single: str, pair: str | None = None):
        return processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(name, made.token_to_id(name)) for name in ENDED])

    bert = template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    after = {"modernbert": bert, "sequence": processors.Sequence([processors.ByteLevel(), bert]),
             "bert": processors.BertProcessing(("[SEP]", 5), ("[CLS]", 4)),
             "roberta": processors.RobertaProcessing(("</s>", 3), ("[CLS]", 4)),
             "xlnet": template("$A <sep> [CLS]"), "llama": template("[CLS] $A", "[CLS] $A [CLS] $B:1"),
             "export of pairs": template("</s> $A <|response|>", "</s> $A <|response|> $B </s>")}
    if kind in after:
        made.post_processor = after[kind]
    return made.to_str()


@pytest.mark.parametrize("kind, end", [
    ("modernbert", 5), ("sequence", 5), ("bert", 5), ("roberta", 3), ("xlnet", 7), ("llama", 2), ("none", 2),
    ("export of pairs", 2)])
def test_the_end_is_that_of_the_post_processor(kind, end, tmp_path):
    """The marker of a response and a token that begins a text are none. A sample of a pair starts with it."""
    (tmp_path / "tokenizer.json").write_text(ended(kind))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eot == tokenizer.marker_ids["start"] == end
    tokenizer.eot = 2  # as older data have it
    assert tokenizer.marker_ids["start"] == 2 == with_markers(tokenizer).marker_ids["start"]


def test_data_and_runs_keep_the_end_that_they_have(tmp_path):
    """Those of before, when it was <|endoftext|>, too; but new ones don't mix with them."""
    (tmp_path / "tokenizer.json").write_text(ended("modernbert"))
    (tmp_path / "a.jsonl").write_text('{"text": "a a"}\n' * 99)
    new, old = (prepare(f"jsonl:{tmp_path}/a.jsonl", tmp_path / name, str(tmp_path / "tokenizer.json"),
                        val_split="hash:0.5") for name in ("new", "old"))
    manifest = data.read_manifest(old)
    manifest["tokenizer"]["eot"] = 2
    write_manifest(old, manifest)
    for directory, end in (new, 5), (old, 2):
        rows = data.Dataset([directory], 8)
        assert rows.tokenizer.eot == rows.marker_ids["start"] == end
    assert data.Dataset([new], 8).train.tokens[0][:4].tolist() == [5, 1, 1, 5]
    with pytest.raises(UserError, match="different tokenizers"):
        data.Dataset([new, old], 8)
    for config, end in ({"eot": 2}, 2), ({"start": 2}, 2), ({"start": -1}, 5), ({"start": 1}, 5), ({}, 5):
        assert tokenizer_of({"tokenizer": "modernbert ()", "model_config": config}, tmp_path).eot == end


# ------------------------------------------------------------------------------------------ bits per byte


def trained(kind: str, text: str) -> str:
    """A tokenizer.json that the package `tokenizers` has trained on a text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    special = ["[UNK]", "[SEP]", "[MASK]"]
    if kind == "char-bpe":
        made = tokenizers.CharBPETokenizer()
        made.train_from_iterator([text], vocab_size=400, show_progress=False)
        return made.to_str()
    if kind == "word-level":
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=special[:1])
    elif kind == "word-piece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special)
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        if kind == "white-byte-level":
            stages = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            made.pre_tokenizer = pre_tokenizers.Sequence(stages)
            made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    made.train_from_iterator([text], trainer)
    return made.to_str()


def llama_without_blank() -> str:
    """Each blank becomes its three bytes."""
    spec = json.loads(foreign("llama"))
    words = [word for word in spec["model"]["vocab"] if "\u2581" not in word]
    spec["model"] |= {"vocab": {word: i for i, word in enumerate(words)}, "merges": []}
    return json.dumps(spec)


TALE = "".join(f"{n} times, she said:  «it's {n * n}», and so\n\tit was.\n" for n in range(1000, 1400))
INEXACT = ("char-bpe", "bpe-whitespace", "word-level", "word-piece", "white-byte-level",
           "llama-without-blank")
EXACT = ("byte-level", "roberta", "llama", "bytes")


@pytest.fixture(scope="session")
def told(tmp_path_factory):
    """A function: the shards of TALE with a kind of tokenizer, and the bytes of what is held out."""
    pytest.importorskip("tokenizers")
    place = tmp_path_factory.mktemp("told")
    (place / "tale.txt").write_text(TALE)
    size = len(TALE.encode())

    def made(kind: str):
        path = place / f"{kind}.json"
        if kind == "llama-without-blank":
            path.write_text(llama_without_blank())
        elif kind in EXACT[:3]:
            path.write_text(foreign(kind))
        elif kind in INEXACT and not path.exists():  # training one again gives another
            path.write_text(trained(kind, TALE))
        name = str(path) if path.exists() else kind
        return prepare(f"text:{place / 'tale.txt'}", place / kind, name, val_split="tail:0.25"), size / 4

    return made


@pytest.mark.parametrize("kind", INEXACT + EXACT)
def test_bytes_of_a_text_of_any_tokenizer(kind, told):
    """Those of the validation set, though tokens may lose its blanks or mark its words. Where they are exact,
    not a digit changes.
    """
    made, size = told(kind)
    rows = data.Dataset([made], 32).val[""]
    spelled = int(rows.tokenizer.token_bytes[rows.tokens[0]].sum())
    assert spelled * rows.byte_ratio == pytest.approx(size, rel=5e-4)
    assert (rows.byte_ratio == 1) == (kind in EXACT) == (spelled == pytest.approx(size, rel=5e-4))
    assert rows.tokenizer.exact == (kind in EXACT)  # of shards that were prepared before


def without_counts(made) -> None:
    """The shards as they were prepared before 2026-11-27."""
    manifest = data.read_manifest(made)
    manifest.pop("lost", None)
    write_manifest(made, manifest)


@pytest.mark.parametrize("kind, number", [("char-bpe", True), ("char-bpe", False), ("llama", False)])
def test_bits_per_byte_are_those_of_the_text_or_none(kind, number, told, tmp_path):
    """In the log and of --eval-only, unless nobody has counted the bytes."""
    made, size = told(kind)
    shutil.copytree(made, tmp_path / "shards")
    if not number:
        without_counts(tmp_path / "shards")
    gpt2 = Trainer("train_gpt2.py", max_new_tokens=1, steps=1, eval_every=1, eval_batches=0)
    done = gpt2.train(0, tmp_path / "shards", tmp_path / "run")
    again = gpt2.train(0, tmp_path / "shards", tmp_path / "run", eval_only=True)
    record, = evaluations_of(tmp_path / "run")
    number = number or kind in EXACT
    for text in done.out, again.out:
        assert bool(re.search(r"\d bits per byte", text)) == number, text
    assert ('"val_bits_per_byte"' in again.out) == number
    if number:
        tokens = len(data.Dataset([made], 32).val[""].tokens[0])
        bits = record["val_loss"] / math.log(2) * tokens / size
        assert record["val_bits_per_byte"] == pytest.approx(bits, rel=0.01)
    else:
        assert "val_bits_per_byte" not in record


def test_a_tokenizer_that_is_named_is_compared(tmp_path, corpus):
    """A file with another name and other bytes may be the same tokenizer."""
    (tmp_path / "theirs.json").write_text(foreign("roberta"))
    name = str(tmp_path / "theirs.json")
    made = prepare(f"text:{corpus}", tmp_path / "made", name, max_tokens=20_000)
    of_run = made / "tokenizer.json"
    for known in None, name, str(of_run):
        assert type(data.Dataset([made], 32, known).tokenizer) is tokenizer_json.HuggingFaceTokenizer
    fingerprint = data.Dataset([made], 32, name).fingerprint
    (tmp_path / "moved.json").write_text(foreign("roberta") + " ")
    moved = str(tmp_path / "moved.json")
    assert data.Dataset([made], 32, moved).fingerprint == fingerprint  # it is the same tokenizer
    with pytest.raises(UserError, match="was made with the tokenizer"):
        data.Dataset([made], 32, "bytes")


def test_a_checkpoint_needs_the_tokenizer_of_its_run(tmp_path):
    """Also where only best.pt is on another machine."""
    with pytest.raises(UserError, match="holds no tokenizer.json: copy it there"):
        tokenizer_of({"tokenizer": tokenizer_id(load_tokenizer("bytes")), "model_config": {}}, tmp_path)
