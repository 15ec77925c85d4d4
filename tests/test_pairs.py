"""Prompts and responses: packed rows, who sees whom, what counts, the mean over labels, answers."""

import argparse
import contextlib
import json
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, kill, place, run, start
from processes import fork
from runs import SMALL, Trainer, evaluations_of, steps_of, tensors_of

import data
from cli.errors import UserError
from model import GPT2, HRM, Block, GPT2Config, HRMConfig
from ops.attention import cpu_attention
from ops.documents import document_bounds
from prepare import packing, pipeline, sources
from vocab import vocabulary
from vocab.tokenizer import load_tokenizer, prompt_ids, with_markers
from vocab.vocabulary import EOT, HRM_TEXT_MARKERS, MASK
from weights import sampling
from weights.sampling import KVCache, first_pair, generate

START, RESPONSE, END = 256, 258, 259
ROLES = {"start": START, "response": RESPONSE, "end": -1}
T = 48


def samples(n: int, seed: int = 0, longest: int = 20) -> list[dict]:
    some = random.Random(seed)
    words = ["one", "two", "three", "yes", "no", "ñandú", "\n", "x = 1"]
    return [{"q": f"{i} " + " ".join(some.choices(words, k=some.randint(0, longest) + 40 * (i % 99 == 0))),
             "a": " ".join(some.choices(words, k=some.randint(1, longest)))} for i in range(n)]


def write(path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def prepare(source, out, **options):
    usual = {"prompt_field": "q", "response_field": "a", "row": 128, "workers": 1, "val_split": "hash:0.1"}
    return pipeline.prepare(source, out, "bytes", **usual | options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    return prepare(write(root / "some.jsonl", samples(2000)), root / "pairs")


def split_rows(out, split: str) -> list[np.ndarray]:
    dataset = data.Dataset([out], json.loads((out / "manifest.json").read_text())["row"])
    sets = [dataset.train] if split == "train" else dataset.val.values()
    return [row for shards in sets for _, x, _ in shards.grids for row in x]


def documents_of(row) -> list[list[int]]:
    """The documents of a row, without padding."""
    found = []
    for token in row.tolist():
        if token == START:
            found.append([])
        found[-1].append(token)
    return [document for document in found if len(document) > 1]


def all_documents(out) -> list[list[int]]:
    return [d for split in ("train", "val") for row in split_rows(out, split) for d in documents_of(row)]


# --------------------------------------------------------------------------------------------------- the data


def encoded(row: dict) -> list[int]:
    return [START, *row["q"].encode(), RESPONSE, *row["a"].encode()]


def test_every_sample_is_there_once_and_whole(pairs):
    found = all_documents(pairs)
    expected = [encoded(row) for row in samples(2000)]
    fitting = [ids for ids in expected if len(ids) <= 127]
    cut = [ids[:128] for ids in expected if len(ids) > 127 and ids.index(RESPONSE) < 127]
    assert len(cut) > 20 and len(fitting) + len(cut) < 2000
    assert sorted(found) == sorted(fitting + cut)
    manifest = json.loads((pairs / "manifest.json").read_text())
    assert manifest["roles"] == ROLES and manifest["row"] == 128
    assert 0.8 < manifest["pairs"].pop("read") / sum(map(len, expected)) < 1  # those for training
    assert manifest["pairs"].pop("documents") == 2000
    assert manifest["pairs"] == {
        "samples": len(found), "tokens": sum(map(len, found)), "truncated responses": len(cut),
        "too long prompts": 2000 - len(found)}
    assert all(row[0] == START for split in ("train", "val") for row in split_rows(pairs, split))


def test_rows_are_full(tmp_path):
    """Of very uneven lengths, from 4 to 440 tokens, and of pairs that are a tenth of a row."""
    some = random.Random(0)
    uneven = [{"q": f"{i}" + "x" * some.choice([1, 5, 40]), "a": "y" * some.choice([1, 9, 90, 90, 90, 400])}
              for i in range(3000)]
    for name, rows, row in (("uneven", uneven, 512), ("small", samples(2000), 1024)):
        out = prepare(write(tmp_path / f"{name}.jsonl", rows), tmp_path / name, row=row)
        count = sum(len(split_rows(out, split)) for split in ("train", "val"))
        assert json.loads((out / "manifest.json").read_text())["pairs"]["tokens"] / (row * count) >= 0.95


def test_a_condition_is_text_or_a_special_token(tmp_path):
    rows = [{"q": "b", "a": "c", "kind": "easy"}, {"q": "b", "a": "d", "kind": MASK}] * 5
    out = prepare(write(tmp_path / "c.jsonl", rows), tmp_path / "c", condition_field="kind", row=32)
    found = all_documents(out)
    assert sorted(found)[0] == [START, *b"easyb", RESPONSE, *b"c"]
    assert sorted(found)[-1] == [START, 257, *b"b", RESPONSE, *b"d"]
    source = write(tmp_path / "m.jsonl", [rows[1] | {"q": f"{i}"} for i in range(30)])
    out = prepare(source, tmp_path / "m", condition_field="kind", val_split="hash:0.5")
    marked = data.Dataset([out], 128)
    assert marked.val and first_pair(marked) == ("", "")  # as text, the condition would be other tokens


def test_long_responses_are_dropped_and_empty_ones_too(tmp_path):
    rows = [{"q": "b", "a": "c" * 40}, {"q": "b", "a": ""}, {"q": "b" * 40, "a": "c"}, {"q": "b", "a": "c"}]
    source = write(tmp_path / "d.jsonl", rows * 20)
    out = prepare(source, tmp_path / "d", row=32, long="drop", val_split="hash:0.001")
    counts = json.loads((out / "manifest.json").read_text())["pairs"]
    assert counts.pop("read") and counts.pop("documents") == 80
    assert counts == {"samples": 20, "tokens": 80, "too long responses": 20, "empty responses": 20,
                      "too long prompts": 20}


def test_pairs_with_the_same_prompt_are_on_one_side(tmp_path):
    rows = [{"q": f"{i % 100}", "a": f"{i}"} for i in range(1000)]
    out = prepare(write(tmp_path / "h.jsonl", rows), tmp_path / "h", val_split="hash:0.3")
    prompts = [{tuple(d[:d.index(RESPONSE)]) for row in split_rows(out, split) for d in documents_of(row)}
               for split in ("train", "val")]
    assert all(prompts) and not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 100


MESSAGES = {"prompt_field": "messages", "response_field": "messages"}
SAID = [("system", "Be brief. "), ("user", "2+2?"), ("assistant", "4"), ("user", "And 3+3?"),
        ("assistant", "6")]
OPENAI = [{"role": role, "content": text} for role, text in SAID]
PARTS = [{"role": role, "content": [{"type": "text", "text": part} for part in (text[:1], text[1:])]}
         for role, text in SAID]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text}
            for role, text in SAID]


@pytest.mark.parametrize("messages", [OPENAI, PARTS, SHAREGPT], ids=["openai", "parts", "sharegpt"])
@pytest.mark.parametrize("form", ["lines", "array", "parquet", "hf"])
def test_each_answer_of_a_conversation_is_a_pair_with_all_before_it(tmp_path, form, messages):
    """It has the ids of --condition and --prompt, with the earlier turns as lines."""
    rows = [{"messages": messages}] * 2
    (tmp_path / "set").mkdir()
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "x.parquet")
        source = f"parquet:{tmp_path}/set/x.parquet"
    elif form == "array":
        (tmp_path / "set" / "x.json").write_text(json.dumps(rows))
        source = f"jsonl:{tmp_path}/set/x.json"
    else:
        source = write(tmp_path / "set" / "x.jsonl", rows)
    source = f"hf:{tmp_path}/set" if form == "hf" else source
    out = prepare(source, tmp_path / "out", val_split="hash:0.001", **MESSAGES)
    tokenizer = with_markers(load_tokenizer("bytes"))
    wanted = [[*prompt_ids(tokenizer, prompt, "Be brief. ").tolist(), *answer] for prompt, answer in (
        ("2+2?", b"4"), ("2+2?\n4\nAnd 3+3?", b"6"))]
    assert wanted[1] == [START, *b"Be brief. 2+2?\n4\nAnd 3+3?", RESPONSE, *b"6"]
    assert sorted(all_documents(out)) == sorted(2 * wanted)
    assert data.read_manifest(out)["pairs"]["documents"] == 2


