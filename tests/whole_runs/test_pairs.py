"""Training on prompts and responses: who sees whom, what counts, the mean over labels, several directories,
answers, weights that start a run.
"""

import functools
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from copies import changed
from many_runs import TRAINERS, run_all
from pair_data import (
    MESSAGES,
    RESPONSE,
    ROLES,
    START,
    pairs,  # noqa: F401
    prepare,
    samples,
    split_rows,
    write,
)
from runs import Trainer, evaluations_of, steps_of, tensors_of
from tiny_models import gpt2, hrm

import data
from cli.errors import UserError
from model import GPT2, Block
from ops.attention import cpu_attention
from ops.documents import document_bounds
from prepare import packing
from vocab.tokenizer import load_tokenizer, with_markers
from weights import sampling
from weights.init_from import enlarged
from weights.sampling import generate

T = 48
BYTES = with_markers(load_tokenizer("bytes"))


# --------------------------------------------------------------------------------------- several directories


def test_names_of_validation_sets():
    def manifest(*splits):
        return {"shards": [{"file": f"{split}_{i}", "split": split} for i, split in enumerate(splits)]}

    a, b, other = Path("a/data"), Path("b/data"), Path("b/more")
    for manifests, sets in (
            ({a: manifest("train")}, {}),
            ({a: manifest("val", "train", "val", "val_x")},
             {"": [a / "val_0", a / "val_2"], "x": [a / "val_x_3"]}),
            ({a: manifest("val_x", "val_y"), other: manifest("val", "val_x")},
             {"data-x": [a / "val_x_0"], "y": [a / "val_y_1"], "more": [other / "val_0"],
              "more-x": [other / "val_x_1"]}),
            ({a: manifest("val"), b: manifest("val_z"), other: manifest("train")},
             {"a/data": [a / "val_0"], "z": [b / "val_z_0"]})):
        assert data.files_of_sets(manifests) == sets


def test_a_comma_is_part_of_a_name_unless_it_follows_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "a,b"):
        (tmp_path / name).mkdir()
    for text, wanted in ("one,two,two", ["one", "two", "two"]), ("a,b", ["a,b"]), ("text:c,d", ["text:c,d"]):
        assert data.sources_of(text) == wanted


def test_a_directory_that_is_named_twice_is_read_twice_in_each_epoch(pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(300, seed=5)), tmp_path / "other")
    both = data.Dataset([pairs, other, other], 128)
    x, _ = data.read_rows(both.train, np.arange(both.train.rows))
    rows = [row for directory in (pairs, other, other) for row in split_rows(directory, "train")]
    assert np.array_equal(x, rows) and both.name == "pairs+other+other"
    assert both.val["other"].rows == len(split_rows(other, "val"))  # evaluated once
    prints = [data.Dataset(sets, 128).fingerprint for sets in ([pairs], [pairs, other], [other, pairs])]
    assert len({*prints, both.fingerprint}) == 4


# ------------------------------------------------------------------------------------------------- the models


IDS = {"vocab_size": 262, "padded_vocab": 320, "seq_len": T, **ROLES}
gpt2, hrm = functools.partial(gpt2, **IDS), functools.partial(hrm, n_layer=1, **IDS)
CYCLES = {"h_cycles": 5, "least_cycles": 1, "l_cycles": 1, "inject_input": True, "init": "published"}


def packed(batch: int, seed: int = 0) -> torch.Tensor:
    """Rows of samples of random lengths and padding, some of them cut at the end."""
    some, rows = random.Random(seed), []
    for _ in range(batch):
        row = []
        while len(row) < T and some.random() < 0.9:
            prompt, response = ([some.randrange(256) for _ in range(some.randint(low, 9))] for low in (0, 1))
            row += [START, *prompt, RESPONSE, *response]
        rows.append(row[:T] + [START] * (T - len(row)))
    return torch.tensor(rows)


