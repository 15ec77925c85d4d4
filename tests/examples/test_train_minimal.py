"""train_minimal.py computes the bits of train_gpt2.py: losses, evaluations, weights and moments of one and
two processes, in float32 and bfloat16, on text and on pairs, whole and resumed. Small changes of it don't.
"""

import json
import re
import shutil

import pytest
import torch
from conftest import ROOT
from processes import fork
from runs import Trainer, ended, evaluations_of, steps_of, tensors_of

from prepare.pipeline import prepare

# four micro-batches on one process, two on each of two; seven steps, killed in the fifth
SHAPE = dict(n_layer=2, n_head=2, d_model=32, seq_len=64)
GPT2 = Trainer("train_gpt2.py", **SHAPE, batch=3, global_batch=12, steps=7, eval_every=3, save_every=3,
               lr=3e-3, warmup=2, eval_batches=0, max_new_tokens=5, seed=3)
CONSTANTS = {
    "SHAPE = ": f"SHAPE = {SHAPE}",
    "BATCH, GLOBAL_BATCH = ": "BATCH, GLOBAL_BATCH = 3, 12",
    "STEPS, EVERY = ": "STEPS, EVERY = 7, 3",
    "LR, WARMUP, ": "LR, WARMUP, BETAS, WEIGHT_DECAY, CLIP, SEED = 3e-3, 2, (0.9, 0.95), 0.1, 1.0, 3",
}
TYPES = {"fp32": "float32", "bf16": "bfloat16"}
KILL = {"    optimizer.step()": "    os._exit(9) if step == 4 else optimizer.step()"}
CONTROLS = {
    "rows in another order": {"        arrays = ": "        arrays = data.read_rows(dataset.train, rows)"},
    "the mean over this process's labels": {
        "    labels = ": "    labels = sum((y >= 0).sum() for _, y in batches)"},
    "no clipping": {"    torch.nn.utils.clip_grad_norm_": "    pass"},
    "gradients that are never cleared": {"    optimizer.zero_grad()": "    pass"},
    "a rate that is a step late": {'        group["lr"] = ': '        group["lr"] = learning_rate('
                                   'max(step - 1, 0), STEPS, LR, WARMUP, "cosine", 0.1)'},
    "activations in float32": {"use_device(": "use_device(model, device, torch.float32)"},
}
NEEDED = "model.py data.py ops vocab cli".split()  # as docs/changing.md says
LOSS = re.compile(r"step (\d+) \| (loss|validation loss) (\S+)")


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """A part of the corpus, since each run evaluates all that is held out, and pairs with responses of many
    lengths, in rows of the 64 tokens of SHAPE.
    """
    directory = tmp_path_factory.mktemp("data")
    (directory / "part.txt").write_text(corpus.read_text(encoding="utf-8")[:64_000], encoding="utf-8")
    lines = (json.dumps({"q": f"{i} times {i}?", "a": "so " * (i % 9) + str(i * i)}) for i in range(600))
    (directory / "pairs.jsonl").write_text("\n".join(lines))
    return {"text": prepare(f"text:{directory}/part.txt", directory / "text", "bytes", workers=1),
            "pairs": prepare(f"jsonl:{directory}/pairs.jsonl", directory / "pairs", "bytes", row=64,
                             prompt_field="q", response_field="a", val_split="hash:0.2")}


def minimal(directory, shards, changes: dict):
    """A copy of train_minimal.py in a directory, with other lines instead of those that begin so."""
    lines = (ROOT / "examples" / "train_minimal.py").read_text().splitlines()
    where = {"SHARDS, CHECKPOINT = ": f"SHARDS, CHECKPOINT = Path({str(shards)!r}), Path('run/state.pt')"}
    for begin, new in (where | CONSTANTS | changes).items():
        at, = (i for i, line in enumerate(lines) if line.startswith(begin))
        lines[at] = new
    directory.mkdir(exist_ok=True)
    path = directory / "train.py"
    path.write_text("\n".join(lines))
    return path


