"""Rows of whole pairs: what is in them, what is cut or left out, how full they are, how shards resume. Also
the pairs of conversations.
"""

import contextlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pair_data import (
    MESSAGES,
    RESPONSE,
    ROLES,
    START,
    documents,
    encoded,
    prepare,
    samples,
    split_rows,
    write,
)
from shard_files import write_table
from tokenizer_files import word_level

import data
from cli.errors import UserError
from prepare import packing, sources
from prepare.packing import Packer
from prepare.pipeline import hash64
from vocab.vocabulary import HRM_TEXT_MARKERS, MASK
from weights.sampling import first_pair

EMPTY = "responses that are empty or not to be learned"


def held_out(prompt: str, fraction: float = 0.1) -> bool:
    return hash64(prompt) < fraction * 2**64


# --------------------------------------------------------------------------------------------------- the rows


def sample_of(prompt: int, response: int, end: int = -1) -> np.ndarray:
    """A sample of so many tokens up to its marker, and after it."""
    return np.array([START, *[1] * (prompt - 2), RESPONSE, *[2] * response, *[end][:end >= 0]])


@pytest.mark.parametrize("end, prompt, response, truncate, result", [
    (-1, 4, 5, False, 9), (-1, 4, 6, False, "too long responses"), (-1, 4, 6, True, 10), (-1, 9, 5, True, 10),
    (-1, 10, 5, True, "too long prompts"), (-1, 4, 0, True, EMPTY), (-1, 2, 3, True, 5),
    (7, 4, 5, False, 10), (7, 4, 6, False, "too long responses"), (7, 4, 0, False, EMPTY)])
def test_a_sample_is_kept_cut_or_dropped(end, prompt, response, truncate, result):
    """In rows of 10, of which one token is a start that ends the sample, unless there is an end token."""
    packer, sample = Packer(10, ROLES | {"end": end}, truncate, Counter()), sample_of(prompt, response, end)
    assert packer.add(sample) == []
    rows = packer.close(Packer.WINDOW)
    if isinstance(result, str):
        assert packer.counts == {result: 1} and not rows
    else:
        (row,), cut = rows, len(sample) > 9 + (end > 0)
        assert row.tolist() == [*sample[:result].tolist(), *[START] * (10 - result)]
        wanted = Counter({"samples": 1, "tokens": result, "truncated responses": cut,
                          "empty prompts": prompt == 2})
        assert packer.counts == wanted  # which takes a missing one as 0


def test_a_sample_goes_where_it_leaves_the_least_space(monkeypatch):
    monkeypatch.setattr(Packer, "WINDOW", 2)
    packer = Packer(11, ROLES, True, Counter())
    for length in (7, 5, 3, 5):  # 3 beside 7 fits exactly, 5 beside 5 too
        assert packer.add(sample_of(2, length - 2)) == []
    assert [free for free, *_ in packer.open] == [0, 0]
    closed, = packer.add(sample_of(2, 6))  # a third row would be open
    assert closed.tolist() == [*sample_of(2, 5), *sample_of(2, 1), START]
    assert len(packer.open) == 2 and [len(row) for row in packer.close(9)] == [11, 11] and not packer.open


def test_each_sample_is_there_once_and_on_the_side_of_its_prompt(tmp_path):
    rows = [row | {"q": row["q"] * (i % 7 > 0) + f"{i % 200}"} for i, row in enumerate(samples(900))]
    out = prepare(write(tmp_path / "x.jsonl", rows), tmp_path / "out", shard_tokens=20_000, workers=2)
    manifest = data.read_manifest(out)
    kept = {"train": [], "val": []}
    sizes, counts = Counter(), Counter()
    for row in rows:
        ids, split = encoded(row["q"], row["a"]), "val" if held_out(row["q"]) else "train"
        sizes[split] += len(ids)
        if ids.index(RESPONSE) < 127:
            kept[split].append(ids if len(ids) < 128 else ids[:128])
            counts["truncated responses"] += len(ids) > 127
        else:
            counts["too long prompts"] += 1
    for split, wanted in kept.items():
        assert wanted and documents(out, split) == sorted(wanted)
    assert min(counts.values()) > 5 and manifest["roles"] == ROLES and manifest["row"] == 128
    everything = kept["train"] + kept["val"]
    assert manifest["pairs"] == counts | {"samples": len(everything), "tokens": sum(map(len, everything)),
                                          "read": sizes["train"], "documents": 900}
    trained = [shard for shard in manifest["shards"] if shard["split"] == "train"]
    assert len(trained) > 2 and packing.total(manifest["shards"], "documents") == 900
    for shard in trained:  # rows, and the start token after the last
        tokens = data.open_shard(out / shard["file"])
        assert len(tokens) % 128 == 1 and tokens[-1] == START