def conversations(n: int) -> list[list[dict]]:
    """Each with three answers."""
    return [[{"role": role, "content": f"{i}?" if k == 0 else f"{i} {k}"}
             for k, role in enumerate(["user", "assistant"] * 3)] for i in range(n)]


def test_a_conversation_is_on_one_side(tmp_path):
    """By the hash of its first prompt; each answer alone would be on another."""
    out = prepare(write(tmp_path / "x.jsonl", [{"messages": talk} for talk in conversations(300)]),
                  tmp_path / "out", val_split="hash:0.3", **MESSAGES)

    def openings(out):
        found = []
        for split in ("train", "val"):
            documents = [d for row in split_rows(out, split) for d in documents_of(row)]
            texts = [bytes(token for token in document if token < 256) for document in documents]
            found.append({text.partition(b"?")[0] for text in texts})
        return found

    train, val = openings(out)
    assert len(train) + len(val) == 300 and not train & val and 50 < len(val) < 130
    assert all((pipeline.hash64(f"{int(i)}?") < 0.3 * 2**64) == (i in val) for i in train | val)
    pairs = [{"q": "\n".join(m["content"] for m in talk[:at]), "a": talk[at]["content"]}
             for talk in conversations(300) for at in (1, 3, 5)]
    source = write(tmp_path / "y.jsonl", pairs)
    train, val = openings(prepare(source, tmp_path / "pairs", val_split="hash:0.3"))
    assert len(train & val) > 50  # the control


def test_conversations_of_one_answer_are_the_shards_of_pairs(tmp_path):
    rows = [row | {"s": f"so {n % 7} "} for n, row in enumerate(samples(300))]
    talks = [[{"role": "system", "content": row["s"]}, {"role": "user", "content": row["q"]},
              {"role": "assistant", "content": row["a"]}] for row in rows]
    pairs = prepare(write(tmp_path / "x.jsonl", rows), tmp_path / "pairs", condition_field="s")
    source = write(tmp_path / "y.jsonl", [{"messages": talk} for talk in talks])
    found = prepare(source, tmp_path / "talks", **MESSAGES)
    names = sorted(path.name for path in pairs.glob("*.bin"))
    assert len(names) == 2 and names == sorted(path.name for path in found.glob("*.bin"))
    assert all((pairs / name).read_bytes() == (found / name).read_bytes() for name in names)


@pytest.mark.parametrize("form", ["lines", "parquet", "hf"])
def test_an_answer_that_is_marked_is_not_learned(tmp_path, capsys, form):
    """It stays in the prompts of later ones, and each conversation on the side where it is without marks."""
    rows = [{"messages": [
        {"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "WRONG", "weight": 0},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": f"so {i}", "weight": 1, "reasoning_content": "because"},
        {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "ok"}]} for i in range(60)]
    rows = [row | dict.fromkeys("abcdefghi", 0) for row in rows]
    (tmp_path / "set").mkdir()
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "x.parquet")
        source = f"parquet:{tmp_path}/set/x.parquet"
    else:
        source = write(tmp_path / "set" / "x.jsonl", rows)
        source = f"hf:{tmp_path}/set" if form == "hf" else source
    out = prepare(source, tmp_path / "out", **MESSAGES)
    said = capsys.readouterr().out
    assert said.count("reasoning_content of messages") == 1 and "and 2 more" in said, said
    assert "60 empty responses, 120 samples" in said and "content of messages, a" in said, said
    for split in ("train", "val"):
        found = [d for row in split_rows(out, split) for d in documents_of(row)]
        here = [i for i in range(60) if (pipeline.hash64(f"{i}?") < 0.1 * 2**64) == (split == "val")]
        assert here and sorted(found) == sorted(
            [START, *prompt.encode(), RESPONSE, *answer.encode()] for i in here for prompt, answer in (
                (f"{i}?\nWRONG\nagain", f"so {i}"), (f"{i}?\nWRONG\nagain\nso {i}\nthanks", "ok")))
    source = write(tmp_path / "y.jsonl", [{"messages": row["messages"][:2]} for row in rows])
    with pytest.raises(UserError, match="marked as not to be learned"):
        prepare(source, tmp_path / "none", **MESSAGES)


def test_the_marks_of_all_formats():
    """As JSON and tables have them; what is missing there, and a mark of the question, says nothing."""
    def learned(**marks) -> bool:
        asks = {"role": "user", "content": "a", "weight": 0, "train": False}
        talk = sources.Conversation("x", [asks, {"from": "gpt", "value": "b"} | marks], sources.Progress())
        (prompt, response, _), = talk.pairs()
        assert prompt == "a" and response in ("b", "")
        return response == "b"

    no, yes = (0, "0", 0.0, "0.0", False, "False"), (1, "1", 1.0, "1.0", True, "true")
    nothing = (None, float("nan"), "", [])
    assert len(sources.MARKS) > 8
    for name in sources.MARKS:
        if name == "masked":
            no, yes = yes, no
        assert not any(learned(**{name: value}) for value in no), name
        assert all(learned(**{name: value}) for value in (*yes, *nothing)), name
    assert not learned(weight=1, train=False) and learned(weight=1, masked=False)


def test_what_a_conversation_lacks_is_counted(tmp_path, capsys):
    call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    user = {"role": "user", "content": "why?"}
    begun = [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "x" * 200},
             {"from": "gpt", "value": "y"}]
    talks = [[user, call, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "so"}],
             [user], [], begun]
    source = write(tmp_path / "x.jsonl", [{"messages": talk, "c": f"<{n}>"} for n, talk in enumerate(talks)])
    out = prepare(source, tmp_path / "out", val_split="hash:0.001", **MESSAGES)
    said = capsys.readouterr().out
    assert "1 empty responses, 1 samples, 1 too long prompts" in said
    assert "note: 2 documents have no text" in said
    assert sorted(all_documents(out)) == [[START, *b"why?\n42", RESPONSE, *b"so"]]
    limits = {"val_split": "hash:0.001", "condition_field": "c", "max_samples": 1}
    out = prepare(source, tmp_path / "c", **limits, **MESSAGES)
    assert all_documents(out) == [[START, *b"<0>why?\n42", RESPONSE, *b"so"]]


@pytest.mark.parametrize("message, words", [
    ({"role": "bot", "content": "x"}, "that is one of system"), ({"text": "x"}, "has the message"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "that is only text"),
    ({"role": "user", "content": {"a": 1}}, "holds a dict, not text"),
    ({"role": "user", "text": "x"}, "and a content"), ({"from": "human", "content": None}, "and a content"),
    ("x", "has the message x: it needs"), (None, "has the message None"),
    ({"role": "assistant", "content": "x", "weight": 0.5}, "with the weight 0.5: an answer"),
    ({"from": "gpt", "value": "x", "train_detail": [{"train": False}]}, "with the train_detail")])
