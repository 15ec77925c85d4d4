"""train_gpt2.py. The loop is that of train_hrm.py, so what is tested here holds for all trainers."""

import os
import re
import shlex
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT
from runs import Trainer, ended, evaluations_of, steps_of

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
    out, flags = tmp_path / "run", {"precision": "fp16", "batch": 1}
    ended(GPT2.train(0, shards, out, steps=20, eval_every=20, **flags), "GradScaler on")
    assert evaluations_of(out)[-1]["val_loss"] < 5.6
    assert torch.load(list_checkpoints(out)[0], weights_only=True)["scaler"]["scale"] > 0
    ended(GPT2.train(0, shards, out, steps=24, **flags), "resuming after step 20")


def test_a_run_above_the_loss_of_a_model_without_context_says_so(tmp_path, shards):
    """After a tenth of its steps, at each evaluation."""
    done = GPT2.train(0, shards, tmp_path / "run", lr=1e-9, steps=21, eval_every=2, eval_batches=1)
    found = re.findall(r"WARNING: after (\d+) steps .*?(\d\.\d{4})", done.out)
    assert [int(step) for step, _ in found] == [*range(4, 21, 2), 21], done.out
    entropy = data.unigram_entropy([data.Dataset([shards], 32).val[""]])
    assert {text for _, text in found} == {f"{entropy:.4f}"}


def found(*flags) -> dict:
    """The flags that a run would have."""
    world = ddp_utils.init("gloo", "cpu")
    try:
        with mock.patch.object(startup.run, "start", lambda command: world):
            command = train_gpt2.parse_args([*map(str, flags)])
            return startup.run.find_run(GPT2Model, command, vars(train_gpt2)).args
    finally:
        torch.distributed.destroy_process_group()


def test_shape_context_and_tokenizer_come_from_the_weights(tmp_path, shards, corpus, monkeypatch):
    """Of a run directory, of a checkpoint in it, of hf:. Without --size, and before any data are prepared.
    Prepared data and --tokenizer decide first.
    """
    monkeypatch.chdir(tmp_path)
    ended(GPT2.train(0, shards, "run", seq_len=48, **ONE))
    ended(GPT2.here("--out", "run", "--export"))
    for source, own in (("run", "run"), (list_checkpoints("run")[0], "run"), ("hf:run/hf", "run/hf")):
        args = found("--init-from", source, "--data", f"text:{corpus}")
        assert (args.size, args.seq_len, args.n_layer, args.lr) == ("tiny", 48, 1, 3e-5)
        assert args.tokenizer == f"{own}/tokenizer.json"
    for flag, value, tokenizer in (("--data", shards, None), ("--tokenizer", "bytes", "bytes")):
        assert found("--init-from", "run", flag, value).tokenizer == tokenizer
    for source, flags, named in (("run", ["--seq-len", "64"], "48 tokens.*--seq-len"),
                                 ("hf:run/hf", ["--n-layer", "2"], "n_layer 1, not 2"),
                                 ("nowhere", [], "nowhere")):
        with pytest.raises(UserError, match=named):
            found("--init-from", source, *flags)
    tuned = GPT2.here("--init-from", "run", "--data", shards, "--steps", "2", "--out", "tuned")
    ended(tuned, "from run/checkpoints/step_")
    assert not Path("shards").exists()


def test_the_size_of_weights_is_the_nearest():
    config = {"n_layer": 24, "n_head": 16, "d_model": 1024, "seq_len": 1024}
    for settings, size in (({}, "gpt2-medium"), ({"size": "gpt2"}, "gpt2")):
        assert nearest_size(train_gpt2.SIZES, {"model_config": config, "settings": settings}) == size


def test_refusals(tmp_path, shards, monkeypatch):
    out = tmp_path / "modern"
    ended(GPT2.train(0, shards, out, modern=True, attention="isolated", **ONE), "attention isolated")
    go_on = GPT2.flags(shards, out, steps=4)
    use = ["--out", out, "--prompt", "x"]
    for script, flags, named in (("hrm", use, "family GPT2"),
                                 ("gpt2", [*go_on, "--init-from", out], "None, not "),
                                 ("gpt2", [*go_on, "--no-modern"], "modern True, not False")):
        ended(Trainer(f"train_{script}.py").here(*flags), named, code=2)
    init = GPT2Model.__init__

    def with_one_more(self, config):  # as in another version
        init(self, config)
        self.gain = torch.nn.Parameter(torch.ones(config.d_model))

    monkeypatch.setattr(GPT2Model, "__init__", with_one_more)
    for flags in (go_on, use):
        ended(GPT2.here(*flags), "has gain", code=2)


