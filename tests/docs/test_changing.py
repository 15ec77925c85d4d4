"""The recipes of docs/changing.md, read from the page: each works and touches no other file. A run of it that
was killed resumes bit for bit. Those on data, evaluations and teachers are in other files.
"""

import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from copies import guide_blocks
from runs import (
    Trainer,
    assert_same_run,
    copy_of_the_first_half,
    edited,
    ended,
    evaluations_of,
    log_of,
    module_of,
    steps_of,
    tensors_of,
)

import model
from cli.flags import STRATEGIES
from ddp_utils import list_checkpoints, read_checkpoint
from weights.use import load_run

# a heading, or a piece of code with its place and, if a heading has several, a name
PIECE = re.compile(r"^### (.+)$|^(?:\*\*(.+?)\*\*)?.*([Bb]efore|[Ii]nstead of) `(.+?)`.*\n\n"
                   r"```python\n([\s\S]*?)^```$", re.M)
# the most lines that each may take
BOUNDS = {"an optimizer of your own": 3, "a z-loss": 1, "another schedule": 3, "a curve": 1,
          "norms of the gradients": 4, "activations": 8, "a metric": 5,
          "the best by another number": 1, "early stopping": 3, "stop at a loss": 1, "a batch that grows": 4,
          "another loss": 3, "a frozen embedding": 2, "a block frozen until step 1000": 5,
          "a loss term from inside the model": 5, "a number that the loop keeps": 3,
          "a mask rate that falls": 6, "a size": 1, "a preset": 1}
ELSEWHERE = {"weighted losses and policy gradients", "a teacher", "data of your own", "fine-tune with LoRA",
             "a profile", "stop or save by the clock", "weights from another architecture"}
FIRST_TIER = ("an optimizer of your own", "a number that the loop keeps", "early stopping",
              "a batch that grows")
MASKED = "a mask rate that falls", "a preset"
FLAGS = {"steps": 16, "save_every": 4, "eval_every": 4, "keep_last": 9, "batch": 3, "max_new_tokens": 3}
FULL = pytest.mark.full


def recipes() -> dict[str, list[tuple[str, str, str]]]:
    """The pieces of each recipe: how, where and what."""
    found, heading = {}, ""
    for title, name, how, anchor, code in PIECE.findall((ROOT / "docs" / "changing.md").read_text()):
        heading, name = title or heading, name or heading
        if code:
            found.setdefault(name[0].lower() + name[1:], []).append((how.lower(), anchor, code))
    return found


RECIPES = recipes()


def changed(name: str, directory: Path, *replaced: tuple[str, str]) -> Trainer:
    """A copy of a trainer with this change, in which these texts are replaced."""
    pieces = []
    for how, anchor, code in RECIPES[name]:
        for old, new in (*replaced, ("step < 1000", "step < 6"), ("best_step + 2000", "best_step + 4"),
                         ("< 2.0", "< 5.3")):
            code = code.replace(old, new)
        pieces.append((how, anchor, code))
    path = directory / f"train_{name.replace(' ', '_')}.py"
    of_mlm = {"script": "train_mlm.py", "max_new_tokens": None} if name in MASKED else {}
    return edited(path, *pieces, **FLAGS | of_mlm)


def assert_resumes(train, shards, base: Path, **flags):
    """Whether the run base/whole equals one that goes on from its first checkpoint."""
    copy_of_the_first_half(base / "whole", base / "resumed")
    ended(train(shards, base / "resumed", **flags), "resuming after step 4")
    assert_same_run(base / "whole", base / "resumed")


def test_the_page_has_these_recipes_and_each_is_short():
    assert RECIPES.keys() == BOUNDS.keys() | ELSEWHERE
    long = {name for name, bound in BOUNDS.items()
            if sum(len(code.splitlines()) for _, _, code in RECIPES[name]) > bound}
    assert not long


@pytest.fixture(scope="module")
def plain(shards, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    ended(Trainer("train_gpt2.py", **FLAGS).train(0, shards, out))
    return out


# what the log shows of a change: of its steps (s) and its evaluations (e)
SHOWN = {
    "early stopping": lambda s, e: len(s) < 16,
    "a batch that grows": lambda s, e: [s[i]["tokens"] / s[0]["tokens"] for i in (7, 8)] == [8, 10],
    "stop at a loss": lambda s, e: 4 < len(s) < 16,
    "a preset": lambda s, e: max(record["lr"] for record in s) == 5e-4,
    "a mask rate that falls": lambda s, e: (s[0]["labels"], s[-1]["labels"]) == (120, 60),
    "a metric": lambda s, e: 0 <= e[-1]["val_spaces"] <= 1,
    "the best by another number": lambda s, e: e[0]["best_metric"] == e[0]["val_bits_per_byte"],
    "a loss term from inside the model": lambda s, e: s[-1]["square"] > 0 and e[-1]["val_square"] > 0,
}


CURVES = {"activations": "up_0", "norms of the gradients": "gradient_0", "a curve": "embed_norm"}
OWN_FLAGS = {"early stopping": {"lr": 0},  # so that the loss doesn't fall after the first evaluation
             "activations": {"checkpoint_activations": "selective"},
             "a size": {"size": "mini", "n_layer": None, "d_model": None},
             "a preset": {"preset": "mine", "lr": None}}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FIRST_TIER else FULL) for name in BOUNDS])
