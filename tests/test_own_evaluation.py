"""What a trainer of one's own adds around an evaluation and with a second model: a metric, another best, a
model that draws while it is evaluated, a teacher, losses per token, labels and parameters that it changes.
"""

import functools
import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, place
from runs import (
    Trainer,
    assert_same_run,
    copy_of_the_first_half,
    evaluations_of,
    steps_of,
)
from states import run_of
from test_evaluate import result
from test_pairs import pairs  # noqa: F401 (a fixture)
from torch import nn

import data
import ddp_utils
import model as model_module
import monitor
from cli.errors import UserError
from ddp_utils import list_checkpoints, read_checkpoint
from loggers.command import summarize
from model import GPT2, HRM, MLM, GPT2Config, HRMConfig, MLMConfig
from ops.device import compute_dtype
from prepare.pipeline import prepare
from training.step import TrainState
from training.strategies import set_modes
from weights.init_from import load_frozen
from weights.use import load_model, load_run

FLAGS = {"steps": 8, "save_every": 4, "eval_every": 4, "max_new_tokens": 2, "batch": 3, "eval_batches": 1}
GUIDE = (ROOT / "docs" / "changing.md").read_text()


@pytest.fixture
def world():
    yield ddp_utils.init("gloo", "cpu")
    dist.destroy_process_group()


def changed(path, *changes: tuple[str, str], script: str = "train_gpt2.py") -> Trainer:
    """A copy of a trainer in which a text is put before another, which occurs once as the beginning of a
    line; or instead of it, where the first begins with "=".
    """
    text = (ROOT / script).read_text()
    for new, anchor in changes:
        at, = re.finditer(rf"^( *){re.escape(anchor)}.*\n", text, re.M)
        lines = "".join(f"{at[1]}{line}\n".replace(f"{at[1]}\n", "\n")
                        for line in new.removeprefix("=").splitlines())
        text = text[:at.start()] + lines + ("" if new.startswith("=") else at[0]) + text[at.end():]
    path.write_text(text)
    return Trainer(str(path), **FLAGS)


def ranks_of(trainer: Trainer, ranks: int):
    """A function that trains: in this process, or in forked ones, which start faster than torchrun's."""
    return functools.partial(trainer.fork if ranks else trainer.train, ranks)


METRIC = """def metric(model, x, y):
    right = model(x).argmax(-1) == y
    spaces = y == 32
    rows = (y >= 0).any(1)  # without those that fill the last batch
    return {"spaces": (right[spaces].sum(), spaces.sum()), "rows": (x[rows, 0].sum(), 2.0 * rows.sum())}
run.metric = metric"""
USE = "if uses_model(run.args):"
MARK = "if log.evaluation("
# draws while it is evaluated, as a model with a generator in it does
DRAWS = """class GPT2(GPT2):
    def loss(self, hidden, idx, targets):
        if not self.training:
            hidden = hidden + torch.randn_like(hidden)
        return super().loss(hidden, idx, targets)

"""
HEAD = "import torch\nimport torch.nn.functional as F\nfrom weights.init_from import load_frozen\n"


def guide_blocks(item: str) -> list[str]:
    """The pieces of code of one of the guide's recipes."""
    text = re.search(rf"^### {item}.*?(?=^##)", GUIDE, re.M | re.S)[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


# ----------------------------------------------------------------------------------- a metric, a best_metric


def expected(run, shards) -> dict[str, float]:
    """The metric above, computed from the checkpoint of a run alone."""
    model, _ = load_run(GPT2, run)
    hits = spaces = first = rows = 0
    with torch.no_grad():
        for x, y in data.validation_batches(data.Dataset([shards], 32).val[""], 1, place(0, 1), 16):
            right = model(x).argmax(-1) == y
            hits, spaces = hits + right[y == 32].sum().item(), spaces + (y == 32).sum().item()
            first, rows = first + x[:, 0].sum().item(), rows + 2
    return {"val_spaces": hits / spaces, "val_rows": first / rows}


@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=pytest.mark.full)])
def test_a_metric_is_in_the_log_the_picture_and_eval_only(ranks, strategy, shards, tmp_path):
    trainer = changed(tmp_path / "train_metric.py", (METRIC, USE))
    flags = {"strategy": strategy, "lr": 3e-2, "batch": 3}
    done = ranks_of(trainer, ranks)(shards, tmp_path / "run", **flags)
    assert done.code == 0, done.out
    record = evaluations_of(tmp_path / "run")[-1]
    for name, value in expected(tmp_path / "run", shards).items():
        assert record[name] == pytest.approx(value, abs=1e-6), name
    assert "| val_spaces " in done.out and "val_spaces" in json.loads(
        (tmp_path / "run" / "history.json").read_text())
    only = ranks_of(trainer, ranks)(shards, tmp_path / "run", eval_only=True, strategy=strategy)
    assert result(only)["val_spaces"] == pytest.approx(record["val_spaces"], abs=1e-6)