def test_the_recipe_fits_three_processes_and_its_number_stays(tmp_path, shards):
    """The 16 sequences of `tiny` become 15, and no row is skipped or repeated when one process goes on."""
    flags = {"global_batch": None, "out": tmp_path / "run", "save_every": 2}
    three = ended(GPT2.fork(3, shards, steps=2, **flags), " 5 x accumulation 1 x processes 3 = 15 ")
    assert re.search("WARNING: 15 .* 16 ", three.out)
    ended(GPT2.train(0, shards, steps=4, **flags), " 5 x accumulation 3 x processes 1 = 15 ")
    assert [line["tokens"] for line in steps_of(tmp_path / "run")] == [15 * 32 * step for step in range(1, 5)]


def test_what_a_run_shows(tmp_path, shards):
    """Each entry has the time, which the plan doesn't have. The command at the end works."""
    out, stamp = tmp_path / "run", r"\d\d:\d\d:\d\d "
    done = ended(GPT2.train(0, shards, out, **ONE))
    text = (out / "train.log").read_text()
    assert done.out.endswith(text), done.out
    for entry in ("step 1/1", "saved step 1", "next:"):
        assert re.search(rf"^{stamp}.*{entry}", text, re.M), (entry, text)
    prompt = shlex.split(text.splitlines()[-1])
    assert prompt[:2] == ["python", os.path.relpath(ROOT / GPT2.script)]
    answer = ended(GPT2.here(*prompt[2:], "--max-new-tokens", "3"), "The")
    assert not re.search(stamp, answer.out)


@pytest.mark.full
def test_a_small_text_is_evaluated_and_saved_at_the_asked_intervals_only(tmp_path, corpus):
    """Although each step is more than a pass over it. The run says what it saves and removes."""
    (tmp_path / "notes.txt").write_text(corpus.read_text()[:20_000])
    small = prepare(f"text:{tmp_path / 'notes.txt'}", tmp_path / "small", "bytes", workers=1)
    done = GPT2.train(0, small, tmp_path / "run", global_batch=600, steps=12, eval_every=4, save_every=6)
    assert [line["step"] for line in evaluations_of(tmp_path / "run")] == [4, 8, 12]
    assert re.findall(r"^\S+ saved step (\d+) \(", done.out, re.MULTILINE) == ["4", "6", "8", "12"]
    assert re.findall("; removed step_([0-9]+)", done.out) == ["00000004"]


@pytest.mark.parametrize("script, ranks", [("train_gpt2.py", 3), ("train_mlm.py", 0)])
def test_a_run_ends_at_an_id_beyond_the_vocabulary_with_its_file(script, ranks, tmp_path):
    """In whichever shard it is, alike on all ranks, and not with an infinite loss."""
    tokens = np.random.default_rng(0).integers(0, 256, 32 * 200 + 1).astype("u2")
    packing.write_shard(tmp_path / "x_train_1.bin", [tokens], "uint16")
    packing.write_shard(tmp_path / "x_val_1.bin", [tokens[:700]], "uint16")
    tokens[::32] = 300
    packing.write_shard(tmp_path / "x_train_2.bin", [tokens], "uint16")
    done = Trainer(script, tokenizer="bytes").fork(ranks, tmp_path, tmp_path / "run")
    assert done.code == 2 and re.search("x_train_2.bin .* 300, .* 257 .*--tokenizer", done.out), done.out
    assert "Traceback" not in done.out


def test_weights_that_are_not_finite_are_refused_when_they_are_read(shards, tmp_path, monkeypatch):
    ended(GPT2.train(0, shards, tmp_path / "source", steps=1))
    monkeypatch.setattr(ddp_utils, "bit_sums", lambda tensors: {})  # it was saved so
    file = list_checkpoints(tmp_path / "source")[0]
    saved = torch.load(file, weights_only=True)
    saved["tensors"]["model"]["norm.weight"][0] = torch.inf
    torch.save(saved | {"sums": {}}, file)
    done = GPT2.train(0, shards, tmp_path / "run", init_from=tmp_path / "source", steps=1)
    ended(done, "error: norm.weight of ", code=2)