def test_a_change_works_and_resumes(name, plain, shards, tmp_path):
    train = partial(changed(name, tmp_path).train, 0)
    flags = OWN_FLAGS.get(name, {})
    ended(train(shards, tmp_path / "whole", **flags))
    before = log_of(tmp_path / "whole")
    assert before != log_of(plain)
    shown = SHOWN.get(name, lambda s, e: s[-1][CURVES.get(name, "loss")] > 0)
    assert shown(steps_of(tmp_path / "whole"), evaluations_of(tmp_path / "whole"))
    assert_resumes(train, shards, tmp_path, **flags)
    if "stop" in name:  # it is at its end
        assert train(shards, tmp_path / "whole", **flags).code == 0 and log_of(tmp_path / "whole") == before


@pytest.mark.parametrize("ranks, thaw, flags", [
    (0, 6, {"strategy": "zero2"}),  # in this process, since starting two takes 9 s
    *(pytest.param(2, thaw, flags, marks=FULL) for thaw, flags in (
        (6, {"strategy": "zero3"}), (2, {"comm": "late"}),
        (6, {"optimizer": "adam-atan2", "strategy": "zero1", "ema": 0.9})))])
def test_a_block_is_frozen_until_a_step_and_resumes_before_and_after_it(ranks, thaw, flags, shards, tmp_path):
    trainer = changed("a block frozen until step 1000", tmp_path, ("step < 1000", f"step < {thaw}"))
    train = partial(trainer.fork if ranks else trainer.train, ranks)
    flags |= {"n_layer": 2, "steps": 12}
    ended(train(shards, tmp_path / "whole", **flags))
    for step, path in zip((4, 8), list_checkpoints(tmp_path / "whole")[::-1]):
        optimized = read_checkpoint(path)["tensors"]["optimizer"]
        blocks = {name.split(".")[2] for name in optimized if "blocks" in name}
        assert blocks == ({"0", "1"} if step > thaw else {"1"})
    assert_resumes(train, shards, tmp_path, **flags)


@pytest.mark.full
def test_the_clock_of_rank_0_stops_and_saves(shards, tmp_path):
    """The other rank's clock goes a billion times faster. Neither changes what is trained."""
    def run(name, out, *replaced):
        other = "time.monotonic()", "(time.monotonic() * 10 ** (9 * world.rank))"
        often = "step % 10", "step % 2"
        trainer = changed("stop or save by the clock", tmp_path / name, other, often, *replaced)
        ended(trainer.fork(2, shards, tmp_path / out))

    run("usual", "whole")
    run("saving", "saved", ("1200", "0"))
    run("stopping", "stopped", ("8 * 3600", "0"))  # after step 2, with a checkpoint
    run("usual", "stopped")
    for out, checkpoints in (("whole", 4), ("saved", 8), ("stopped", 5)):
        assert_same_run(tmp_path / "whole", tmp_path / out)
        assert len(list_checkpoints(tmp_path / out)) == checkpoints


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_another_architecture_are_taken(strategy, plain, shards, tmp_path):
    """But not by a run that resumes. What they lack begins as in a new model."""
    saved = read_checkpoint(list_checkpoints(plain)[0])
    torch.manual_seed(0)
    expected = model.GPT2(model.GPT2Config(**saved["model_config"])).state_dict()
    theirs, file = saved["tensors"]["model"], tmp_path / "theirs.pt"
    del theirs["positions.weight"]
    torch.save({name.replace("transformer.blocks", "layers"): theirs[name] for name in theirs}, file)
    train = partial(changed("weights from another architecture", tmp_path, ("theirs.pt", str(file))).fork, 2,
                    strategy=strategy, lr=0)
    ended(train(shards, tmp_path / "whole"))
    file.unlink()
    assert_resumes(train, shards, tmp_path)
    found = tensors_of(tmp_path / "resumed")
    assert all(torch.equal(found[f"model/{name}"], tensor) for name, tensor in (expected | theirs).items())


def test_checkpoints_are_averaged(plain):
    code, = guide_blocks("Average checkpoints")
    exec(code.replace("runs/gpt2-tiny-stdlib-bpe4096", str(plain)), {})
    files = [plain / "checkpoints" / "average.pt", *list_checkpoints(plain)[:3]]
    mean, *parts = (read_checkpoint(path)["tensors"]["model"] for path in files)
    for name, tensor in mean.items():
        torch.testing.assert_close(3 * tensor, sum(part[name] for part in parts))
    ended(Trainer("train_gpt2.py").here("--resume", files[0], "--eval-only"), "val_loss")


