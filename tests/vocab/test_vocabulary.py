"""The end of text of a tokenizer, the bytes that its tokens spell, and where a run has its tokenizer."""

import functools
import math
import shutil

import pytest
from runs import Trainer, evaluations_of
from shard_files import prepared, write_texts
from tokenizer_files import byte_level, marking, word_level

import data
from cli.errors import UserError
from prepare.packing import write_manifest
from vocab.tokenizer import load_tokenizer, parse_tokenizer_json, with_markers
from vocab.vocabulary import tokenizer_id
from weights.use import tokenizer_of

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import models, pre_tokenizers, processors, trainers  # noqa: E402

ENDED = ("<|endoftext|>", "</s>", "[CLS]", "[SEP]", "[MASK]", "<sep>", "<|response|>")  # with the ids 2 to 8


def ended(kind: str) -> str:
    """A tokenizer.json with several tokens that may be its end of text, and a post-processor."""
    made = tokenizers.Tokenizer.from_str(word_level(["[UNK]", "a"], ENDED))

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
def test_the_end_is_that_of_the_post_processor(kind, end):
    """The marker of a response and a token that begins a text are none. A sample of a pair starts with it."""
    tokenizer = parse_tokenizer_json(kind, ended(kind))
    assert tokenizer.eot == tokenizer.marker_ids["start"] == end
    tokenizer.eot = 2  # as older data have it
    assert tokenizer.marker_ids["start"] == 2 == with_markers(tokenizer).marker_ids["start"]


def test_data_and_runs_keep_the_end_that_they_have(tmp_path):
    """Also those of before, when it was <|endoftext|>. New ones don't mix with them."""
    (tmp_path / "tokenizer.json").write_text(ended("modernbert"))
    source = write_texts(tmp_path / "a.jsonl", ["a a"] * 99)
    new, old = (prepared(source, tmp_path / name, str(tmp_path / "tokenizer.json"), val_split="hash:0.5")
                for name in ("new", "old"))
    manifest = data.read_manifest(old)
    manifest["tokenizer"]["eot"] = 2
    write_manifest(old, manifest)
    for directory, end in (new, 5), (old, 2):
        rows = data.Dataset([directory], 8)
        assert rows.tokenizer.eot == rows.marker_ids["start"] == end
    assert data.Dataset([new], 8).train.tokens[0][:4].tolist() == [5, 1, 1, 5]
    with pytest.raises(UserError, match=f"{old}.*{new}"):
        data.Dataset([new, old], 8)
    for config, end in ({"eot": 2}, 2), ({"start": 2}, 2), ({"start": -1}, 5), ({"start": 1}, 5), ({}, 5):
        assert tokenizer_of({"tokenizer": "modernbert ()", "model_config": config}, tmp_path).eot == end


def test_a_checkpoint_needs_the_tokenizer_of_its_run(tmp_path):
    """Also where only best.pt is on another machine."""
    with pytest.raises(UserError, match=f"^{tmp_path}.*tokenizer.json.*--out"):
        tokenizer_of({"tokenizer": tokenizer_id(load_tokenizer("bytes")), "model_config": {}}, tmp_path)


# ---------------------------------------------------------------------------------------------- bytes of text

TALE = "".join(f"{n} times, she said:  «it's {n * n}», and so\n\tit was.\n" for n in range(1000, 1400))


def losing(_) -> str:
    """A tokenizer.json that loses blanks."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    stages = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(stages)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator([TALE], trainers.BpeTrainer(vocab_size=400, special_tokens=["[UNK]"]))
    return made.to_str()


# one that has no token for the mark of a blank spells its three bytes
KINDS = {"losing": losing, "three for a blank": lambda _: marking("first", "\u2581"),
         "byte-level": byte_level, "roberta": byte_level, "first": marking,
         "bytes": lambda _: load_tokenizer("bytes").to_json()}
EXACT = ("byte-level", "roberta", "first", "bytes")
SIZE = len(TALE.encode()) / 4


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A function: the shards of TALE with a kind of tokenizer, and the bytes of what is held out."""
    place = tmp_path_factory.mktemp("told")
    (place / "tale.txt").write_text(TALE)

    @functools.cache  # training one again gives another
    def made(kind: str):
        path = place / f"{kind}.json"
        path.write_text(KINDS[kind](kind))
        return prepared(f"text:{place / 'tale.txt'}", place / kind, str(path), val_split="tail:0.25")

    return made


def test_the_bytes_of_tokens():
    """By the way in which a tokenizer spells blanks, bytes and continuations. A special one has none."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for words, changes, wanted in (
            (["é", "\u2581é", "<0x0A>", "<0x0a>", "\u0120a"], {}, [2, 3, 1, 6, 3]),
            (["a", "##é", "\u2581"], {}, [2, 2, 2]),
            (["\u0120a", "\u00c3\u00a9", "\u4f60"], {"decoder": level}, [2, 2, 3])):
        tokenizer = parse_tokenizer_json("x", word_level(["[UNK]", *words], ("[UNK]",), **changes))
        assert tokenizer.token_bytes[:len(words) + 1].tolist() == [0, *wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_text_of_any_tokenizer(kind, told):
    """Those of the validation set, though tokens may lose its blanks or mark its words. Where they are exact,
    not a digit changes.
    """
    rows = data.Dataset([told(kind)], 32).val[""]
    spelled = int(rows.tokenizer.token_bytes[rows.tokens[0]].sum())
    assert spelled * rows.byte_ratio == pytest.approx(SIZE, rel=5e-4)
    assert (rows.byte_ratio == 1) == (kind in EXACT) == (spelled == pytest.approx(SIZE, rel=5e-4))
    assert rows.tokenizer.exact == (kind in EXACT)  # for shards whose bytes nobody has counted


@pytest.mark.parametrize("kind, counted", [("losing", True), ("losing", False), ("first", False)])
def test_bits_per_byte_are_those_of_the_text_or_none(kind, counted, told, tmp_path):
    """None if nobody has counted the bytes."""
    shards = shutil.copytree(told(kind), tmp_path / "shards")
    if not counted:  # as before 2026-11-27
        manifest = data.read_manifest(shards)
        manifest.pop("lost", None)
        write_manifest(shards, manifest)
    gpt2 = Trainer("train_gpt2.py", max_new_tokens=1, steps=1, eval_every=1, eval_batches=0)
    done = gpt2.train(0, shards, tmp_path / "run")
    record, = evaluations_of(tmp_path / "run")
    known = counted or kind in EXACT
    assert ("bits per byte" in done.out) == ("val_bits_per_byte" in record) == known, done.out
    if known:
        bits = record["val_loss"] / math.log(2) * len(data.Dataset([shards], 32).val[""].tokens[0]) / SIZE
        assert record["val_bits_per_byte"] == pytest.approx(bits, rel=0.01)