def brute_force(row: list[int], attention: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """The mask (T, T) and the positions that count (T,), by the words of the definition."""
    document = np.cumsum(np.array(row) == START)
    response = {document[i]: i for i, token in enumerate(row) if token == RESPONSE}
    sees, counts = np.zeros((len(row), len(row)), bool), np.zeros(len(row), bool)
    for i in range(len(row)):
        last = response.get(document[i], -1)
        for j in range(len(row)):
            prompt = attention == "prefix" and i <= last and j <= last
            sees[i, j] = document[i] == document[j] and (j <= i or prompt)
        counts[i] = last >= 0 and (loss == "all" or i >= last) and i < len(row) - 1
    return sees, counts


@pytest.mark.parametrize("attention, loss", [("prefix", "response"), ("isolated", "all")])
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
    assert 0 < np.stack(counts).sum() < idx.numel()


@torch.no_grad()
@pytest.mark.parametrize("build, changes, dtype", [
    (gpt2, {}, torch.float32), (gpt2, {"modern": True}, torch.bfloat16), (hrm, {"halt": True}, torch.float32),
    (hrm, CYCLES, torch.bfloat16)])
def test_packed_samples_are_computed_as_if_alone(build, changes, dtype):
    model, idx = build(dtype=dtype, **changes).eval(), packed(4)
    for block in (m for m in model.modules() if isinstance(m, Block)):
        block.cpu_attention = None if dtype == torch.float32 else cpu_attention
    logits = model(idx).float()
    bound = (1e-5 if dtype == torch.float32 else 0.05) * logits.abs().max()
    for row, found in zip(idx, logits):
        number = document_bounds(row[None], START, RESPONSE)[0][0]
        for here in (number == document for document in number.unique()):
            assert (model(row[here][None]).float()[0] - found[here]).abs().max() <= bound


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same_of_samples(monkeypatch):
    model, idx = hrm().eval(), packed(3)
    dense = model(idx)
    monkeypatch.setattr("model.uses_flex", lambda head_dim, device: True)
    monkeypatch.setattr("model.compiled_once", lambda function: function)
    monkeypatch.setattr(Block, "flex_attention", None)
    assert (model(idx) - dense).abs().max() <= 1e-5 * dense.abs().max()
    assert Block.flex_attention is torch.nn.attention.flex_attention.flex_attention


@torch.no_grad()
@pytest.mark.parametrize("build, changes", [
    (gpt2, {}), (hrm, CYCLES), pytest.param(hrm, {"halt": True}, marks=pytest.mark.full)])
def test_answers_are_exact_where_teacher_forcing_says_so(build, changes):
    """A sample counts as exact if and only if greedy decoding, with the cache, writes its response. Half of
    the responses are what the model writes, half have another last token.
    """
    model = build(attention="prefix", **changes).eval()
    expected, rows = [], []
    for i in range(8):
        prompt = torch.tensor([[START, *(torch.arange(i % 5) + 3 * i).tolist(), RESPONSE]])
        answer = torch.cat(list(generate(model, prompt, 6, temperature=0, stop=START)))
        if len(answer) == 6 or len(answer) == 1:
            answer = answer.new_tensor([5, 6, START])  # which it would not end, or not begin, there
        if i % 2:
            answer[-2] = (answer[-2] + 1) % 256
        rows.append(torch.cat((prompt[0], answer, answer.new_full((T,), START)))[:T])
        again = torch.cat(list(generate(model, prompt, len(answer), temperature=0)))
        expected.append(torch.equal(again, answer))
    idx = torch.stack(rows)
    targets = torch.from_numpy(np.where(data.label_mask(idx.numpy(), ROLES, "response"), idx.roll(-1, 1), -1))
    _, found = model(idx, targets)
    assert (found["samples"], found["exact"]) == (len(rows), sum(expected))
    targets[4:] = -1  # as an evaluation fills its last batch up
    _, found = model(idx, targets)
    assert (found["samples"], found["exact"]) == (4, sum(expected[:4]))


@pytest.mark.parametrize("response, prompt, most, end, written, named", [
    (RESPONSE, "why", None, 99, T - 5 + 1, "note"), (RESPONSE, "why", 7, 99, 7, "note"),
    (RESPONSE, "why", 7, 2, 2, ""), (-1, "why " * 30, 3, 99, 3, "121")])
def test_an_answer_goes_on_to_its_end_or_that_of_the_context(
        monkeypatch, capsys, response, prompt, most, end, written, named):
    """A model of plain text goes on after the context. What is cut is said. While training, all ranks write
    equally many tokens: unlike processors may end an answer elsewhere, and with zero3 a rank would be alone.
    """
    count, decode = [], GPT2.decode
    monkeypatch.setattr(GPT2, "decode", lambda *args: count.append(1) or decode(*args))
    monkeypatch.setattr(sampling, "sample_ids",
                        lambda *_: torch.tensor([65 if len(count) <= end else START]))
    flags = SimpleNamespace(max_new_tokens=most, temperature=0, top_k=0, seed=0, condition="")

    def answer(prompt, stop) -> str:
        count.clear()
        model = gpt2(response=response).eval()
        return "".join(sampling.samples_of(model, BYTES, "cpu", prompt, flags, stop)[0])

    assert answer(prompt, stop=True) == "A" * written
    said = capsys.readouterr().err
    assert named in said and bool(named) == bool(said)
    if end == 2:
        assert len(count) == 3 and answer(prompt, stop=False) == "AA" and len(count) == 7
        with pytest.raises(UserError, match=f" {T} .* {T}"):
            answer("x" * (T - 2), stop=True)


# ----------------------------------------------------------------------------------- the mean over the labels

FLAGS = {"max_new_tokens": 2, "eval_every": 100, "save_every": 100, "warmup": 0, "grad_clip": 0,
         "schedule": "constant"}


@pytest.fixture(scope="module")
def few_labels(tmp_path_factory):
    """Rows of which the first step reads 8, three of them without labels, and later steps no labels."""
    path = tmp_path_factory.mktemp("few")
    out = prepare(write(path / "x.jsonl", samples(600, longest=4)), path / "out", row=32)
    file, = out.glob("train*.bin")
    tokens = data.open_shard(file).copy()
    rows = tokens[:-1].reshape(-1, 32)
    read = data.shuffled(np.arange(8), len(rows), 0)
    rows[np.setdiff1d(np.arange(len(rows)), read[[0, 1, 3, 6, 7]])] = START
    digest = packing.write_shard(file, [tokens], "uint16")
    manifest = data.read_manifest(out)
    next(s for s in manifest["shards"] if s["file"] == file.name)["sha256"] = digest
    packing.write_manifest(out, manifest)
    return out


def check_no_labels(one: Path, more: Path) -> None:
    """13 more steps without labels move no weight and no moment, and none is counted as skipped."""
    log = steps_of(more)
    assert log[0]["labels"] > 0 and len(log) == 14
    assert all((r["labels"], r["grad_norm"], r["skipped"]) == (0, 0, 0) for r in log[1:])
    before, after = tensors_of(one), tensors_of(more)
    assert before.keys() == after.keys() and any(t.any() for name, t in before.items() if "optimizer" in name)
    assert all(torch.equal(before[name], t) for name, t in after.items())


def test_gradients_do_not_depend_on_how_the_rows_are_spread(tmp_path, few_labels):
    """8 rows of unlike numbers of labels: 1 x 8, 1 x 4 x 2, 2 x 2 x 2. Also steps without labels."""
    # takes more than 10 s on a busy machine: five runs, two of them on two processes that wait for each other
    run_all(2, few_labels, tmp_path, [("gpt2", f"{n}", FLAGS | {"steps": n, "batch": 2}) for n in (1, 14)])
    check_no_labels(tmp_path / "1", tmp_path / "14")
    train = functools.partial(TRAINERS["gpt2"].train, 0, few_labels, **FLAGS)
    for name, batch in ("whole", 8), ("half", 4):
        assert train(tmp_path / name, steps=1, batch=batch).code == 0
    control = changed(tmp_path / "train_means.py", (
        "=loss = objective / (y >= 0).sum().clamp(min=1) / run.grad_accum", "loss = objective"))
    flags = TRAINERS["gpt2"].defaults | FLAGS | {"steps": 1, "batch": 4}
    assert control.train(0, few_labels, tmp_path / "control", **flags).code == 0
    # a tenth of the gradients
    whole, *others, means = ({name: t for name, t in tensors_of(tmp_path / run).items()
                              if name.endswith("exp_avg")} for run in ("whole", "half", "1", "control"))
    assert len(whole) > 5
    for name, moment in whole.items():
        assert all((moment - other[name]).norm() <= 2e-6 * moment.norm() for other in others), name
    assert any((moment - means[name]).norm() > 1e-2 * moment.norm() for name, moment in whole.items())


@pytest.mark.full
def test_steps_without_labels_move_no_weight_and_no_moment(tmp_path, few_labels):
    changes = {"strategy": "zero3"}, {"optimizer": "muon"}, {"strategy": "zero2", "precision": "fp16"}
    run_all(2, few_labels, tmp_path, [("gpt2", f"{i}-{n}", FLAGS | {"steps": n, "batch": 4} | flags)
                                      for i, flags in enumerate(changes) for n in (1, 14)])
    for i in range(3):
        check_no_labels(tmp_path / f"{i}-1", tmp_path / f"{i}-14")


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.full
def test_killed_and_resumed_bit_for_bit_with_several_directories(pairs, tmp_path):
    other = prepare(write(tmp_path / "o.jsonl", samples(300, seed=5)), tmp_path / "other")
    Trainer("train_hrm.py", seq_len=128, max_new_tokens=5).check_killed_run(
        tmp_path, 2, f"{pairs},{other},{other}")


def test_validation_sets_with_names(tmp_path):
    """Each reports its own exact matches. All of them together are what the run reports as one."""
    rows = [{"q": f"{i}", "a": "yes" if i % 3 else str(i * i), "c": "AB"[i % 3 == 0]} for i in range(900)]
    other = [row | {"c": "so, C", "a": "no"} for row in rows]
    one, two = (prepare(write(tmp_path / f"{name}.jsonl", some), tmp_path / name, condition_field="c",
                        val_field="c") for name, some in (("one", rows), ("two", other)))
    trainer = Trainer("train_gpt2.py", seq_len=None, max_new_tokens=5, lr=1e-2, eval_every=40, eval_batches=0)
    done = trainer.train(0, f"{one},{two}", tmp_path / "run")
    assert done.code == 0, done.out
    record = evaluations_of(tmp_path / "run")[-1]
    for name in "val_exact", "val_loss":
        a, b, c = (record[f"{name}/{of}"] for of in ("A", "B", "so-C"))
        assert min(a, b, c) < record[name] < max(a, b, c)
    assert record["val_exact/B"] < min(record["val_exact/A"], record["val_exact/so-C"])


@pytest.mark.parametrize("family, attention, learned", [
    pytest.param("gpt2", "attention isolated", "response", marks=pytest.mark.full),
    ("hrm", "attention prefix", "response"), ("mlm", "", "all")])
def test_train_on_conversations_and_answer(family, attention, learned, tmp_path):
    """The masked model learns what it masks."""
    talks = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
             for n in range(400)]
    shards = prepare(write(tmp_path / "x.jsonl", talks), tmp_path / "shards", row=64, **MESSAGES)
    trainer = Trainer(f"train_{family}.py", seq_len=64, steps=8, eval_every=8, eval_batches=1)
    out = tmp_path / "run"
    done = trainer.train(0, shards, out)
    assert done.code == 0 and f", loss {learned}\n" in done.out, done.out
    assert f"{attention}, n_layer" in done.out, done.out
    if family == "mlm":
        return
    record, steps = evaluations_of(out)[-1], steps_of(out)
    # not the share of right labels: the end of a response is one, and easy
    assert 0 <= record["val_exact"] <= 1 and "val_accuracy" not in record
    assert steps[-1]["labels"] > 0 and steps[-1]["loss"] < steps[0]["loss"]
    used = trainer.here("--out", out, "--condition", "Be brief. ", "--prompt", "7?\nyes\n8?")
    assert used.code == 0 and used.out.startswith("7?\nyes\n8?\n"), used.out


