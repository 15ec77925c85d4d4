"""train_gpt2.py. The loop is that of train_hrm.py, so what is tested here holds for all trainers."""

import itertools
import json
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT
from runs import Trainer, evaluations_of, steps_of

import data
import ddp_utils
import startup.run
import train_gpt2
from cli.errors import UserError
from ddp_utils import list_checkpoints
from model import GPT2 as GPT2Model
from prepare import packing
from prepare.pipeline import prepare
from weights.init_from import nearest_size

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5)
ONE = {"steps": 1, "eval_every": 1}


def test_fp16_scales_the_loss_and_resumes(tmp_path, shards):
    done = GPT2.train(0, shards, tmp_path / "run", precision="fp16", batch=1, steps=20, eval_every=20)
    assert done.code == 0 and "GradScaler on" in done.out, done.out
    assert evaluations_of(tmp_path / "run")[-1]["val_loss"] < 5.6
    assert torch.load(list_checkpoints(tmp_path / "run")[0], weights_only=True)["scaler"]["scale"] > 0
    again = GPT2.train(0, shards, tmp_path / "run", precision="fp16", batch=1, steps=24)
    assert again.code == 0 and "resuming after step 20" in again.out


def test_a_run_above_the_loss_of_a_model_without_context_says_so(tmp_path, shards):
    """After a tenth of its steps, at each evaluation."""
    done = GPT2.train(0, shards, tmp_path / "run", lr=1e-9, steps=21, eval_every=2, eval_batches=1)
    found = re.findall(r"WARNING: after (\d+) steps .*?(\d\.\d{4})", done.out)
    assert [int(step) for step, _ in found] == [4, 6, 8, 10, 12, 14, 16, 18, 20, 21], done.out
    entropy = data.unigram_entropy([data.Dataset([shards], 32).val[""]])
    assert {text for _, text in found} == {f"{entropy:.4f}"}


def found(*flags) -> dict:
    """The flags that a run would have."""
    world = ddp_utils.init("gloo", "cpu")
    try:
        with mock.patch.object(startup.run, "start", lambda command: world):
            command = train_gpt2.parse_args([str(flag) for flag in flags])
            return startup.run.find_run(GPT2Model, command, vars(train_gpt2)).args
    finally:
        torch.distributed.destroy_process_group()