@pytest.mark.long
@pytest.mark.parametrize("name", BOUNDS)
def test_a_change_is_killed_on_two_processes(name, shards, tmp_path):
    changed(name, tmp_path, ("< 2.0", "< 1")).check_killed_run(tmp_path, 2, shards, batch=2, steps=40)


# ------------------------------------------------------------------------------------------------ LoRA

LORA = {"steps": 8, "eval_every": 4, "keep_last": 9, "warmup": 1}
OWN = {"gpt2": {"max_new_tokens": 3}, "hrm": {"max_new_tokens": 3, "bp_steps": 4}, "mlm": {"window": 16}}
CLASSES = {"gpt2": model.GPT2, "hrm": model.HRM, "mlm": model.MLM}


def low_rank(directory: Path, name: str) -> Trainer:
    """A copy of this trainer as the guide has it."""
    (*place, code), export = RECIPES["fine-tune with LoRA"]
    code = re.sub(r"\bGPT2\b", CLASSES[name].__name__, code)
    return edited(directory / f"train_lora_{name}.py", (*place, code), export, script=f"train_{name}.py",
                  **LORA, **OWN[name])


@pytest.fixture(scope="module")
def base_of(shards, tmp_path_factory):
    """A trained run of each trainer that is asked for."""
    @cache
    def base(name):
        out = tmp_path_factory.mktemp("base") / name
        ended(Trainer(f"train_{name}.py", **LORA, **OWN[name]).train(0, shards, out, lr=1e-2, steps=60))
        return out
    return base


@pytest.mark.parametrize("name, ranks, changes", [
    ("gpt2", 0, {}), *(pytest.param(*case, marks=FULL) for case in (
        ("hrm", 2, {"strategy": "zero3"}), ("mlm", 2, {"strategy": "zero1", "ema": 0.9})))])
def test_thin_matrices_alone_learn_and_are_merged(name, ranks, changes, base_of, shards, tmp_path):
    """The merged model is a plain one with the same logits."""
    trainer, base = low_rank(tmp_path, name), base_of(name)
    flags = {"init_from": base, "lr": 1e-2} | changes
    train = partial(trainer.fork if ranks else trainer.train, ranks)
    ended(train(shards, tmp_path / "whole", **flags))
    saved = read_checkpoint(list_checkpoints(tmp_path / "whole")[0])["tensors"]
    plain = read_checkpoint(list_checkpoints(base)[0])["tensors"]["model"]
    thin = saved["model"].keys() - plain.keys()
    assert {name.rpartition(".")[2] for name in thin} == {"a", "b"}
    assert all(torch.equal(saved["model"][key], plain[key]) for key in plain)
    assert {key.rpartition("/")[0] for key in saved["optimizer"]} == thin
    loss = evaluations_of(base)[-1]["val_loss"]
    assert evaluations_of(tmp_path / "whole")[-1]["val_loss"] < loss
    assert steps_of(tmp_path / "whole")[0]["loss"] < loss + 0.5
    assert_resumes(train, shards, tmp_path, **flags)

    module = module_of(trainer.script)
    ours, _ = load_run(module.LoRA, tmp_path / "whole", precision="fp32")
    run = SimpleNamespace(saved={"tensors": {group: dict(named) for group, named in saved.items()}})
    module.merge(run)
    assert run.model_class is CLASSES[name]
    merged, idx = run.model_class(ours.config).eval(), torch.arange(64).view(2, 32)
    for tensors, same in ((run.saved["tensors"]["model"], True), (plain, False)):
        merged.load_state_dict(tensors)
        with torch.no_grad():
            difference = (merged(idx) - ours(idx)).abs().max()
        assert difference < 1e-4 if same else difference > 1e-2  # the control: something was learned


@pytest.mark.full
@pytest.mark.parametrize("name, kind, file", [
    ("gpt2", "gguf", "model.gguf"), ("hrm", "hf", "hf/config.json"), ("mlm", "hf", "hf/config.json")])
def test_an_export_is_merged_and_other_uses_need_no_merging(name, kind, file, base_of, shards, tmp_path):
    """Without the guide's lines before it, --export is refused."""
    trainer, out = low_rank(tmp_path, name), tmp_path / "run"
    ended(trainer.train(0, shards, out, init_from=base_of(name), lr=1e-2))
    use = ("--fill", "a[MASK]b") if name == "mlm" else ("--prompt", "a")
    for flags in (["--export", kind], use, ["--eval-only"]):
        ended(trainer.here("--out", out, *flags))
    assert (out / file).is_file()
    path = Path(trainer.script).with_name(f"train_unmerged_{name}.py")
    path.write_text(Path(trainer.script).read_text().replace("    merge(run)\n", "    pass\n"))
    ended(Trainer(str(path)).here("--out", out, "--export", kind), "LoRA", code=2)