def test_ids_that_weights_lack_begin_as_the_mean():
    """Pairs add some to any tokenizer. Other new ids are those of another tokenizer."""
    known, said = torch.randn(320, 8), []
    weights = {"embed.weight": known, "other": known}
    record = {"path": "somewhere", "weights": weights,
              "model_config": {"vocab_size": 257, "padded_vocab": 320, "seq_len": 32}}
    run = SimpleNamespace(args=SimpleNamespace(seq_len=48), say=said.append)
    assert enlarged(record, run, {"vocab_size": 257}) == ({"seq_len": 48}, weights) and not said
    larger = {"vocab_size": 259, "padded_vocab": 384}
    changes, found = enlarged(record, run, larger | {"response": RESPONSE})
    assert changes == {"seq_len": 48} | larger and len(said) == 1 and found["other"] is known
    assert torch.equal(found["embed.weight"][:257], known[:257])
    assert torch.allclose(found["embed.weight"][257:], known[:257].mean(0).expand(127, -1))
    with pytest.raises(UserError, match="^somewhere .*257 of 259"):
        enlarged(record, run, larger)


def test_started_weights_keep_their_attention(pairs, shards, tmp_path):
    """Unless --attention is given or the text has no prompts. Then a warning says what changes. With a rate
    of 0 the loss is what it was.
    """
    trainer = Trainer("train_gpt2.py", seq_len=128, max_new_tokens=3, steps=1, eval_every=1, size="tiny",
                      global_batch=4)

    def begun(name, weights=None, made_of=pairs, **changes):
        done = trainer.train(0, made_of, tmp_path / name, init_from=weights, **changes)
        assert done.code == 0, done.out
        return (re.search(r"attention (\w+), n_layer", done.out)[1],
                bool(re.search("WARNING: .* attention", done.out)),
                evaluations_of(tmp_path / name)[-1]["val_loss"])

    for name in "prefix", "isolated":
        loss = pytest.approx(begun(name, attention=name)[2], abs=1e-5)
        assert begun(f"from {name}", tmp_path / name, lr=0) == (name, False, loss)
    assert trainer.here("--out", tmp_path / "isolated", "--export").code == 0
    assert begun("a", f"hf:{tmp_path}/isolated/hf", lr=0) == ("isolated", False, loss)
    assert begun("b", tmp_path / "isolated", attention="prefix")[:2] == ("prefix", True)
    assert begun("c", tmp_path / "prefix", shards)[:2] == ("causal", True)
    # weights of plain text learn to answer, with two more ids
    begun("plain", made_of=shards)
    assert begun("d", tmp_path / "plain")[:2] == ("causal", False)