def test_shape_context_and_tokenizer_come_from_the_weights(tmp_path, shards, corpus, monkeypatch):
    """Of a run directory, of a checkpoint in it, of hf:. Without --size, and before any data are prepared.
    Prepared data and --tokenizer decide first.
    """
    monkeypatch.chdir(tmp_path)
    assert GPT2.train(0, shards, "run", seq_len=48, **ONE).code == 0
    assert GPT2.here("--out", "run", "--export").code == 0
    for source, own in (("run", "run"), (list_checkpoints("run")[0], "run"), ("hf:run/hf", "run/hf")):
        args = found("--init-from", source, "--data", f"text:{corpus}")
        assert (args.size, args.seq_len, args.n_layer, args.lr) == ("tiny", 48, 1, 3e-5)
        assert args.tokenizer == f"{own}/tokenizer.json"
    assert found("--init-from", "run", "--n-layer", "1", "--data", shards).tokenizer is None
    assert found("--init-from", "run", "--tokenizer", "bytes").tokenizer == "bytes"
    for source, flags, named in (("run", ["--seq-len", "64"], "48 tokens.*--seq-len"),
                                 ("hf:run/hf", ["--n-layer", "2"], "n_layer 1, not 2"),
                                 ("nowhere", [], "nowhere")):
        with pytest.raises(UserError, match=named):
            found("--init-from", source, *flags)
    Path("run/hf/config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="'llama'.*'gpt2'"):
        found("--init-from", "hf:run/hf")
    tuned = GPT2.here("--init-from", "run", "--data", shards, "--steps", "2", "--out", "tuned")
    assert tuned.code == 0 and "seq_len 48" in tuned.out, tuned.out
    assert "starting from run/checkpoints/step_" in tuned.out
    other = Trainer("train_hrm.py").here("--init-from", "run", "--data", f"text:{corpus}")
    assert other.code == 2 and "GPT2, not HRM" in other.out, other.out
    assert not Path("shards").exists()


def test_the_size_of_weights_is_the_nearest():
    config = {"n_layer": 24, "n_head": 16, "d_model": 1024, "seq_len": 1024}
    record = {"model_config": config, "settings": {}}
    assert nearest_size(train_gpt2.SIZES, record) == "gpt2-medium"
    assert nearest_size(train_gpt2.SIZES, record | {"settings": {"size": "gpt2"}}) == "gpt2"


def test_refusals(tmp_path, shards, monkeypatch):
    out = tmp_path / "modern"
    done = GPT2.train(0, shards, out, modern=True, attention="isolated", steps=2, eval_every=2)
    assert done.code == 0 and "GPT2 tiny, seq_len 32, attention isolated, n_layer 1, " in done.out, done.out
    hrm = Trainer("train_hrm.py")
    go_on = GPT2.flags(shards, out, steps=4)
    use = ["--out", out, "--prompt", "x"]
    for of, flags, named in ((hrm, use, "family GPT2"),
                             (GPT2, [*go_on, "--n-layer", "2"], "n_layer 1, not 2"),
                             (GPT2, [*go_on, "--init-from", out], "init_from None, not "),
                             (GPT2, [*go_on, "--no-modern"], "modern True, not False")):
        done = of.here(*flags)
        assert done.code == 2 and named in done.out, done.out
    init = GPT2Model.__init__

    def with_one_more(self, config):  # as in another version
        init(self, config)
        self.gain = torch.nn.Parameter(torch.ones(config.d_model))

    monkeypatch.setattr(GPT2Model, "__init__", with_one_more)
    for flags in (go_on, use):
        done = GPT2.here(*flags)
        assert done.code == 2 and "has gain" in done.out, done.out


def test_the_recipe_fits_three_processes_and_its_number_stays(tmp_path, shards):
    """The 16 sequences of `tiny` become 15, and no row is skipped or repeated when one process goes on."""
    flags = {"global_batch": None, "out": tmp_path / "run", "log_every": 1, "save_every": 2}
    three = GPT2.fork(3, shards, steps=2, **flags)
    assert three.code == 0 and " 5 x accumulation 1 x processes 3 = 15 sequences\n" in three.out, three.out
    assert re.search("WARNING: 15 .* 16 ", three.out)
    one = GPT2.train(0, shards, steps=4, **flags)
    assert one.code == 0 and " 5 x accumulation 3 x processes 1 = 15 sequences\n" in one.out, one.out
    assert [line["tokens"] for line in steps_of(tmp_path / "run")] == [15 * 32 * step for step in range(1, 5)]


def test_what_a_run_shows(tmp_path, shards):
    """Each entry has the time, and the first one has the date. The plan and what --prompt prints have
    neither. The command at the end works.
    """
    out, stamp = tmp_path / "run", r"\d\d:\d\d:\d\d "
    done = GPT2.train(0, shards, out, steps=2, save_every=2, eval_every=2, eval_batches=1, max_new_tokens=3)
    text = (out / "train.log").read_text()
    assert done.code == 0 and done.out.endswith(text), done.out
    assert re.match(r"\d{4}-\d\d-\d\d " + stamp, text)
    for entry in ("run directory", "[Rank 0/1 | Node node0 | Device cpu] step 1/2 | loss", "saved step 2",
                  "step 2 | ", "a sample after", "2 steps in", "training complete", "next:"):
        assert re.search(f"^{stamp}{re.escape(entry)}", text, re.M), (entry, text)
    lines = text.splitlines()
    plan = lines[lines.index("machine"):]
    plan = [*itertools.takewhile(lambda line: not re.match(stamp, line), plan)]
    assert plan.count("steps and batches") == 1 and max(map(len, plan)) <= 80, plan
    assert re.match("  model +layers 1, heads 2, width 32, context 32, parameters ",
                    plan[plan.index("model and data") + 1])
    prompt = shlex.split(lines[-1])
    assert prompt[:2] == ["python", os.path.relpath(ROOT / GPT2.script)]
    answer = GPT2.here(*prompt[2:], "--max-new-tokens", "3")
    assert answer.code == 0 and "The" in answer.out and not re.search(stamp, answer.out), answer.out


@pytest.mark.full
def test_a_small_text_is_evaluated_and_saved_at_the_asked_intervals_only(tmp_path, corpus):
    """Although each step is more than a pass over it. The run says so, and what it saves and removes."""
    (tmp_path / "notes.txt").write_text(corpus.read_text()[:20_000])
    small = prepare(f"text:{tmp_path / 'notes.txt'}", tmp_path / "small", "bytes", workers=1)
    flags = {"out": tmp_path / "run", "global_batch": 600}
    done = GPT2.train(0, small, **flags, steps=12, eval_every=4, save_every=6)
    assert [line["step"] for line in evaluations_of(tmp_path / "run")] == [4, 8, 12]
    assert re.findall(r"^\S+ saved step (\d+) \(", done.out, re.MULTILINE) == ["4", "6", "8", "12"]
    assert re.findall("; removed step_([0-9]+)", done.out) == ["00000004"]
    longer = GPT2.train(0, small, **flags, steps=20, eval_every=20, save_every=20)
    warning = re.compile(r"WARNING: .* 2\d times")
    assert warning.search(longer.out) and not warning.search(done.out), longer.out


@pytest.mark.parametrize("script, ranks", [("train_gpt2.py", 3), ("train_mlm.py", 0)])
def test_a_run_ends_at_an_id_beyond_the_vocabulary_with_its_file(script, ranks, tmp_path):
    """In whichever shard it is, alike on all ranks, and not with an infinite loss."""
    tokens = np.random.default_rng(0).integers(0, 256, 32 * 200 + 1).astype("u2")
    packing.write_shard(tmp_path / "x_train_1.bin", [tokens], "uint16")
    packing.write_shard(tmp_path / "x_val_1.bin", [tokens[:700]], "uint16")
    tokens[::32] = 300
    packing.write_shard(tmp_path / "x_train_2.bin", [tokens], "uint16")
    trainer = Trainer(script, tokenizer="bytes", ff=None if "gpt2" in script else 48)
    done = trainer.fork(ranks, tmp_path, tmp_path / "run")
    assert done.code == 2 and re.search("x_train_2.bin .* 300, .* 257 .*--tokenizer", done.out), done.out
    assert "Traceback" not in done.out and "complete" not in done.out


def test_weights_that_are_not_finite_are_refused_when_they_are_read(shards, tmp_path, monkeypatch):
    assert GPT2.train(0, shards, tmp_path / "source", steps=1).code == 0
    monkeypatch.setattr(ddp_utils, "bit_sums", lambda tensors: {})  # it was saved so
    file = list_checkpoints(tmp_path / "source")[0]
    saved = torch.load(file, weights_only=True)
    saved["tensors"]["model"]["norm.weight"][0] = torch.inf
    torch.save(saved | {"sums": {}}, file)
    done = GPT2.train(0, shards, tmp_path / "run", init_from=tmp_path / "source", steps=1)
    assert done.code == 2 and "error: norm.weight of " in done.out, done.out