def test_messages_that_are_none_are_refused(tmp_path, message, words):
    rows = [{"messages": OPENAI}, {"messages": [*OPENAI, message]}]
    with pytest.raises(UserError, match=f"x.jsonl, line 2, .*{words}"):
        prepare(write(tmp_path / "x.jsonl", rows), tmp_path / "out", val_split="hash:0.001", **MESSAGES)
    source = write(tmp_path / "t.jsonl", [{"messages": "a text"}])
    with pytest.raises(UserError, match="t.jsonl, line 1, has the message a text: it needs a role"):
        prepare(source, tmp_path / "t", val_split="hash:0.001", **MESSAGES)
    source = write(tmp_path / "v.jsonl", [{"messages": OPENAI}])
    for flag, words in {"val_field": "holds a list, not text", "condition_field": "holds a list"}.items():
        with pytest.raises(UserError, match=words):
            prepare(source, tmp_path / flag, **MESSAGES, **{flag: "messages"})


def test_who_speaks_first_decides_no_split(tmp_path):
    """An answer that nobody asked for is no pair, but part of what the next one follows."""
    hello = {"from": "gpt", "value": "hello", "role": None, "content": None}  # as parquet joins both forms
    talks = [[hello, {"from": "human", "value": f"what is {n}"}, {"from": "gpt", "value": f"it is {n}"}]
             for n in range(300)]
    source = write(tmp_path / "x.jsonl", [{"messages": talk} for talk in talks])
    out = prepare(source, tmp_path / "out", **MESSAGES)
    train, val = (len(split_rows(out, split)) for split in ("train", "val"))
    assert 0 < val < train / 3
    documents = all_documents(out)
    assert len(documents) == 300 and [START, *b"hello\nwhat is 7", RESPONSE, *b"it is 7"] in documents


def test_a_prepare_that_is_stopped_inside_a_conversation_resumes(tmp_path, monkeypatch):
    source = write(tmp_path / "x.jsonl", [{"messages": talk} for talk in conversations(90)])
    limits = {"shard_tokens": 300, "max_samples": 80} | MESSAGES
    whole = prepare(source, tmp_path / "whole", **limits)
    ends = {shard["end"][1] for shard in data.read_manifest(whole)["shards"]}
    assert len(ends) > 1, "no shard ends inside a conversation"
    written, plain = [], packing.write_manifest

    def stop_sometimes(directory, manifest):
        plain(directory, manifest)
        written.append(1)
        if len(written) % 4 == 0:
            raise RuntimeError("stopped here")

    monkeypatch.setattr(packing, "write_manifest", stop_sometimes)
    for _ in range(200):
        with contextlib.suppress(RuntimeError):
            prepare(source, tmp_path / "stopped", **limits)
            break
    assert len(written) > 8
    for path in whole.iterdir():
        if path.name != ".lock":
            assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("script, ranks", [
    ("train_gpt2.py", 0), *[pytest.param(f"train_{name}.py", 2, marks=pytest.mark.full)
                            for name in ("gpt2", "hrm", "mlm")]])
def test_runs_on_conversations_and_on_tables(tmp_path, monkeypatch, script, ranks):
    """The loss falls, and a model of conversations is asked as the guide says."""
    monkeypatch.chdir(tmp_path)
    out = prepare(write(tmp_path / "x.jsonl", [{"messages": talk} for talk in conversations(300)]),
                  tmp_path / "out", **MESSAGES)
    table = "".join(f'"{i}, one, ""two""",{i}\n' for i in range(300))
    (tmp_path / "rows.csv").write_text(f"text,n\n{table}")
    flags = {"window": 16} if script == "train_mlm.py" else {"max_new_tokens": 3}
    trainer = Trainer(script, steps=8, save_every=8, eval_every=8, **flags)
    train = trainer.fork if ranks else trainer.train
    runs = {"talks": (out, {"seq_len": 128}), "rows": ("csv:rows.csv", {"tokenizer": "bytes"})}
    for name, (source, usual) in runs.items():
        done = train(ranks, source, tmp_path / name, **usual)
        assert done.code == 0, done.out
        losses = [record["loss"] for record in steps_of(tmp_path / name)]
        assert len(losses) == 8 and losses[-1] < losses[0] and evaluations_of(tmp_path / name)
    if script != "train_mlm.py":
        asked = "--condition", "Be brief. ", "--prompt", "1?\n2\n3?", "--max-new-tokens", "3"
        used = trainer.here("--out", tmp_path / "talks", *asked)
        assert used.code == 0 and used.out.startswith("1?\n2\n3?\n"), used.out


def own_roles(tmp_path):
    """A tokenizer that has, like that of HRM-Text, ids of its own for start, response and end."""
    spec = json.loads(load_tokenizer("bytes").to_json())
    for i, name in enumerate((*HRM_TEXT_MARKERS, "<|quick|>"), 258):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": i, "content": name})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    return str(tmp_path / "tokenizer.json")


def test_a_tokenizer_with_roles_of_its_own_is_taken_as_it_is(tmp_path):
    name = own_roles(tmp_path)
    rows = [{"q": "b", "a": answer, "kind": "<|quick|>"} for answer in ("c", "") for _ in range(9)]
    source = write(tmp_path / "o.jsonl", rows)
    out = pipeline.prepare(source, tmp_path / "o", name, prompt_field="q", response_field="a",
                           condition_field="kind", row=6, workers=1, val_split="hash:0.0001")
    assert json.loads((out / "tokenizer.json").read_text())["added_tokens"][-1]["content"] == "<|quick|>"
    assert json.loads((out / "manifest.json").read_text())["pairs"]["empty responses"] == 9
    row = split_rows(out, "train")[0].tolist()  # with an end token, a sample may fill its row
    assert row == [258, 261, ord("b"), 259, ord("c"), 260]
    roles = {"start": 258, "response": 259, "end": 260}
    assert data.label_mask(np.array([[*row, 258]]), roles, "response").tolist() == [
        [False] * 3 + [True] * 2 + [False] * 2]
    source = write(tmp_path / "n.jsonl", [{"q": f"{i}", "a": "c"} for i in range(30)])
    plain = pipeline.prepare(source, tmp_path / "n", name, prompt_field="q", response_field="a", row=6,
                             workers=1, val_split="hash:0.5")
    prompt, response = first_pair(data.Dataset([plain], 6))
    assert prompt.isdigit() and response == "c"  # without the end token


def test_any_number_of_workers_and_two_kills_give_the_same_bytes(tmp_path):
    source = write(tmp_path / "some.jsonl", samples(3000, longest=40))
    whole = prepare(source, tmp_path / "whole", shard_tokens=30_000, max_tokens=200_000)
    names = sorted(p.name for p in whole.glob("*.bin"))
    assert len(names) > 4
    command = [ROOT / "data.py", "prepare", "--dataset", source, "--out", tmp_path / "killed", *(
        "--tokenizer bytes --prompt-field q --response-field a --row 128 --val-split hash:0.1 "
        "--shard-tokens 30000 --max-tokens 200k").split()]
    for shards, workers in ((1, 1), (3, 2), (None, 2)):
        process = start([sys.executable, *command, "--workers", workers])
        while shards and len([*(tmp_path / "killed").glob("train*.bin")]) < shards and process.poll() is None:
            time.sleep(0.002)
        if shards and process.poll() is None:
            kill(process)
        else:
            assert finish(process).code == 0
    for name in [*names, "manifest.json", "tokenizer.json"]:
        assert (whole / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_a_directory_that_is_named_twice_is_read_twice_in_each_epoch(pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(300, seed=5)), tmp_path / "other")
    one, two = (data.Dataset([directory], 128).train for directory in (pairs, other))
    both = data.Dataset([pairs, other, other], 128)
    assert both.train.rows == one.rows + 2 * two.rows
    rows = np.sort(data.shuffled(np.arange(both.train.rows), both.train.rows, 3))
    x, _ = data.read_rows(both.train, rows)
    expected = [row.tobytes() for shards in (one, two, two) for _, grid, _ in shards.grids for row in grid]
    assert sorted(row.tobytes() for row in x) == sorted(expected)
    assert both.name == "pairs+other+other"
    prints = [data.Dataset(directories, 128).fingerprint
              for directories in ([pairs], [pairs, other], [pairs, other, other], [other, pairs])]
    assert len({*prints, both.fingerprint}) == 4 and both.fingerprint == prints[2]


