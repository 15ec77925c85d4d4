"""The guide's section on LoRA, in a copy of each trainer: what learns, and what is merged before --export."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import SMALL, Trainer, evaluations_of, module_of, steps_of
from test_own_data import assert_resumes, code_of
from test_own_evaluation import USE, changed, ranks_of

import model
from ddp_utils import list_checkpoints, read_checkpoint
from weights.use import load_run

LORA, EXPORT = code_of("Fine-tune with LoRA")
FULL = pytest.mark.full
FLAGS = {"steps": 8, "eval_every": 4, "keep_last": 9, "warmup": 1}
OWN = {"gpt2": {"max_new_tokens": 3, "seq_len": 32}, "hrm": {"max_new_tokens": 3, "ff": 64, "bp_steps": 4},
       "mlm": {"ff": 48, "window": 16}}
CLASSES = {"gpt2": model.GPT2, "hrm": model.HRM, "mlm": model.MLM}
MORE = [(0, {}), (2, {}), (2, {"strategy": "zero1", "ema": 0.9}), (2, {"strategy": "zero2"}),
        (2, {"strategy": "zero3"})]
CASES = [("gpt2", 0, {}), *[pytest.param(name, *more, marks=FULL) for name in CLASSES for more in MORE
                            if (name, *more) != ("gpt2", 0, {})]]
EXPORTS = [pytest.param(*case, marks=FULL) for case in (
    ("gpt2", "hf"), ("hrm", "hf"), ("mlm", "hf"), ("gpt2", "gguf"))]


def low_rank(directory: Path, name: str) -> Trainer:
    """A copy of this trainer as the guide has it."""
    code = re.sub(r"\bGPT2\b", CLASSES[name].__name__, LORA)
    path = directory / f"train_lora_{name}.py"
    changed(path, (code, "BETAS = "), (EXPORT, USE), script=f"train_{name}.py")
    return Trainer(str(path), **FLAGS, **OWN[name])


@pytest.fixture(scope="module")
def bases(shards, tmp_path_factory) -> dict[str, Path]:
    """A trained run of each trainer that was asked for."""
    class Bases(dict):
        def __missing__(self, name):
            out = tmp_path_factory.mktemp("base") / name
            done = Trainer(f"train_{name}.py", **FLAGS, **OWN[name]).train(0, shards, out, lr=1e-2, steps=60)
            assert done.code == 0, done.out
            return self.setdefault(name, out)
    return Bases()


def tensors_of(out: Path, which: int = 0) -> dict[str, dict]:
    return read_checkpoint(list_checkpoints(out)[which])["tensors"]


@pytest.mark.parametrize("name, ranks, changes", CASES)
def test_thin_matrices_learn_and_are_merged(name, ranks, changes, bases, shards, tmp_path):
    """Nothing else does; the merged model is a plain one, with the same logits."""
    trainer, base = low_rank(tmp_path, name), bases[name]
    flags = {"init_from": base, "lr": 1e-2} | changes
    done = ranks_of(trainer, ranks)(shards, tmp_path / "whole", **flags)
    assert done.code == 0, done.out
    assert "WARNING" not in done.out, done.out
    assert re.search(r"AdamW trains ([\d,]+); ([\d,]+) frozen", done.out)
    saved, plain = tensors_of(tmp_path / "whole"), tensors_of(base)["model"]
    thin = saved["model"].keys() - plain.keys()
    assert {name.rpartition(".")[2] for name in thin} == {"a", "b"} and len(thin) % 8 == 0
    assert all(torch.equal(saved["model"][key], plain[key]) for key in plain), "something frozen has moved"
    assert {key.rpartition("/")[0] for key in saved["optimizer"]} == thin
    losses = [e["val_loss"] for e in evaluations_of(tmp_path / "whole")]
    assert min(losses) < evaluations_of(base)[-1]["val_loss"]
    assert_resumes(trainer, shards, tmp_path, ranks, **flags)

    module = module_of(trainer.script)
    ours, _ = load_run(module.LoRA, tmp_path / "whole", precision="fp32")
    run = SimpleNamespace(saved={"tensors": {group: dict(named) for group, named in saved.items()}})
    module.merge(run)
    assert run.model_class is CLASSES[name] and run.saved["tensors"]["model"].keys() == plain.keys()
    merged = run.model_class(ours.config).eval()
    merged.load_state_dict(run.saved["tensors"]["model"])
    idx = torch.randint(0, 256, (2, SMALL["seq_len"]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (merged(idx) - ours(idx)).abs().max() < 1e-4
        merged.load_state_dict(plain)
        assert (merged(idx) - ours(idx)).abs().max() > 1e-2, "the control: nothing was learned"


def test_it_begins_as_the_weights_that_it_starts_from(bases, shards, tmp_path):
    """With the losses of a run that trains all of them, in its first step."""
    trainer = low_rank(tmp_path, "gpt2")
    plain = Trainer("train_gpt2.py", **FLAGS, **OWN["gpt2"])
    for of, out in ((trainer, "lora"), (plain, "plain")):
        assert of.train(0, shards, tmp_path / out, init_from=bases["gpt2"], steps=2, save_every=2).code == 0
    ours, theirs = (steps_of(tmp_path / out) for out in ("lora", "plain"))
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=1e-6)
    assert ours[0]["grad_norm"] < 0.9 * theirs[0]["grad_norm"]


@pytest.mark.parametrize("name, kind", EXPORTS)
def test_an_export_is_merged_and_other_uses_need_no_merging(name, kind, bases, shards, tmp_path):
    """--export compares it with the merged model; without the guide's lines before it, it is refused."""
    trainer, out = low_rank(tmp_path, name), tmp_path / "run"
    assert trainer.train(0, shards, out, init_from=bases[name], lr=1e-2).code == 0
    done = trainer.here("--out", out, "--export", kind)
    assert done.code == 0 and "WARNING" not in done.out, done.out
    assert (out / {"hf": "hf/config.json", "gguf": "model.gguf"}[kind]).is_file()
    used = trainer.here("--out", out, *(("--fill", "a[MASK]b") if name == "mlm" else ("--prompt", "a")))
    assert used.code == 0, used.out
    evaluated = trainer.here("--out", out, "--eval-only")
    assert evaluated.code == 0, evaluated.out
    found = re.search(r'"val_loss": ([\d.]+)', evaluated.out)[1]
    assert float(found) == pytest.approx(evaluations_of(out)[-1]["val_loss"], abs=1e-5)
    if kind == "hf":
        plain = Trainer(f"train_{name}.py", **FLAGS, **OWN[name])
        again = plain.train(0, shards, tmp_path / "again", init_from=f"hf:{out / 'hf'}", steps=1)
        assert again.code == 0, again.out

    path = Path(trainer.script)
    unmerged = path.with_name(f"train_unmerged_{name}.py")
    unmerged.write_text(path.read_text().replace("    merge(run)\n", "    pass\n"))
    refused = Trainer(str(unmerged)).here("--out", out, "--export", kind)
    assert refused.code == 2 and "LoRA" in refused.out, refused.out