def run_minimal(directory, shards, ranks, changes, code=0) -> tuple[dict, dict]:
    """Runs a copy. Returns its printed losses, by step and kind, and its last checkpoint."""
    done = ended(fork(ranks, minimal(directory, shards, changes), cwd=directory), code=code)
    printed = {(int(step), kind): float(value) for step, kind, value in LOSS.findall(done.out)}
    return printed, torch.load(directory / "run" / "state.pt")


def assert_same_losses(printed: dict, out) -> None:
    """Whether these are losses of train_gpt2.py in every digit."""
    theirs = {(record["step"], "loss"): record["loss"] for record in steps_of(out)}
    theirs |= {(record["step"], "validation loss"): record["val_loss"] for record in evaluations_of(out)}
    assert printed and printed == {key: theirs[key] for key in printed}


def assert_same(printed: dict, saved: dict, out) -> None:
    """Whether these are the losses and the last weights and moments of train_gpt2.py, bit for bit."""
    assert_same_losses(printed, out)
    tensors = tensors_of(out)
    groups = saved["optimizer"]["param_groups"]
    # matrices first, as in the groups of make_optimizers
    names = sorted(saved["model"], key=lambda name: tensors[f"model/{name}"].ndim < 2)
    for i, name in zip((i for group in groups for i in group["params"]), names, strict=True):
        assert torch.equal(saved["model"][name], tensors[f"model/{name}"]), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            ours = saved["optimizer"]["state"][i][key]
            assert torch.equal(ours, tensors[f"optimizer/{name}/{key}"]), (name, key)


@pytest.mark.parametrize("ranks, kind, precision, controls", [
    (0, "text", "fp32", {}), (2, "pairs", "bf16", CONTROLS),
    pytest.param(2, "text", "fp32", {}, marks=pytest.mark.full)])
def test_the_same_bits_whole_and_resumed(tmp_path, prepared, ranks, kind, precision, controls):
    """The controls are killed in their fifth step; their losses of four differ."""
    shards, typed = prepared[kind], {"use_device(": f"use_device(model, device, torch.{TYPES[precision]})"}
    ended(GPT2.fork(ranks, shards, tmp_path / "gpt2", precision=precision))
    whole = run_minimal(tmp_path / "whole", shards, ranks, typed)
    assert len(whole[0]) == 10  # seven steps and three evaluations
    assert_same(*whole, tmp_path / "gpt2")
    first, saved = run_minimal(tmp_path / "killed", shards, ranks, typed | KILL, code=9)
    assert saved["step"] == 3 and max(first)[0] == 4
    shutil.copytree(tmp_path / "killed", tmp_path / "without")
    rest, saved = run_minimal(tmp_path / "killed", shards, ranks, typed)
    assert min(rest)[0] == 4 and first | rest == whole[0]
    assert_same(rest, saved, tmp_path / "gpt2")
    forgetful = typed | {"    optimizer.load_state_dict": "    pass"}
    with pytest.raises(AssertionError):
        assert_same(*run_minimal(tmp_path / "without", shards, ranks, forgetful), tmp_path / "gpt2")
    for name, change in controls.items():
        printed, _ = run_minimal(tmp_path / name, shards, ranks, typed | KILL | change, code=9)
        with pytest.raises(AssertionError):
            assert_same_losses(printed, tmp_path / "gpt2")


def test_it_is_a_page_and_runs_beside_copies_of_few_files(tmp_path, prepared):
    """As docs/changing.md says."""
    text = (ROOT / "examples" / "train_minimal.py").read_text()
    assert text.count("\n") <= 100 and "ddp_utils" not in text
    path = minimal(tmp_path, prepared["text"], {"STEPS, EVERY = ": "STEPS, EVERY = 1, 1"})
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "ddp_utils.py").touch()  # with it, processes.py forgets the modules of this repository
    assert len(LOSS.findall(ended(fork(0, path, cwd=tmp_path)).out)) == 2