def test_several_directories_are_the_same_on_any_number_of_ranks(pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(300, seed=5)), tmp_path / "other")
    shards = data.Dataset([pairs, other, other], 128).train
    seen = []
    for ranks in (1, 2, 4):
        loaders = [data.Loader(shards, 8 // ranks, place(rank, ranks), 0, 16) for rank in range(ranks)]
        steps = [torch.cat([loader.step(1)[1][0][0] for loader in loaders]) for _ in range(5)]
        seen.append([sorted(map(tuple, step.tolist())) for step in steps])
        for loader in loaders:
            loader.close()
    assert seen[0] == seen[1] == seen[2]


def test_each_of_several_directories_is_evaluated_once_and_rows_are_masked_anew(pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(2000, seed=5)), tmp_path / "other")
    both = data.Dataset([pairs, other, other], 128)
    for directory in (pairs, other):
        alone = data.Dataset([directory], 128).val[""]
        assert both.val[directory.name].rows == alone.rows
    masker = data.Masker(both.tokenizer, 128, 0.3, 0)
    twice, masks = data.Dataset([other, other], 128).train, {}
    loader, plain = (data.Loader(twice, 8, place(0, 1), 0, 0, some) for some in (masker, None))
    for _ in range(2 * twice.rows // 8):
        (_, [(_, positions, _)]), (_, [(x, _)]) = loader.step(1), plain.step(1)
        for row, chosen in zip(x, positions):
            masks.setdefault(row.numpy().tobytes(), []).append(tuple(chosen.tolist()))
    loader.close(), plain.close()
    often = [chosen for chosen in masks.values() if len(chosen) > 2]
    assert often and all(len(set(chosen)) == len(chosen) for chosen in often)


@pytest.mark.parametrize("interruptions", [
    *(pytest.param(number, marks=pytest.mark.full) for number in (1, 3, 5)), 7])
def test_a_prepare_that_is_stopped_counts_what_it_leaves_out_once(tmp_path, monkeypatch, interruptions):
    """Also where all that was read since the last shard was left out."""
    rows = [{"q": f"{i}" + "x" * 200 * (i % 40 > 3), "a": "yes" * (i % 40 != 2)} for i in range(4000)]
    source = write(tmp_path / "l.jsonl", rows)
    limits = {"row": 64, "shard_tokens": 3000, "max_samples": 3500}
    whole = prepare(source, tmp_path / "whole", **limits)
    written, plain = [], packing.write_manifest

    def stop_sometimes(directory, manifest):
        plain(directory, manifest)
        written.append(1)
        if len(written) % (2 * interruptions) == 0:
            raise RuntimeError("stopped here")

    monkeypatch.setattr(packing, "write_manifest", stop_sometimes)
    for _ in range(200):
        try:
            prepare(source, tmp_path / "stopped", **limits)
            break
        except RuntimeError:
            assert len(written) > 1
    assert len(written) > 2 * interruptions
    for path in whole.iterdir():
        if path.name != ".lock":
            assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes(), path.name


def test_roles_are_no_conditions():
    tokenizer = with_markers(load_tokenizer("bytes"))
    for name in (EOT, vocabulary.RESPONSE):
        with pytest.raises(UserError, match="has no condition"):
            prompt_ids(tokenizer, "a", name)
    assert prompt_ids(tokenizer, "a", MASK).tolist() == [START, 257, 97, RESPONSE]


def test_shards_of_pairs_take_the_tokenizer_json_that_they_came_from(pairs, tmp_path):
    (tmp_path / "tokenizer.json").write_text(load_tokenizer("bytes").to_json())
    assert data.Dataset([pairs], 128, str(tmp_path / "tokenizer.json")).marker_ids == ROLES
    source = write(tmp_path / "o.jsonl", samples(100))
    other = pipeline.prepare(source, tmp_path / "o", "bpe:300", prompt_field="q", response_field="a",
                             workers=1)
    with pytest.raises(UserError, match="made with the tokenizer bpe:300"):
        data.Dataset([other], 128, str(tmp_path / "tokenizer.json"))


# -------------------------------------------------------------------------------------------------- the model


def gpt2(**changes) -> GPT2:
    torch.manual_seed(1)
    model = GPT2(GPT2Config(**{"vocab_size": 262, "padded_vocab": 320, "seq_len": T, "n_layer": 2,
                               "n_head": 2, "d_model": 32, **ROLES} | changes))
    for p in model.parameters():  # also what starts at zero
        torch.nn.init.normal_(p, std=0.2) if p.ndim > 1 else None
    return model.eval()


def hrm(**changes) -> HRM:
    torch.manual_seed(1)
    return HRM(HRMConfig(**{"vocab_size": 262, "padded_vocab": 320, "seq_len": T, "n_layer": 1, "n_head": 2,
                            "d_model": 32, "ff": 48, **ROLES} | changes)).eval()


def whole_cycles(**changes) -> HRM:
    return hrm(**{"h_cycles": 5, "least_cycles": 1, "l_cycles": 1, "inject_input": True,
                  "init": "published"} | changes)


MODELS = {"gpt2": gpt2, "modern": lambda **changes: gpt2(modern=True, **changes), "hrm": hrm,
          "halt": lambda **changes: hrm(halt=True, **changes), "cycles": whole_cycles}
each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def packed(batch: int, seed: int = 0) -> torch.Tensor:
    """Rows of samples of random lengths and padding, some of them cut at the end."""
    some, rows = random.Random(seed), []
    for _ in range(batch):
        row = []
        while len(row) < T and some.random() < 0.9:
            prompt, response = ([some.randrange(256) for _ in range(some.randint(low, 9))] for low in (0, 1))
            row += [START, *prompt, RESPONSE, *response]
        row = row[:T] + [START] * (T - len(row))
        rows.append(row)
    return torch.tensor(rows)


def brute_force(row: list[int], attention: str, loss: str, end: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """The mask (T, T) and the positions that count (T,), by the words of the definition."""
    document, of = [], -1
    for token in row:
        of += token == START
        document.append(of)
    response = {}
    for i, token in enumerate(row):
        if token == RESPONSE:
            response[document[i]] = i
    sees, counts = np.zeros((len(row), len(row)), bool), np.zeros(len(row), bool)
    for i in range(len(row)):
        last = response.get(document[i], -1)
        for j in range(len(row)):
            prompt = attention == "prefix" and i <= last and j <= last
            sees[i, j] = document[i] == document[j] and (j <= i or prompt)
        counts[i] = (last >= 0 and (loss == "all" or i >= last) and i < len(row) - 1 and row[i] != end)
    return sees, counts


@pytest.mark.parametrize("attention", ["prefix", "isolated"])
@pytest.mark.parametrize("loss", ["response", "all"])
def test_the_mask_and_what_counts_are_those_of_the_definition(attention, loss):
    model, idx = gpt2(attention=attention), packed(64)
    idx[0, 5:] = START  # a row of padding, and one that is cut inside a prompt
    idx[1] = torch.tensor([START] + [7] * (T - 1))
    sees, counts = zip(*(brute_force(row.tolist(), attention, loss) for row in idx))
    mask = model.mask(idx, None)
    assert mask[1:] == (None, 0 if attention == "isolated" else None)
    assert np.array_equal(mask.allowed[:, 0].numpy(), np.stack(sees))
    rows = idx.numpy().astype(np.uint16)
    assert np.array_equal(data.label_mask(rows, ROLES, loss), np.stack(counts))
    assert mask.allowed.any(-1).all()  # no row of the mask is empty
    assert 0 < np.stack(counts).sum() < idx.numel()


@torch.no_grad()
@each_model
@pytest.mark.parametrize("dtype, plain", [(torch.float32, False), (torch.bfloat16, True)])
def test_packed_samples_are_computed_as_if_alone(build, dtype, plain):
    model, idx = build(), packed(4)
    model.compute_dtype = dtype
    for block in (m for m in model.modules() if isinstance(m, Block)):
        block.cpu_attention = cpu_attention if plain else None
    logits, largest = model(idx).float(), model(idx).float().abs().max()
    compared = 0
    for row, found in zip(idx, logits):
        number = document_bounds(row[None], START, RESPONSE)[0][0]
        for document in number.unique():
            here = number == document
            alone = model(row[here][None]).float()[0]
            if here.sum() > 1:
                bound = 1e-5 if dtype == torch.float32 else 0.05
                assert (alone - found[here]).abs().max() <= bound * largest
                compared += 1
    assert compared > 4


@torch.no_grad()
@pytest.mark.parametrize("build", [gpt2, hrm])
@pytest.mark.parametrize("attention", ["prefix", "causal"])
def test_who_can_see_what(build, attention):
    """A response changes nothing before it; the end of a prompt changes its beginning, if it is a prefix."""
    model = build(attention=attention)
    idx = torch.tensor([[START, 1, 2, 3, RESPONSE, 4, 5, START, 6, RESPONSE, 7] + [START] * (T - 11)])
    changed, logits = idx.clone(), model(idx)
    changed[0, 6] = 9
    assert torch.equal(model(changed)[0, :6], logits[0, :6])
    changed = idx.clone()
    changed[0, 3] = 9
    assert torch.equal(model(changed)[0, 0], logits[0, 0]) == (attention == "causal")
    assert torch.equal(model(changed)[0, 7:], logits[0, 7:]) == (attention == "prefix")


@torch.no_grad()
def test_rows_beyond_the_last_do_not_count():
    """An evaluation fills its last batch up, with targets of −1."""
    model, idx = gpt2(), packed(4)
    targets = torch.cat((idx[:, 1:], idx[:, :1]), dim=1)
    _, two = model(idx[:2], targets[:2])
    targets[2:] = -1
    _, four = model(idx, targets)
    assert four.keys() == two.keys() and all(torch.allclose(four[name], two[name]) for name in two)


@torch.no_grad()
def test_control_a_label_inside_the_next_prefix(monkeypatch):
    """If the start of the next sample were part of this one, a response would see its own label."""
    idx = torch.tensor([[START, 1, RESPONSE, 4, START, 6, RESPONSE, 7] + [START] * (T - 8)])
    model, documents = gpt2(), document_bounds
    logits = model(idx)
    idx[0, 5] = 9  # a token of the next prompt
    assert torch.equal(model(idx)[0, 3], logits[0, 3])

    def wrong(idx, *ids):  # a document ends with the start of the next
        number, first, response = documents(idx, *ids)
        return number - (idx == START).long(), first, response
    monkeypatch.setattr("model.document_bounds", wrong)
    mask = model.mask(idx, None).allowed[0, 0]
    assert mask[4, 3] and not mask[4, 5]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("build", [gpt2, hrm])
def test_flex_attention_computes_the_same(build, monkeypatch):
    from torch.nn.attention import flex_attention

    import model as models
    model, idx = build(), packed(3)
    dense = model(idx)
    monkeypatch.setattr(models, "uses_flex", lambda head_dim, device: True)
    monkeypatch.setattr(models, "compiled_once", lambda function: function)
    monkeypatch.setattr(Block, "flex_attention", None)
    assert (model(idx) - dense).abs().max() <= 1e-5 * dense.abs().max()
    assert Block.flex_attention is flex_attention.flex_attention
    monkeypatch.setattr(Block, "flex_attention", None)


@torch.no_grad()
@each_model
def test_answers_are_exact_where_teacher_forcing_says_so(build):
    """A sample counts as exact if and only if greedy decoding, with the cache, writes its response. Half of
    the responses are what the model writes, half have another last token.
    """
    model = build(attention="prefix")
    expected, rows = [], []
    for i in range(12):
        prompt = torch.tensor([[START, *(torch.arange(i % 5) + 3 * i).tolist(), RESPONSE]])
        answer = torch.cat(list(generate(model, prompt, 6, temperature=0, stop=START)))
        if answer[-1] == START:
            answer = answer[:-1]
        if len(answer) == 6 or not len(answer):
            answer = answer.new_tensor([5, 6])  # which it would not end, or not begin, there
        if i % 2 and len(answer):
            answer[-1] = (answer[-1] + 1) % 256
        rows.append(torch.cat((prompt[0], answer, torch.full((T - prompt.size(1) - len(answer),), START))))
        again = torch.cat(list(generate(model, prompt, len(answer) + 1, temperature=0)))
        expected.append(torch.equal(again, torch.cat((answer, answer.new_tensor([START])))))
    idx = torch.stack(rows)
    targets = torch.from_numpy(np.where(data.label_mask(idx.numpy(), ROLES, "response"), idx.roll(-1, 1), -1))
    _, found = model(idx, targets)
    assert (found["samples"], found["exact"]) == (len(rows), sum(expected))
    for row, y, exact in zip(idx, targets, expected):
        _, sums = model(row[None], y[None])
        assert (sums["samples"], sums["exact"]) == (1, exact)
        full, cache = model(row[None]), KVCache(model.config.seq_len)
        prompt = row.tolist().index(RESPONSE) + 1
        for end, part in enumerate([row[None, :prompt], *row[None, prompt:prompt + 4].split(1, 1)], prompt):
            if row[end - 1] != START:
                assert (model.decode(part, cache) - full[:, end - 1]).abs().max() <= 1e-4 * full.abs().max()


@pytest.mark.parametrize("stop", [True, False])
def test_while_training_all_ranks_write_equally_many_tokens(monkeypatch, stop):
    """Logits of unlike processors may end an answer elsewhere, and with zero3 a rank would be alone."""
    count, decode = [], GPT2.decode
    monkeypatch.setattr(GPT2, "decode", lambda *args: count.append(1) or decode(*args))
    monkeypatch.setattr(
        sampling, "sample_ids", lambda logits, *_: torch.tensor([65 if len(count) < 3 else START]))
    flags = argparse.Namespace(max_new_tokens=7, temperature=0, top_k=0, seed=0, condition="")
    tokenizer = with_markers(load_tokenizer("bytes"))
    text = "".join(sampling.samples_of(gpt2(), tokenizer, "cpu", "why", flags, stop)[0])
    assert text == "AA" and len(count) == (3 if stop else 7)


@torch.no_grad()
@pytest.mark.parametrize("build", [gpt2, hrm])
def test_an_answer_ends_with_the_context(build):
    """Another context would not begin with its prompt; a model of plain text goes on."""
    prompt = torch.tensor([[START, *range(T - 6), RESPONSE]])
    for response, written in ((RESPONSE, 5), (-1, 9)):
        model = build(response=response)
        model.config.response = response
        assert len(list(generate(model, prompt, 9, temperature=0))) == written


# ----------------------------------------------------------------------------------- the mean over the labels


def test_gradients_do_not_depend_on_how_the_rows_are_spread(tmp_path):
    """8 rows of unlike numbers of labels, two of them without any: 1 x 8, 1 x 4 x 2, 2 x 4, 2 x 2 x 2."""
    for ranks in (1, 2):
        done = fork(ranks, "tests/helpers/pairs_worker.py", tmp_path / f"{ranks}.pt")
        assert done.code == 0, done.out
    one, two = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    whole = one[1]
    for other in (one[2], two[1], two[2]):
        control = other.pop("mean of means")
        for name, gradient in other.items():
            assert (whole[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
        assert (control - whole["embed.weight"]).norm() > 1e-2 * control.norm()


def test_a_step_without_labels_changes_nothing(tmp_path):
    rows = [{"q": f"{i} why", "a": "so"} for i in range(200)]
    out = prepare(write(tmp_path / "s.jsonl", rows), tmp_path / "s", row=SMALL["seq_len"])
    for path in out.glob("train*.bin"):  # all padding: no labels anywhere
        tokens = data.open_shard(path)
        digest = packing.write_shard(path, [np.full(len(tokens), START, tokens.dtype)], "uint16")
        manifest = data.read_manifest(out)
        next(s for s in manifest["shards"] if s["file"] == path.name)["sha256"] = digest
        packing.write_manifest(out, manifest)
    done = Trainer("train_gpt2.py", steps=14, eval_every=100).train(0, out, tmp_path / "run")
    assert done.code == 0, done.out
    log = steps_of(tmp_path / "run")
    assert [(r["grad_norm"], r["labels"], r["skipped"]) for r in log] == [(0, 0, 0)] * 14


# A trainer whose steps from the second on have no labels
LABELS_IN_THE_FIRST_STEP = """
import runpy, sys
import data
read = data.Loader._read
def without(loader, position, micro_batches):
    parts, labels = read(loader, position, micro_batches)
    if position < 12:
        return parts, labels
    parts[-1].fill_(-1)
    return parts, 0
data.Loader._read = without
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("changes", [
    {"strategy": "ddp"}, pytest.param({"strategy": "zero3"}, marks=pytest.mark.full),
    pytest.param({"optimizer": "muon"}, marks=pytest.mark.full),
    pytest.param({"strategy": "zero1"}, marks=pytest.mark.long),
    pytest.param({"strategy": "zero2"}, marks=pytest.mark.long),
    pytest.param({"precision": "fp16"}, marks=pytest.mark.long)], ids=str)
def test_steps_without_labels_move_no_weight_and_no_moment(tmp_path, pairs, changes):
    """More of them than the ten updates in a row that may be skipped because a gradient is not finite."""
    script = tmp_path / "without.py"
    script.write_text(LABELS_IN_THE_FIRST_STEP)
    gpt2 = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=2, eval_every=100, warmup=0,
                   schedule="constant")
    for steps in (1, 14):
        flags = gpt2.flags(pairs, tmp_path / str(steps), steps=steps, **changes)
        done = fork(2, script, ROOT / "train_gpt2.py", *flags)
        assert done.code == 0, done.out
    assert all(r["labels"] == r["grad_norm"] == 0 for r in steps_of(tmp_path / "14")[1:])
    one, more = tensors_of(tmp_path / "1"), tensors_of(tmp_path / "14")
    assert one.keys() == more.keys() and all(torch.equal(one[name], t) for name, t in more.items())
    assert any(t.any() for name, t in one.items() if name.startswith("optimizer"))


# ----------------------------------------------------------------------------------------------- the trainers


@pytest.mark.long
@pytest.mark.parametrize("script", ["train_gpt2.py", "train_hrm.py"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_killed_and_resumed_bit_for_bit(script, ranks, pairs, tmp_path):
    Trainer(script, seq_len=128, max_new_tokens=5).check_killed_run(tmp_path, ranks, pairs)


@pytest.mark.full
@pytest.mark.parametrize("script, ranks", [("train_gpt2.py", 2)] + [
    pytest.param("train_hrm.py", ranks, marks=pytest.mark.long) for ranks in (1, 2, 3)])
def test_killed_and_resumed_bit_for_bit_with_several_directories(script, ranks, pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(300, seed=5)), tmp_path / "other")
    Trainer(script, seq_len=128, max_new_tokens=5).check_killed_run(
        tmp_path, ranks, f"{pairs},{other},{other}")


def test_validation_sets_with_names(tmp_path):
    """Each reports its own exact matches; all of them together are what the run reports as one."""
    rows = [{"q": f"{i}", "a": "yes" if i % 3 else str(i * i), "c": "AB"[i % 3 == 0]} for i in range(1500)]
    other = [row | {"c": "so, C", "a": "no"} for row in rows]
    sources = [prepare(write(tmp_path / f"{name}.jsonl", some), tmp_path / name, condition_field="c",
                       val_field="c") for name, some in (("one", rows), ("two", other))]
    assert sorted(path.name for path in sources[0].glob("val*")) == ["val_A_000000.bin", "val_B_000000.bin"]
    manifest = data.read_manifest(sources[0])
    held_out = sum(shard["tokens"] for shard in manifest["shards"] if shard["split"] != "train")
    assert held_out and f" {held_out:,} validation tokens" in pipeline.describe(manifest)
    assert data.Dataset([sources[1]], 128).val.keys() == {"so-C"}
    for name, answers in (("A", {"yes"}), ("B", {str(i * i) for i in range(0, 1500, 3)})):
        found = data.Dataset([sources[0]], 128).val[name]
        tokenizer = data.Dataset([sources[0]], 128).tokenizer
        texts = [tokenizer.decode(d) for _, grid, _ in found.grids for row in grid for d in documents_of(row)]
        assert texts and {text.split(vocabulary.RESPONSE)[1] for text in texts} <= answers
    trainer = Trainer("train_gpt2.py", seq_len=None, max_new_tokens=5, lr=1e-2, log_every=40)
    done = trainer.train(0, ",".join(map(str, sources)), tmp_path / "run", eval_batches=0)
    record = evaluations_of(tmp_path / "run")[-1]
    found = {key[10:]: value for key, value in record.items() if key.startswith("val_exact/")}
    assert done.code == 0 and found.keys() == {"A", "B", "so-C"}, done.out
    assert found["B"] < min(found["A"], found["so-C"])
    assert min(found.values()) <= record["val_exact"] <= max(found.values())
    losses = [record[f"val_loss/{name}"] for name in found]
    assert min(losses) < record["val_loss"] < max(losses)
    assert re.search(r"exact match \d+\.\d% \| A \d+\.\d%, B \d+\.\d%, so-C \d+\.\d%", done.out), done.out


@pytest.mark.parametrize("words, row", [(1, 64), (10, 128), (150, 1024)])
def test_the_row_follows_the_longest_pair(tmp_path, words, row):
    """So that a few hundred questions are more than a few rows. Started again, it is the same set."""
    source = write(tmp_path / "faq.jsonl", [{"q": f"{i} " + "word " * words, "a": "word " * words}
                                            for i in range(300)])
    made = prepare(source, tmp_path / "faq", row=None)
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["row"] == manifest["settings"]["row"] == row
    assert ("truncated responses" in manifest["pairs"]) == (row == 1024)
    assert prepare(source, tmp_path / "faq", row=None) == made
    manifest["complete"] = False
    packing.write_manifest(made, manifest)
    prepare(source, tmp_path / "faq", row=None)
    assert json.loads((made / "manifest.json").read_text())["complete"]


def test_peek_takes_the_rows_that_pairs_have(tmp_path):
    made = prepare(write(tmp_path / "some.jsonl", samples(200)), tmp_path / "pairs", row=96)
    done = run(0, "data.py", "peek", made, "--rows", 2)
    assert done.code == 0 and done.out.count("--- train row") == 2, done.out
    info = run(0, "data.py", "info", made).out
    assert len(re.findall(r"unigram entropy [1-9]\.\d+ nats", info)) == 2, info  # not 0 for rows of one


def test_names_of_validation_sets():
    def manifest(*splits):
        return {"shards": [{"file": f"{split}_{i}", "split": split} for i, split in enumerate(splits)]}

    a, b, other = Path("a/data"), Path("b/data"), Path("b/more")
    assert data.files_of_sets({a: manifest("train")}) == {}
    assert data.files_of_sets({a: manifest("val", "train", "val", "val_x")}) == {
        "": [a / "val_0", a / "val_2"], "x": [a / "val_x_3"]}
    found = data.files_of_sets({a: manifest("val_x", "val_y"), other: manifest("val", "val_x")})
    assert found == {"data-x": [a / "val_x_0"], "y": [a / "val_y_1"], "more": [other / "val_0"],
                     "more-x": [other / "val_x_1"]}
    assert data.files_of_sets({a: manifest("val"), b: manifest("val_z"), other: manifest("train")}) == {
        "a/data": [a / "val_0"], "z": [b / "val_z_0"]}


def test_sets_of_several_directories_have_unlike_names(tmp_path):
    """Two that have the same name in two directories are two sets, and each directory without names is one.
    """
    rows = [{"q": f"{i}", "a": "yes", "c": "AB"[i % 2]} for i in range(600)]
    source = write(tmp_path / "rows.jsonl", rows)
    named = [prepare(source, tmp_path / name, condition_field="c", val_field="c") for name in ("one", "two")]
    plain = [prepare(source, tmp_path / name / "data") for name in ("x", "y")]
    assert data.Dataset(named, 128).val.keys() == {"one-A", "one-B", "two-A", "two-B"}
    assert data.Dataset([named[0], plain[0]], 128).val.keys() == {"A", "B", "data"}
    assert data.Dataset(plain, 128).val.keys() == {*map(str, plain)}
    assert data.Dataset(plain[:1] * 2, 128).val.keys() == {""}


def test_a_comma_is_part_of_a_name_unless_it_follows_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "a,b"):
        (tmp_path / name).mkdir()
    assert data.sources_of("one,two,two") == ["one", "two", "two"]
    assert data.sources_of("a,b") == ["a,b"] and data.sources_of("text:c,d.txt") == ["text:c,d.txt"]


def test_the_masked_model_learns_of_pairs_what_it_masks(tmp_path, pairs):
    done = Trainer("train_mlm.py", seq_len=128, steps=2).train(0, pairs, tmp_path / "run")
    assert done.code == 0 and ", loss all\n" in done.out, done.out


def test_named_sets_of_plain_text_report_their_losses(tmp_path):
    rows = [{"text": f"{i}" + ("a" * 60 if i % 2 else f"{i**9}"), "kind": "easy" if i % 2 else "hard"}
            for i in range(900)]
    out = pipeline.prepare(write(tmp_path / "t.jsonl", rows), tmp_path / "t", "bytes", val_field="kind",
                           workers=1, val_split="hash:0.2")
    done = Trainer("train_gpt2.py", max_new_tokens=3, lr=1e-2).train(0, out, tmp_path / "run", eval_batches=0)
    assert done.code == 0, done.out
    easy, hard = map(float, re.findall(r"\| easy (\d\.\d{4}), hard (\d\.\d{4})", done.out)[-1])
    total = float(re.findall(r"validation loss (\d\.\d{4})", done.out)[-1])
    assert easy < total < hard


@pytest.mark.parametrize("script", ["train_gpt2.py", "train_hrm.py"])
def test_train_answer_export(script, pairs, tmp_path, monkeypatch, capsys):
    attention = {"train_gpt2.py": "isolated", "train_hrm.py": "prefix"}[script]
    trainer, out = Trainer(script, seq_len=128, max_new_tokens=20), tmp_path / "run"
    done = trainer.train(0, pairs, out, steps=30)
    assert f"attention {attention}, n_layer" in done.out, done.out
    # not the share of right labels: the end of a response is one, and easy
    assert done.code == 0 and "exact match" in done.out and "accuracy" not in done.out, done.out
    record = evaluations_of(out)[-1]
    assert 0 <= record["val_exact"] <= 1 and steps_of(out)[-1]["labels"] > 0
    flags = trainer.flags(pairs, out)
    used = trainer.here(*flags, "--prompt", "7 yes no", "--temperature", "0")
    assert used.code == 0, used.out
    done = trainer.here(*flags, "--export")
    files = [*(out / "hf").iterdir()]
    assert len({path.stat().st_mode for path in files}) == 1, files  # whoever may read one may read all
    typed = iter(["long " * 40, "7 yes no"])

    def ask(shown):
        with contextlib.suppress(StopIteration):
            return next(typed)
        raise EOFError  # as Ctrl-D does

    monkeypatch.setattr("builtins.input", ask)
    chat = trainer.here(*flags, "--chat", "--temperature", "0")
    assert chat.code == 0 and "error: the prompt has 202 tokens" in capsys.readouterr().err
    assert chat.out.splitlines()[-1] == used.out.splitlines()[-1]
    assert done.code == 0 and "no prefix mask" not in done.out, done.out
    assert ("tokenizer(question, answer)" in done.out) == (script == "train_hrm.py"), done.out
    if script == "train_hrm.py":
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "hf")
        tokenizer = transformers.AutoTokenizer.from_pretrained(out / "hf")
        inputs = tokenizer("7 yes no", return_tensors="pt")
        assert inputs["token_type_ids"].all() and inputs["input_ids"][0, -1] == RESPONSE
        ids = theirs.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
        written = tokenizer.decode(ids[inputs["input_ids"].size(1):]).removesuffix(EOT)
        assert used.out.endswith(f"7 yes no\n{written}\n")


@pytest.mark.parametrize("script, build", [("train_gpt2.py", gpt2), ("train_hrm.py", hrm)])
def test_ids_that_weights_lack_begin_as_the_mean(script, build, tmp_path):
    """Weights that know the 257 ids of plain bytes learn to answer: [MASK] and <|response|> are new."""
    from weights.huggingface import to_hf
    model = build(vocab_size=257, response=-1)
    to_hf(model, tmp_path / "hf", load_tokenizer("bytes"))
    out = prepare(write(tmp_path / "p.jsonl", samples(300)), tmp_path / "p", row=T)
    trainer = Trainer(script, seq_len=T, steps=1, lr=0, max_new_tokens=3, n_layer=None, size="tiny",
                      init_from=f"hf:{tmp_path / 'hf'}")
    done = trainer.train(0, out, tmp_path / "run")
    assert done.code == 0 and "knows 257 of 259 ids" in done.out, done.out
    found = tensors_of(tmp_path / "run")["model/embed.weight"]
    known = model.embed.weight[:257]
    assert torch.equal(found[:257], known) and torch.allclose(found[257:259], known.mean(0).expand(2, -1))
    wanted = {"train_gpt2.py": "attention isolated", "train_hrm.py": "attention prefix"}[script]
    assert wanted in done.out and "loss response" in done.out


def test_plain_text_adds_no_ids_to_weights(shards, tmp_path):
    """Pairs add some to any tokenizer; other new ids are those of another tokenizer."""
    from weights.huggingface import to_hf
    for vocab_size in (257, 256):
        weights = tmp_path / f"{vocab_size}"
        to_hf(gpt2(vocab_size=vocab_size, response=-1), weights, load_tokenizer("bytes"))
        (weights / "tokenizer.json").unlink()  # or its ids would be compared
        trainer = Trainer("train_gpt2.py", seq_len=T, steps=1, max_new_tokens=3, n_layer=None, size="tiny",
                          init_from=f"hf:{weights}")
        done = trainer.train(0, shards, tmp_path / f"run-{vocab_size}")
        assert done.code == (2 if vocab_size == 256 else 0), done.out
        assert ("knows 256 of 257 ids" in done.out) == (vocab_size == 256), done.out


@pytest.mark.full
@pytest.mark.parametrize("script, ranks", [("train_gpt2.py", 0), ("train_hrm.py", 2)])
def test_started_weights_keep_their_attention(script, ranks, pairs, tmp_path):
    """Unless --attention is given, or they cannot say (an export): then a warning says what changes. With a
    rate of 0 the loss is what it was.
    """
    trainer = Trainer(script, seq_len=128, max_new_tokens=3, steps=3, eval_every=3, batch=2)
    prefix, isolated = tmp_path / "prefix", tmp_path / "isolated"
    assert trainer.train(0, pairs, prefix, attention="prefix").code == 0
    assert trainer.train(0, pairs, isolated, attention="isolated").code == 0
    assert trainer.here("--out", isolated, "--export").code == 0
    used = trainer.here("--out", prefix, "--export")
    assert ("no prefix mask for GPT-2" in used.out) == (script == "train_gpt2.py"), used.out

    def begun(name, weights, **changes):
        done = trainer.fork(ranks, pairs, tmp_path / name, init_from=weights, lr=0, size="tiny", **changes)
        assert done.code == 0, done.out
        found = re.search(r"attention (\w+), n_layer", done.out)[1]
        return found, "WARNING: " in done.out and "attention, and this run uses" in done.out, \
            evaluations_of(tmp_path / name)[-1]["val_loss"]
    before = [evaluations_of(run)[-1]["val_loss"] for run in (prefix, isolated)]
    assert begun("a", isolated) == ("isolated", False, pytest.approx(before[1], abs=1e-5))
    assert begun("b", prefix) == ("prefix", False, pytest.approx(before[0], abs=1e-5))
    assert begun("c", isolated, attention="prefix")[:2] == ("prefix", True)
    assert begun("d", prefix, attention="causal")[:2] == ("causal", True)
    other = {"train_gpt2.py": ("isolated", False), "train_hrm.py": ("prefix", True)}[script]
    assert begun("e", f"hf:{isolated / 'hf'}")[:2] == other
    assert begun("f", f"hf:{isolated / 'hf'}", attention="isolated")[:2] == ("isolated", False)


def test_weights_with_a_prefix_learn_plain_text(pairs, shards, tmp_path):
    """Which has none, so their attention cannot be kept."""
    trainer = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=3, steps=1, size="tiny")
    assert trainer.train(0, pairs, tmp_path / "prefix", attention="prefix").code == 0
    done = trainer.train(0, shards, tmp_path / "plain", init_from=tmp_path / "prefix")
    assert done.code == 0 and "was trained with prefix attention, and this run uses" in done.out, done.out


def test_an_answer_goes_on_to_the_end_of_the_context_and_a_cut_is_said(capsys, monkeypatch):
    monkeypatch.setattr(sampling, "sample_ids", lambda logits, *_: torch.tensor([65]))  # it never ends
    tokenizer = with_markers(load_tokenizer("bytes"))
    flags = argparse.Namespace(max_new_tokens=None, temperature=0, top_k=0, seed=0, condition="")
    answering = gpt2(seq_len=300)
    written = "".join(sampling.samples_of(answering, tokenizer, "cpu", "why", flags, stop=True)[0])
    assert written == "A" * (300 - 5 + 1)
    assert "note: the answer is cut" in capsys.readouterr().err
    flags.max_new_tokens = 7
    assert len("".join(sampling.samples_of(answering, tokenizer, "cpu", "why", flags, stop=True)[0])) == 7
    assert "note: the answer is cut" in capsys.readouterr().err
    plain = gpt2(response=-1, attention="causal")
    "".join(sampling.samples_of(plain, tokenizer, "cpu", "why", flags, stop=True)[0])
    assert not capsys.readouterr().err
    "".join(sampling.samples_of(plain, tokenizer, "cpu", "why " * 30, flags, stop=True)[0])
    said = capsys.readouterr().err
    assert f"note: the prompt has 121 tokens, and the model reads only the last {T}" in said


def test_fields_that_are_not_read_are_named(tmp_path, capsys):
    rows = [{"instruction": "add", "input": f"{n} 1", "output": f"{n + 1}"} for n in range(40)]
    source = write(tmp_path / "alpaca.jsonl", rows)
    prepare(source, tmp_path / "one", prompt_field="instruction", response_field="output")
    assert "note: fields that were not read: input\n" in capsys.readouterr().out
    pipeline.prepare(source, tmp_path / "two", "bytes", text_field="output")
    assert "note: fields that were not read: instruction, input\n" in capsys.readouterr().out
    prepare(source, tmp_path / "all", prompt_field="instruction", response_field="output",
            condition_field="input")
    assert "were not read" not in capsys.readouterr().out


@pytest.mark.full
def test_a_run_on_plain_text_learns_to_answer(shards, pairs, tmp_path):
    """Its tokenizer is that of the pairs but for their ids; one of another text is refused."""
    trainer = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=3, steps=2)
    assert trainer.train(0, shards, tmp_path / "plain").code == 0
    tuned = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=3, steps=2, size="tiny",
                    init_from=tmp_path / "plain")
    done = tuned.train(0, pairs, tmp_path / "tuned")
    assert done.code == 0 and "knows 257 of 259 ids" in done.out, done.out
    other = pipeline.prepare(write(tmp_path / "o.jsonl", samples(200)), tmp_path / "other", "bpe:300",
                             row=128, prompt_field="q", response_field="a", workers=1)
    done = tuned.train(0, other, tmp_path / "refused")
    assert done.code == 2 and "was trained with the tokenizer bytes" in done.out, done.out


def test_logits_and_tokens_of_transformers_with_a_prefix(tmp_path):
    transformers = pytest.importorskip("transformers")
    from weights.huggingface import from_hf, to_hf
    ours, tokenizer = hrm(), with_markers(load_tokenizer("bytes"))
    ours.config.vocab_size = tokenizer.vocab_size
    to_hf(ours, tmp_path / "hf", tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.prefix_lm is True
    prompt = torch.tensor([[START, 1, 2, 3, 4, RESPONSE]])
    with torch.no_grad():
        logits = theirs(prompt, token_type_ids=torch.ones_like(prompt)).logits
        assert (ours(prompt)[..., :259] - logits).abs().max() <= 1e-5 * logits.abs().max()
        causal = theirs(prompt).logits  # control: without types it is causal
        assert (causal - logits).abs().max() > 1e-2 * logits.abs().max()
    written = theirs.generate(prompt, token_type_ids=torch.ones_like(prompt), max_new_tokens=32,
                              do_sample=False, eos_token_id=None)[0, 6:]
    assert torch.equal(torch.cat(list(generate(ours, prompt, 32, temperature=0))), written)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    pair = words("why", "so", return_tensors="pt")
    row = [START, *b"why", RESPONSE, *b"so", START]
    assert pair["input_ids"][0].tolist() == row
    assert pair["token_type_ids"][0].tolist() == [1] * 5 + [0] * 3
    idx, labels = torch.tensor([row]), torch.tensor([[-1] * 4 + row[5:] + [-1]])
    with torch.no_grad():  # an answer that is trained in transformers has the loss that it has here
        objective, _ = ours(idx, labels)
        targets = torch.where(pair["token_type_ids"] == 1, -100, pair["input_ids"])
        found = theirs(**pair, labels=targets).loss
        assert abs(found - objective / 3) <= 1e-5
        seen = theirs(idx, token_type_ids=torch.ones_like(idx), labels=targets).loss
        assert abs(found - seen) > 1e-2  # the control: the answer sees itself
    back = from_hf(HRM, str(tmp_path / "hf"))
    assert back.config.attention == "prefix"
    for name, tensor in ours.state_dict().items():
        same = back.state_dict()[name]
        rows = 259 if name in ("embed.weight", "head.weight") else None  # the others pad the table
        assert torch.equal(same[:rows], tensor[:rows])
