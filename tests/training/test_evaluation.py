"""training/evaluation.py: means, exact matches, a trainer's own metric, and --eval-only."""

import contextlib
import math
from argparse import Namespace
from types import SimpleNamespace

import numpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import place
from copies import FLAGS, assert_as_logged, result
from pair_data import CYCLES, RESPONSE, ROLES, START, T, gpt2, hrm, write
from pair_data import prepare as prepare_pairs
from runs import Trainer, evaluations_of
from states import world  # noqa: F401

import data
from cli.errors import UserError
from cli.files import lock_file
from model import GPT2, GPT2Config
from prepare.pipeline import prepare
from training.evaluation import evaluate, refuse_odd_metric
from weights.sampling import generate


@pytest.fixture
def evaluated(world, shards):
    """Evaluates the first eight rows in batches of three."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=257, padded_vocab=320, seq_len=32, n_layer=1, n_head=2, d_model=32))
    state = SimpleNamespace(model=model, world=world, averaged_weights=contextlib.nullcontext)

    def run(metric=None, votes=(0,) * 9, sets=("",), vocab_size=None) -> dict | None:
        dataset = data.Dataset([shards], 32)
        dataset.val, dataset.vocab_size = dict.fromkeys(sets, dataset.val[""]), vocab_size
        left = list(votes)
        stop = SimpleNamespace(agreed=0)

        def vote() -> int:
            stop.agreed = left.pop(0)
            return stop.agreed

        stop.vote = vote
        args = Namespace(eval_batches=2, eval_batch=4, seed=0)
        found = evaluate(state, SimpleNamespace(args=args, dataset=dataset, batch=3, metric=metric), stop)
        assert model.training
        return found

    run.model = model
    return run


def test_results_are_means_over_rows_and_labels(evaluated, shards):
    """Of a metric, too, which makes no graph. Named sets are reported alone and together."""
    def metric(model, x, y):
        assert not torch.is_grad_enabled() and not model.training
        right = model(x).argmax(-1) == y
        rows = (y >= 0).any(1)  # without those that fill the last batch
        return {"spaces": (right[y == 32].sum(), (y == 32).sum()),
                "rows": (x[rows, 0].sum(), 2.0 * rows.sum())}

    found = evaluated(metric, sets=("a", "b"))
    (x, y), = data.validation_batches(data.Dataset([shards], 32).val[""], 8, place(0, 1), 8)
    with torch.no_grad():
        logits = evaluated.model.eval()(x)[..., :257]
    right, loss = logits.argmax(-1) == y, F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    expected = {"loss": loss, "perplexity": math.exp(loss),
                "bits_per_byte": loss / math.log(2) * y.numel() / (y < 256).sum(),
                "spaces": right[y == 32].float().mean(), "rows": x[:, 0].sum() / 16}
    for name, value in expected.items():
        for key in (f"val_{name}", f"val_{name}/a", f"val_{name}/b"):
            assert found[key] == pytest.approx(float(value), rel=1e-5), key
    assert not any("/" in key for key in evaluated())
    assert "val_bits_per_byte" not in evaluated(vocab_size=300)  # whose rows are no text


def test_each_evaluation_draws_the_same_numbers_and_a_stop_cuts_it_short(evaluated):
    first, second = (evaluated(lambda model, x, y: {"drawn": (torch.rand(()), 1)}) for _ in range(2))
    assert first == second and 0 < first["val_drawn"] < 1
    assert evaluated(votes=(0, 15)) is None and evaluated(votes=(0, 0, 15)) is None


@pytest.mark.parametrize("name", ["loss", "labels", "bits_per_byte", "best_metric", "x/y"])
def test_a_metric_cannot_have_a_name_that_results_have(name, evaluated):
    with pytest.raises(UserError, match=f" called {name}"):
        evaluated(lambda model, x, y: {"own": (1, 1), name: (1, 1)})


@pytest.mark.parametrize("found", [None, {"own": 3.0}, {"own": "ab"}, {"own": (torch.ones(2), 1)},
                                   {"own": (1, 2, 3)}])
def test_a_metric_that_is_no_sum_with_a_count_is_refused(found, evaluated):
    def own(model, x, y):
        return found

    with pytest.raises(UserError, match=r'\{"own": \(sum, count\)\}'):
        evaluated(own)
    refuse_odd_metric(own, {"own": (1, 2), "other": (torch.ones((), requires_grad=True), numpy.float32(2))})


# ------------------------------------------------------------------------------------------------ whole runs


def test_a_validation_set_shorter_than_a_row_is_named(corpus, tmp_path):
    """As the message says, a shorter row holds it."""
    small = prepare(f"text:{corpus}", tmp_path / "small", "bytes", val_split="tail:0.001")
    size = sum(shard["tokens"] for shard in data.read_manifest(small)["shards"] if shard["split"] == "val")
    trainer = Trainer("train_gpt2.py", **FLAGS | {"steps": 2, "eval_every": 2, "global_batch": 1, "batch": 1})
    for length, changes, code in ((size, {}, 0), (size, {"eval_only": True}, 2), (size - 1, {}, 0)):
        done = trainer.train(0, small, tmp_path / str(length), seq_len=length, **changes)
        named = all(word in done.out for word in (" val,", f" {size} tokens: "))
        assert done.code == code and named == (length == size), done.out
        assert bool(evaluations_of(tmp_path / str(length))) == (length < size)


@pytest.mark.full
def test_more_cycles_and_mistakes(shards, corpus, tmp_path):
    """With --eval-only, which takes no lock."""
    out = tmp_path / "run"
    hrm = Trainer("train_hrm.py", max_new_tokens=2, steps=6, ff=64, h_cycles=1, l_cycles=2)
    assert hrm.train(0, shards, out).code == 0

    def only(data=shards, ranks=0, **changes):
        return hrm.fork(ranks, data, **{"out": out, "eval_only": True} | changes)

    with open(out / ".lock", "a") as file:
        lock_file(file, pytest.fail)
        same = result(only())
    assert_as_logged(same, out)
    assert_as_logged(result(only(ranks=2, strategy="zero3")), out)
    best = result(only(out=None, resume=out / "checkpoints" / "best.pt"))
    more = result(only(eval_cycles=5))
    assert same["val_loss"] == best["val_loss"] and (same["val_cycles"], more["val_cycles"]) == (1, 5)
    assert same["val_loss"] != more["val_loss"] and same["data"] == shards.name
    foreign = prepare(f"text:{corpus}", tmp_path / "foreign", "bpe:300")
    for done, named in ((only(foreign), "bytes"), (only(out=tmp_path / "missing"), "missing")):
        assert done.code == 2 and named in done.out, done.out


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


def test_validation_sets_with_names(tmp_path):
    """Each reports its own exact matches. All of them together are what the run reports as one."""
    rows = [{"q": f"{i}", "a": "yes" if i % 3 else str(i * i), "c": "AB"[i % 3 == 0]} for i in range(900)]
    other = [row | {"c": "so, C", "a": "no"} for row in rows]
    one, two = (prepare_pairs(write(tmp_path / f"{name}.jsonl", some), tmp_path / name, condition_field="c",
                        val_field="c") for name, some in (("one", rows), ("two", other)))
    trainer = Trainer("train_gpt2.py", seq_len=None, max_new_tokens=5, lr=1e-2, eval_every=40, eval_batches=0)
    done = trainer.train(0, f"{one},{two}", tmp_path / "run")
    assert done.code == 0, done.out
    record = evaluations_of(tmp_path / "run")[-1]
    for name in "val_exact", "val_loss":
        a, b, c = (record[f"{name}/{of}"] for of in ("A", "B", "so-C"))
        assert min(a, b, c) < record[name] < max(a, b, c)
    assert record["val_exact/B"] < min(record["val_exact/A"], record["val_exact/so-C"])