@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=pytest.mark.full)])
def test_an_evaluation_makes_no_graph(ranks, strategy, shards, tmp_path):
    """Which would hold the activations of a batch, and gradients of a metric."""
    metric = """import torch
def metric(model, x, y):
    assert not torch.is_grad_enabled(), "it would keep a graph"
    return {"rows": (len(x), 1)}
run.metric = metric"""
    trainer = changed(tmp_path / "train_no_graph.py", (metric, USE))
    done = ranks_of(trainer, ranks)(shards, tmp_path / "run", strategy=strategy)
    assert done.code == 0 and "val_rows" in evaluations_of(tmp_path / "run")[-1], done.out
    only = ranks_of(trainer, ranks)(shards, tmp_path / "run", eval_only=True, strategy=strategy)
    assert result(only)["val_rows"] > 0


@pytest.mark.parametrize("name", ["loss", "labels", "bits_per_byte", "accuracy", "correct", "exact",
                                  "samples", "best_metric", "x/y", "x (count)"])
def test_a_metric_cannot_have_a_name_that_results_have(name, shards, tmp_path):
    file = re.sub(r"\W", "_", name)
    trainer = changed(tmp_path / f"train_metric_{file}.py", (METRIC.replace('"spaces":', f'"{name}":'), USE))
    done = trainer.train(0, shards, tmp_path / "run")
    assert done.code == 2 and re.search(
        rf"error: a (number|metric) (called|cannot be called) {re.escape(name)}", done.out), done.out


def test_a_metric_that_is_no_sum_with_a_count_is_refused(shards, tmp_path):
    odd = METRIC.replace("(right[spaces].sum(), spaces.sum())", "right[spaces].float().mean()")
    done = changed(tmp_path / "train_mean.py", (odd, USE)).train(0, shards, tmp_path / "run")
    assert done.code == 2 and 'return {"spaces": (sum, count)}.' in done.out, done.out


@pytest.mark.full
def test_names_of_a_metric_that_differ_between_ranks_are_refused(shards, tmp_path):
    odd = METRIC.replace('"rows"', 'f"rows_{world.rank}"')
    done = changed(tmp_path / "train_metric.py", (odd, USE)).fork(2, shards, tmp_path / "run")
    assert done.code and re.search("on rank 1 differs .* return the same names", done.out), done.out


def test_step_and_bits_per_byte_are_no_names_of_own_numbers(shards, tmp_path):
    for name in ("step", "bits_per_byte"):
        line = f"=log.step(metrics, step, samples, grad_norm, lr=lr, **{{{name!r}: 1.0}})"
        done = changed(tmp_path / f"train_{name}.py", (line, "log.step(")).train(0, shards, tmp_path / name)
        assert done.code == 2 and f"error: a number called {name} cannot be logged" in done.out, done.out


RISING = 'results["best_metric"] = -step if step < 8 else 0.0'  # the first evaluation is the best