@pytest.mark.parametrize("words, row", [(1, 64), (10, 128), (150, 1024)])
def test_the_row_follows_the_longest_pair(tmp_path, words, row):
    """So a few hundred questions fill more than a few rows. Started again, it is the same set."""
    source = write(tmp_path / "faq.jsonl", [{"q": f"{i} " + "word " * words, "a": "word " * words}
                                            for i in range(300)])
    made = prepare(source, tmp_path / "faq", row=None)
    manifest = data.read_manifest(made)
    assert manifest["row"] == manifest["settings"]["row"] == row
    assert ("truncated responses" in manifest["pairs"]) == (row == 1024)
    packing.write_manifest(made, manifest | {"complete": False})
    for _ in range(2):
        prepare(source, tmp_path / "faq", row=None)
        assert data.read_manifest(made)["complete"]


@pytest.mark.parametrize("kind, ids", [("easy", [*b"easy"]), (MASK, [257])])
def test_a_condition_is_text_or_a_special_token(tmp_path, kind, ids):
    """The first is part of the prompt that a run shows. The second would be other tokens as text."""
    source = write(tmp_path / "x.jsonl", [{"q": f"{i}", "a": "c", "kind": kind} for i in range(10, 40)])
    out = prepare(source, tmp_path / "out", condition_field="kind", val_split="hash:0.5")
    assert documents(out) == [[START, *ids, *f"{i}".encode(), RESPONSE, ord("c")] for i in range(10, 40)]
    first = bytes(split_rows(out, "val")[0][1:7].astype("uint8")).decode()
    assert first_pair(data.Dataset([out], 128)) == ((first, "c") if kind == "easy" else ("", ""))


def test_a_tokenizer_with_roles_of_its_own_is_taken_as_it_is(tmp_path):
    """As that of HRM-Text, which has an end token: a sample may fill its row."""
    name = str(tmp_path / "tokenizer.json")
    Path(name).write_text(word_level(["[UNK]", "c", *map(str, range(10, 40))], HRM_TEXT_MARKERS))
    rows = [{"q": f"{i}", "a": answer} for answer in ("c", "") for i in range(10, 40)]
    source = write(tmp_path / "x.jsonl", rows)
    out = prepare(source, tmp_path / "out", name, row=5, val_split="hash:0.5")
    manifest, roles = data.read_manifest(out), {"start": 32, "response": 33, "end": 34}
    assert manifest["roles"] == roles and manifest["pairs"][EMPTY] == 30
    row = split_rows(out, "train")[0].tolist()
    assert [row[0], *row[2:]] == [32, 33, 1, 34]
    for loss, first in ("response", 2), ("all", 0):
        wanted = [first <= t < 4 for t in range(6)]
        assert data.label_mask(np.array([[*row, 32]]), roles, loss).tolist() == [wanted]
    assert first_pair(data.Dataset([out], 5))[1] == "c"  # without the end token


# each 40 rows, 36 have a prompt that is too long, and one an empty response
LEFT_OUT = [{"q": f"{i}" + "x" * 200 * (i % 40 > 3), "a": "yes" * (i % 40 != 2)} for i in range(700)]
# conversations with three answers
TALKS = [{"messages": [{"role": role, "content": f"{n}" + f" {k}" * (k > 0)}
                       for k, role in enumerate(["user", "assistant"] * 3)]} for n in range(90)]


@pytest.mark.parametrize("rows, options", [
    (LEFT_OUT, {"row": 64, "shard_tokens": 3000, "max_samples": 560}),
    (TALKS, {"shard_tokens": 300, "max_samples": 80} | MESSAGES)],
    ids=["pairs that are left out", "conversations"])
def test_a_prepare_that_is_stopped_writes_the_same_bytes(tmp_path, monkeypatch, rows, options):
    """And counts once what it leaves out, also where that is all since the last shard."""
    source = write(tmp_path / "x.jsonl", rows)
    whole = prepare(source, tmp_path / "whole", **options)
    inside = {shard["end"][1] for shard in data.read_manifest(whole)["shards"]}
    assert len(inside) > (options.get("row") is None), "no shard ends inside a conversation"
    written, plain = itertools.count(1), packing.write_manifest

    def stop_sometimes(directory, manifest):
        plain(directory, manifest)
        if next(written) % 5 == 0:
            raise RuntimeError

    monkeypatch.setattr(packing, "write_manifest", stop_sometimes)
    for _ in range(50):
        with contextlib.suppress(RuntimeError):
            prepare(source, tmp_path / "stopped", **options)
            break
    assert next(written) > 11
    for path in whole.iterdir():
        if path.name != ".lock":
            assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes(), path.name


# ---------------------------------------------------------------------------------------------- conversations


def pairs_of(*messages, condition: str = "") -> list[tuple]:
    return [*sources.Conversation("x.jsonl, line 2,", messages, sources.Progress()).pairs(condition)]