@pytest.mark.parametrize("best_metric, best", [(RISING, 4), ("", 8)])
def test_best_is_chosen_by_the_criterion_in_a_resumed_run_too(best_metric, best, shards, tmp_path):
    """Without one by the loss, which falls. The copy resumes from before the later evaluations."""
    trainer = changed(tmp_path / f"train_best_{best}.py", (best_metric, MARK))
    flags = {"steps": 12, "lr": 1e-2}
    best = best if best_metric else 12
    done = trainer.train(0, shards, tmp_path / "whole", **flags)
    assert done.code == 0, done.out
    assert re.search(rf"best evaluation \S+ at step {best}; peak", done.out), done.out
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    again = trainer.train(0, shards, tmp_path / "resumed", **flags)
    assert again.code == 0, again.out
    for out in (tmp_path / "whole", tmp_path / "resumed"):
        assert read_checkpoint(out / "checkpoints" / "best.pt")["step"] == best
        assert summarize(monitor.read_metrics(out))["best_step"] == best
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_numbers_of_two_kinds_are_not_compared():
    records = [{"step": 4, "val_loss": 2.0}, {"step": 8, "val_loss": 1.0, "best_metric": 3.0},
               {"step": 8, "loss": 1.0}, {"step": 12, "val_loss": 0.5, "best_metric": None}]
    assert monitor.evaluations_of(records) == {4: math.inf, 8: 3.0}
    assert monitor.evaluations_of(records[:1]) == {4: 2.0}
    assert monitor.evaluations_of([*records, {"step": 16, "val_loss": 1.5}]) == {4: 2.0, 8: math.inf, 16: 1.5}


@pytest.mark.parametrize("before, after", [("", RISING), (RISING, "")])
def test_a_criterion_that_comes_or_goes_begins_anew(before, after, shards, tmp_path):
    """Of a run whose trainer has changed; the numbers of the other kind count no more, also on a resume."""
    for number, (text, steps, best) in enumerate([(before, 8, None), (after, 16, None), (after, 24, None)]):
        trainer = changed(tmp_path / f"train_kind_{bool(before)}_{number}.py", (text, MARK))
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "train_kind.py"
        path.write_text(Path(trainer.script).read_text())
        flags = FLAGS | {"steps": steps, "lr": 1e-2, "keep_last": 9}
        done = Trainer(str(path), **flags).fork(0, shards, tmp_path / "run")
        assert done.code == 0, done.out
        records = evaluations_of(tmp_path / "run")
        kind = [r for r in records if ("best_metric" in r) == bool(text)]
        best = min(kind, key=monitor.best_metric_of)["step"]
        assert read_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")["step"] == best, done.out
        assert f"at step {best}; peak" in done.out, done.out


# ------------------------------------------------------------------------------- the rows of an evaluation


@pytest.mark.full
@pytest.mark.parametrize("script, row", [("train_gpt2.py", 16), ("train_hrm.py", 16), ("train_mlm.py", 64)])
def test_the_validation_rows_are_those_of_the_size(script, row, shards, tmp_path):
    """Whatever the global batch, the micro-batch and the number of processes are, on a resume, too."""
    trainer = Trainer(script, **FLAGS | {"steps": 2, "eval_every": 2, "lr": 0.0})
    if script == "train_mlm.py":
        del trainer.defaults["max_new_tokens"]
    losses = []
    for i, (ranks, changes) in enumerate([(0, {}), (0, {"global_batch": 4, "batch": 4}), (3, {"batch": 2})]):
        done = ranks_of(trainer, ranks)(shards, tmp_path / str(i), **changes)
        assert done.code == 0 and re.search(rf"evaluation +{row} of [\d,]+ rows", done.out), done.out
        losses.append(evaluations_of(tmp_path / str(i))[-1]["val_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    more = trainer.train(0, shards, tmp_path / "0", steps=4, global_batch=8, batch=8)
    assert more.code == 0 and re.search(rf"evaluation +{row} of", more.out), more.out
    only = trainer.train(0, shards, tmp_path / "0", eval_only=True, global_batch=3, batch=3)
    assert result(only)["val_loss"] == pytest.approx(losses[0], abs=1e-5)
    two = trainer.train(0, shards, tmp_path / "two", eval_batches=2)
    assert re.search(rf"evaluation +{2 * row} of", two.out)
    assert evaluations_of(tmp_path / "two")[-1]["val_loss"] != losses[0]


def test_a_validation_set_shorter_than_a_row_is_named(corpus, tmp_path):
    """As the message says, a shorter row holds it."""
    small = prepare(f"text:{corpus}", tmp_path / "small", "bytes", val_split="tail:0.001")
    size = sum(shard["tokens"] for shard in data.read_manifest(small)["shards"] if shard["split"] == "val")
    trainer = Trainer("train_gpt2.py", **FLAGS)
    length = size + 10
    done = trainer.train(0, small, tmp_path / "run", steps=2, seq_len=length, global_batch=1, batch=1)
    said = rf"validation set val, .* {length} tokens: .*--seq-len"
    assert done.code == 0 and re.search(said, done.out), done.out
    only = trainer.train(0, small, tmp_path / "run", eval_only=True, seq_len=length)
    assert only.code == 2 and re.search(f"error: .* {said}", only.out), only.out
    flags = {"steps": 2, "eval_every": 2, "global_batch": 1, "batch": 1}
    fits = trainer.train(0, small, tmp_path / "fits", seq_len=size - 1, **flags)
    assert fits.code == 0 and "leaves out" not in fits.out and evaluations_of(tmp_path / "fits"), fits.out


# --------------------------------------------------------------------- evaluations that draw, second models


@pytest.fixture(scope="module")
def teacher(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("teacher") / "run"
    trainer = Trainer("train_gpt2.py", **FLAGS, ema=0.9)
    assert trainer.train(0, shards, out, n_layer=2, lr=1e-2).code == 0
    return out


def distilling(path, teacher, *more: tuple[str, str]) -> Trainer:
    """As the guide has it, with what `more` changes."""
    top, load, loss = guide_blocks("A teacher")
    top = "import torch\n" + top.replace('"runs/teacher"', repr(str(teacher)))
    return changed(path, (top, "BETAS = "), ("=" + load, "log, meta, "),
                   ("=" + loss, "objective, sums = "), *more)


@pytest.mark.parametrize("ranks, strategy", [
    (0, "ddp"), *(pytest.param(2, name, marks=pytest.mark.full) for name in ("ddp", "zero2", "zero3"))])
def test_metric_criterion_draws_and_teacher_resume_bit_for_bit(ranks, strategy, teacher, shards, tmp_path):
    trainer = distilling(tmp_path / "train_all.py", teacher, (METRIC, USE), (DRAWS, "WEB = "),
                         ('results["best_metric"] = -results["val_spaces"]', MARK))
    flags = {"strategy": strategy, "lr": 1e-2, "steps": 12, "keep_last": 9}
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole", **flags)
    assert done.code == 0, done.out
    settings = json.loads((tmp_path / "whole" / "config.json").read_text())["settings"]
    assert settings["frozen"] == {str(teacher): 8}
    assert all(step["kl"] > 0 for step in steps_of(tmp_path / "whole"))
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    lines = (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines(keepends=True)
    evaluated = [line for line in lines if "val_loss" in line]
    assert evaluated  # killed in the middle of that evaluation, after its checkpoint
    left = "".join(line for line in lines if line not in evaluated)
    (tmp_path / "resumed" / "metrics.jsonl").write_text(left)
    again = ranks_of(trainer, ranks)(shards, tmp_path / "resumed", **flags)
    assert again.code == 0 and "resuming with frozen" not in again.out, again.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    best = [read_checkpoint(tmp_path / name / "checkpoints" / "best.pt") for name in ("whole", "resumed")]
    criteria = {e["step"]: e["best_metric"] for e in evaluations_of(tmp_path / "whole")}
    assert best[0]["step"] == best[1]["step"] == min(criteria, key=criteria.get)


@pytest.mark.full
def test_a_teacher_that_has_changed_or_does_not_fit_is_named(teacher, shards, corpus, tmp_path):
    own = tmp_path / "teacher"
    basic = Trainer("train_gpt2.py", **FLAGS)
    assert basic.train(0, shards, own, steps=4).code == 0
    trainer = distilling(tmp_path / "train_kd.py", own)
    assert trainer.train(0, shards, tmp_path / "run", steps=4).code == 0
    assert basic.train(0, shards, own, steps=8).code == 0
    done = trainer.train(0, shards, tmp_path / "run", steps=8)
    said = f"resuming with frozen {{'{own}': 8}} (was {{'{own}': 4}})"
    assert done.code == 0 and said in done.out, done.out
    other = prepare(f"text:{corpus}", tmp_path / "other", "bpe:300")
    refused = trainer.train(0, other, tmp_path / "odd")
    assert refused.code == 2 and "was trained with the tokenizer bytes (" in refused.out, refused.out
    short = trainer.train(0, shards, tmp_path / "long", seq_len=64)
    assert short.code == 2 and "has learned positions for 32 tokens: lower --seq-len." in short.out, short.out
    top, load, _ = guide_blocks("A teacher")
    load = load.replace("TEACHER", repr(str(own)))
    teacher, _, identity = load.splitlines()
    late = changed(tmp_path / "train_late.py", (top, "BETAS = "), ("=" + identity, "log, meta, "),
                   (teacher, "if is_complete("))
    with pytest.raises(UnboundLocalError, match="local variable 'teacher'"):
        late.train(0, shards, tmp_path / "late")
    gone = distilling(tmp_path / "train_gone.py", tmp_path / "none").train(0, shards, tmp_path / "gone")
    assert gone.code == 2 and "none does not exist: train first" in gone.out, gone.out


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_second_model_computes_as_the_first_does(precision, world, shards, tmp_path):
    """A run loaded by load_run, and by load_frozen, gives the bits of the model in training."""
    trainer = Trainer("train_gpt2.py", **FLAGS | {"precision": precision, "steps": 2})
    assert trainer.fork(0, shards, tmp_path / "run").code == 0
    run = run_of(world, precision=precision, strategy="ddp", checkpoint_activations="none", seq_len=32)
    run.dataset = data.Dataset([shards], 32)
    reference = load_frozen(load_run(GPT2, tmp_path / "run")[0], run, GPT2, str(tmp_path / "run"))
    assert reference.loaded_from == {str(tmp_path / "run"): 2} and not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    loaded, _ = load_run(GPT2, tmp_path / "run")
    saved = ddp_utils.load_checkpoint(tmp_path / "run", print)
    trained = load_model(GPT2, saved, world)
    set_modes(trained, run.args, run.world)
    x = torch.arange(64).view(2, 32)
    found = [m(x, x, per_token=True)[0] for m in (trained, reference, loaded)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert loaded.compute_dtype == reference.compute_dtype == compute_dtype(precision, world.device)
    plain = GPT2(trained.config)  # control: as load_run was before, in fp32 and with torch's attention
    plain.load_state_dict(trained.state_dict())
    assert torch.equal(plain.eval()(x, x, per_token=True)[0], found[0]) == (precision == "fp32")


PAIRS = """made = ddp.generator(args.seed, 0, micro_step)
x = torch.randint(256, (run.batch, 2, args.seq_len), generator=made)
y = torch.where(torch.arange(args.seq_len) < 9, -1, x)
count = len(x)
labels = ddp.async_sum(count * run.grad_accum, world)"""


@pytest.mark.parametrize("ranks, strategy", [(0, "ddp"), pytest.param(2, "zero3", marks=pytest.mark.full)])
def test_preferences_begin_with_a_margin_of_zero(ranks, strategy, teacher, shards, tmp_path):
    """DPO as the guide has it, on random pairs, in bf16; the loss of the first step is ln 2 exactly."""
    reference, loss, _ = guide_blocks("Preferences")
    top = "import torch\n" + guide_blocks("A teacher")[0]
    trainer = changed(tmp_path / "train_dpo.py", (top, "BETAS = "), (reference, "log, meta, "),
                      (f"={PAIRS}\n{loss}", "objective, sums = "))
    flags = {"precision": "bf16", "lr": 1e-3, "warmup": 1, "steps": 3, "n_layer": None}
    done = ranks_of(trainer, ranks)(shards, tmp_path / "run", init_from=teacher, strategy=strategy, **flags)
    assert done.code == 0, done.out
    first, *_, last = steps_of(tmp_path / "run")
    assert first["margin"] == 0 and first["loss"] == pytest.approx(0.6931472, abs=1e-7)
    assert last["margin"] > 0 and last["loss"] < first["loss"]


# ------------------------------------------------------------------------- losses per token, odd labels


SHAPE = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 16, "n_layer": 1, "n_head": 2, "d_model": 16}
MODELS = {"gpt2": lambda: GPT2(GPT2Config(**SHAPE)), "mlm": lambda: MLM(MLMConfig(**SHAPE, ff=24)),
          "hrm": lambda: HRM(HRMConfig(**SHAPE, ff=24)),
          "halt": lambda: HRM(HRMConfig(**SHAPE, ff=24, halt=True, bp_cycles=1, inject_input=True))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_losses_of_tokens_sum_to_the_objective(name, dtype, monkeypatch):
    """Also their gradients; a weight of 0 removes a token; each is the loss that logits give."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model.compute_dtype, model.z_loss = dtype, 1e-2
    idx = torch.arange(32).view(2, 16)
    labels = idx.roll(-1, 1).masked_fill(idx % 5 == 0, -1)
    places = [torch.arange(16).expand(2, -1)] if name == "mlm" else []
    more = {"ponder_weight": 0.1} if name == "halt" else {}

    def gradients(objective) -> list:
        return torch.autograd.grad(objective, [*model.parameters()], allow_unused=True)

    whole, sums = model(idx, *places, labels, **more)
    tokens, same = model(idx, *places, labels, per_token=True, **more)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert tokens.shape == labels.shape and tokens.dtype == torch.float32
    assert not tokens[labels < 0].any() and sums.keys() == same.keys()
    torch.testing.assert_close(tokens.sum(), whole, **close)
    for key in sums:
        torch.testing.assert_close(same[key].float(), sums[key].float(), **close)
    for a, b in zip(gradients(whole), gradients(tokens.sum())):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **close)
    if name == "halt":
        return
    model.z_loss = 0.0
    exact = nn.functional.cross_entropy(model(idx).float().flatten(0, 1), labels.flatten(), ignore_index=-1,
                                        reduction="none").view(2, 16)
    torch.testing.assert_close(model(idx, *places, labels, per_token=True)[0], exact, **close)


def test_losses_of_tokens_in_many_chunks(monkeypatch):
    """As many rows as fill two chunks and a part, with a bias."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((1100, 8), (20, 8), (20,)))
    y = torch.randint(-1, 19, (1100,))
    objective, loss, _ = model_module.linear_cross_entropy(hidden, weight, y, 19, bias, reduction="none")
    logits = (hidden @ weight.T + bias)[:, :19]
    exact = nn.functional.cross_entropy(logits, y, ignore_index=-1, reduction="none")
    torch.testing.assert_close(objective, exact)
    torch.testing.assert_close(loss, exact.detach().sum())
    weights = torch.rand(1100)
    for a, b in zip(torch.autograd.grad((weights * objective).sum(), (hidden, weight, bias)),
                    torch.autograd.grad((weights * exact).sum(), (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("script", ["train_gpt2.py", "train_hrm.py", "train_mlm.py"])
def test_training_on_losses_of_tokens_is_the_usual_training(script, strategy, shards, tmp_path):
    path = tmp_path / f"train_tokens_{script}"
    trainer = changed(path, ("objective = objective.sum()", "# the mean over all"), script=script)
    text, calls = re.subn(r"(state.wrapped\(x(, positions)?, y)", r"\1, per_token=True", path.read_text())
    assert calls == 1
    path.write_text(text)
    flags = {"strategy": strategy, "lr": 1e-2} | ({"max_new_tokens": None} if "mlm" in script else {})
    for name, one in (("own", trainer), ("usual", Trainer(script, **FLAGS))):
        done = one.fork(2, shards, tmp_path / name, **flags)
        assert done.code == 0, done.out
    for ours, theirs in zip(steps_of(tmp_path / "own"), steps_of(tmp_path / "usual"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("source, attention, warned", [
    ("run", "isolated", False), ("run", None, False), ("other", "isolated", True)])
def test_a_reference_reads_as_the_model_and_a_teacher_as_it_was_trained(
        source, attention, warned, teacher, shards, tmp_path):
    """Weights of --init-from that get another --attention; the same weights as a teacher are warned of."""
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    load = "reference = load_frozen(model, run, GPT2, SOURCE)".replace(
        "SOURCE", "args.init_from" if source == "run" else repr(str(other)))
    same = "run.say(f'the same: {torch.equal(model.eval()(z), reference(z))}')"
    draw = "z = torch.randint(0, 257, (2, 32), generator=ddp.generator(0, 0))\nz[:, 9] = 256"
    path = tmp_path / f"train_reads_{source}_{attention}.py"
    trainer = changed(path, (HEAD, "import data"), (f"{load}\n{draw}\n{same}\nmodel.train()", "log, meta, "))
    flags = {"n_layer": None, "attention": attention, "init_from": teacher, "steps": 1}
    done = trainer.train(0, shards, tmp_path / "run", **flags)
    assert done.code == 0 and f"the same: {not warned}" in done.out, done.out
    assert ("causal attention, the model in training isolated" in done.out) == warned, done.out


def test_a_reference_without_the_ids_of_pairs_is_named(pairs, shards, tmp_path):
    base = tmp_path / "base"
    assert Trainer("train_gpt2.py", **FLAGS | {"steps": 1}).train(0, shards, base, seq_len=128).code == 0
    load = "reference = load_frozen(model, run, GPT2, args.init_from)"
    trainer = changed(tmp_path / "train_pairs.py", (HEAD, "import data"), (load, "log, meta, "))
    done = trainer.train(0, pairs, tmp_path / "run", init_from=base, seq_len=None)
    assert done.code == 2 and "pairs add ids to it, so train that model on pairs first." in done.out, done.out


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_averages_resume_exactly_after_several_updates_in_a_step(ranks, shards, tmp_path):
    again = ("for x, y in batches:\n    with state.no_sync(False):\n"
             "        state.wrapped(x, y)[0].backward()\n"
             "state.optimizer_step(lr, state.clip_gradients(args.grad_clip))")
    trainer = changed(tmp_path / "train_twice_a_step.py", (again, "count, batches = "))
    path = tmp_path / "train_twice_a_step.py"
    text = path.read_text()
    line = "        count, batches = loader.step(run.grad_accum)\n"
    at = text.index("        for x, y in batches:")
    path.write_text(text[:at] + line + text[at:].replace(line, "", 1))
    assert ranks_of(trainer, ranks)(shards, tmp_path / "whole", ema=0.99).code == 0
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    done = ranks_of(trainer, ranks)(shards, tmp_path / "resumed", ema=0.99)
    assert done.code == 0, done.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    newest = read_checkpoint(list_checkpoints(tmp_path / "resumed")[0])
    assert newest["ema_updates"] == 2 * newest["step"] == 16


# ---------------------------------------------------------------- changes after new_model, odd optimizers


ADAPTER = """class Adapter(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.down = torch.nn.Parameter(torch.randn(2, inner.weight.shape[1]) SEED)
        self.up = torch.nn.Parameter(torch.zeros(inner.weight.shape[0], 2))

    def forward(self, x):
        return self.inner(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))

for block in model.transformer["blocks"]:
    block.up = Adapter(block.up)"""


def adapters(path, seed: str = "", more: str = "") -> Trainer:
    return changed(path, (HEAD, "import data"), (ADAPTER.replace("SEED", seed) + more, "example = "))


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_adapters_put_in_after_new_model(ranks, shards, tmp_path):
    trainer = adapters(tmp_path / "train_adapters.py")
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole")
    assert done.code == 0, done.out
    copy_of_the_first_half(tmp_path / "whole", tmp_path / "resumed")
    again = ranks_of(trainer, ranks)(shards, tmp_path / "resumed")
    assert again.code == 0, again.out
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.full
def test_adapters_that_cannot_train_alike_are_named(shards, tmp_path):
    unlike = adapters(tmp_path / "train_unlike.py", "+ world.rank")
    done = unlike.fork(2, shards, tmp_path / "unlike")
    said = r"down on rank 1 differs from the other ranks \(Sync=FAILED\): this is before the first step"
    assert done.code and re.search(said, done.out), done.out
    assert "check the memory" not in done.out
    for name, more in (("some", ""), ("all", "\nfor name, p in model.named_parameters():\n"
                       "    p.requires_grad_('up.down' in name or 'up.up' in name)")):
        sharded = adapters(tmp_path / f"train_{name}.py", more=more)
        done = sharded.fork(2, shards, tmp_path / name, strategy="zero3")
        assert done.code and re.search(r"down.* was added to the model after new_model", done.out), done.out


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_plan_says_who_trains_what(shards, tmp_path):
    muon = changed(tmp_path / "train_muon.py", ("model.embed.weight.requires_grad_(False)", "example = "))
    done = muon.train(0, shards, tmp_path / "run", optimizer="muon", steps=1)
    assert done.code == 0, done.out
    said = re.search(r"optimizer +(.*); ([\d,]+) frozen", done.out)
    counts = {name: number(count) for name, count in re.findall(r"(\w+) trains ([\d,]+\d)", said[1])}
    whole = number(re.search(r"\n +parameters +([\d,]+), ", done.out)[1])
    model, _ = load_run(GPT2, tmp_path / "run")
    matrices = sum(p.numel() for p in model_module.hidden_matrices(model))
    frozen = model.embed.weight.numel()
    assert counts == {"AdamW": whole - matrices - frozen, "Muon": matrices}
    assert number(said[2]) == frozen


class Grouped(torch.optim.SGD):
    """Keeps a number in its groups, as schedulefree does."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_numbers_of_groups_and_frozen_parameters_do_not_begin_anew(world, tmp_path):
    def begin(optimizer):
        torch.manual_seed(0)
        model = MODELS["gpt2"]()
        model.embed.weight.requires_grad_(False)
        state = TrainState(model, [optimizer(model.parameters(), lr=1e-2)], run_of(world))
        return state

    idx = torch.arange(32).view(2, 16)
    for optimizer in (Grouped, torch.optim.AdamW):
        state = begin(optimizer)
        state.model(idx, idx)[0].backward()
        state.optimizer_step(1e-2, state.clip_gradients(1.0))
        out = tmp_path / optimizer.__name__
        checkpoints = ddp_utils.Checkpoints(out, world, 9, print)
        checkpoints.directory.mkdir(parents=True)
        checkpoints.save(3, state, {"samples": 7, "loss": 2.5, "settings": {"steps": 10}})
        checkpoints.close()
        said, resumed = [], begin(optimizer)
        resumed.load_state_dict(ddp_utils.load_checkpoint(out, print), said.append)
        assert not said and resumed.non_tensor_values() == state.non_tensor_values()
    with pytest.raises(UserError, match="LBFGS .* no closure"):
        begin(torch.optim.LBFGS)


# ------------------------------------------------------------------------------------- numbers for show


DATA_SHAPED = """class GPT2(GPT2):
    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        return x if cache else x + 0 * x.flatten(0, 1)[(idx.flatten() > 2).nonzero()[:, 0]].sum()

"""


def test_a_model_whose_shapes_depend_on_the_data_trains_without_mfu(shards, tmp_path, monkeypatch):
    monkeypatch.setattr("loggers.mfu.peak_flops", lambda device, say: 1e12)
    usual = Trainer("train_gpt2.py", **FLAGS).train(0, shards, tmp_path / "usual")
    assert "MFU is not shown" not in usual.out and steps_of(tmp_path / "usual")[-1]["mfu"] > 0
    trainer = changed(tmp_path / "train_shaped.py", (DATA_SHAPED, "WEB = "))
    done = trainer.train(0, shards, tmp_path / "run")
    assert done.code == 0 and done.out.count("MFU is not shown (") == 1, done.out
    assert all(step["mfu"] is None for step in steps_of(tmp_path / "run"))
    dry = trainer.here("--data", shards, "--dry-run", "--seq-len", "32")
    assert dry.code == 0 and "WARNING: activations of blocks are not counted (" in dry.out, dry.out
    assert "--strategy ddp fits without the activations of blocks." in dry.out


def test_a_trainer_states_the_flops_of_its_step(shards, tmp_path, monkeypatch):
    monkeypatch.setattr("loggers.mfu.peak_flops", lambda device, say: 1e12)
    shown = []
    begin = monitor.RunLog.begin

    def noted(self, *rest):
        shown.append(self.mfu.flops({}))
        begin(self, *rest)

    monkeypatch.setattr(monitor.RunLog, "begin", noted)
    for name, factor in (("one", 1.0), ("three", 3.0)):
        trainer = changed(tmp_path / f"train_{name}.py", (f"run.flops_factor = {factor}", "example = "))
        done = trainer.train(0, shards, tmp_path / name, steps=1)
        assert done.code == 0, done.out
    assert shown[1] == 3 * shown[0] > 0


@pytest.mark.parametrize("launched", [True, False])
def test_only_where_launch_ends_the_process_a_warm_up_takes_ctrl_c_for_itself(launched, world, monkeypatch):
    """Elsewhere it would end the kernel of a notebook."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(ddp_utils.process, "launched", launched)
    model = MODELS["gpt2"]()
    state = TrainState(model, [torch.optim.SGD(model.parameters(), lr=1.0)], run_of(world))
    try:
        state.warm_up(model.dummy_inputs(1, "cpu"))
        assert (signal.getsignal(signal.SIGINT) is ddp_utils.leave_at_once) == launched
    finally:
        signal.signal(signal.SIGINT, before)