SAID = [("system", "Be brief. "), ("user", "2+2?"), ("assistant", "4"), ("user", "And 3+3?"),
        ("assistant", "6")]
OPENAI = [{"role": role, "content": text} for role, text in SAID]
PARTS = [{"role": role, "content": [{"type": "text", "text": part} for part in (text[:1], text[1:])]}
         for role, text in SAID]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text, "role": None,
             "content": None} for role, text in SAID]  # as parquet joins both forms


@pytest.mark.parametrize("messages", [OPENAI, PARTS, SHAREGPT], ids=["openai", "parts", "sharegpt"])
def test_each_answer_is_a_pair_with_all_before_it(messages):
    answers = [("2+2?", "4"), ("2+2?\n4\nAnd 3+3?", "6")]
    assert pairs_of(*messages) == [(*pair, "Be brief. ") for pair in answers]
    # with a condition, the system message is part of the prompt
    assert pairs_of(*messages, condition="c")[0] == ("Be brief. \n2+2?", "4", "c")
    # so is one that comes later; an answer that nobody asked for is no pair
    assert pairs_of(messages[2], messages[0], *messages[1:3]) == [("4\nBe brief. \n2+2?", "4", "")]
    assert pairs_of() == pairs_of(messages[1]) == pairs_of(messages[4]) == []
    # a call of a tool has no text
    call, result = {"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "42"}
    assert pairs_of(messages[1], call, result, messages[2]) == [("2+2?", "", ""), ("2+2?\n42", "4", "")]


def test_the_marks_of_all_formats():
    """As JSON and tables have them. What is missing there says nothing, nor does a mark of a question."""
    def learned(**marks) -> bool:
        asks = OPENAI[1] | {"weight": 0, "train": False}
        (prompt, response, _), = pairs_of(asks, {"from": "gpt", "value": "b"} | marks)
        assert prompt == "2+2?" and response in ("b", "")
        return response == "b"

    no, yes = (0, "0", 0.0, "0.0", False, "False"), (1, "1", 1.0, "1.0", True, "true")
    assert len(sources.MARKS) > 8
    for name in sources.MARKS:
        learn, leave = (no, yes) if name == "masked" else (yes, no)
        assert not any(learned(**{name: value}) for value in leave), name
        assert all(learned(**{name: value}) for value in (*learn, None, float("nan"), "", [])), name
    assert not learned(weight=1, train=False) and learned(weight=1, masked=False)


@pytest.mark.parametrize("message, named", [
    ({"role": "bot", "content": "x"}, "bot"), ({"text": "x"}, "text"), (None, "None"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
    ({"role": "user", "content": {"a": 1}}, "dict"), ({"from": "human", "content": None}, "human"),
    ({"role": "assistant", "weight": 0.5}, "weight 0.5"),
    ({"from": "gpt", "value": "x", "train_detail": [{"train": False}]}, "train_detail")])
def test_messages_that_are_none_are_refused(message, named):
    with pytest.raises(UserError, match=f"^x.jsonl, line 2,.*{named}"):
        pairs_of(*OPENAI, message)


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_conversations_are_read_from_each_source(tmp_path, capsys, form):
    """All answers of one are on one side. An answer that is marked is not learned; it stays in the prompts of
    later ones.
    """
    talks = [[
        {"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "WRONG", "weight": 0},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": f"so {i}", "weight": 1, "reasoning_content": "because"},
        {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "ok"}] for i in range(60)]
    (tmp_path / "set").mkdir()
    if form == "parquet":
        source = write_table(tmp_path / "x.parquet", messages=talks)
    else:
        write(tmp_path / "set" / "x.jsonl", [{"messages": talk} for talk in talks])
        source = f"hf:{tmp_path / 'set'}"
    out = prepare(source, tmp_path / "out", **MESSAGES)
    assert "reasoning_content" in capsys.readouterr().out
    manifest = data.read_manifest(out)
    counts = manifest["pairs"]
    assert (counts[EMPTY], counts["samples"], counts["documents"]) == (60, 120, 60)
    assert packing.total(manifest["shards"], "documents") == 60
    for split in ("train", "val"):
        wanted = [encoded(*pair) for i in range(60) if held_out(f"{i}?") == (split == "val") for pair in (
            (f"{i}?\nWRONG\nagain", f"so {i}"), (f"{i}?\nWRONG\nagain\nso {i}\nthanks", "ok"))]
        assert documents(out, split) == sorted(wanted)


def test_data_without_an_answer_are_refused(tmp_path):
    messages = [OPENAI[1], OPENAI[2] | {"weight": 0}]
    source = write(tmp_path / "x.jsonl", [{"messages": messages}] * 9)
    with pytest.raises(UserError, match="x.jsonl"):
        prepare(source, tmp_path / "out", **MESSAGES)
