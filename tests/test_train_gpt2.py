"""train_gpt2.py: what is its own. The loop is that of train_hrm.py, whose tests go further."""

import argparse
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
from conftest import ROOT, run
from processes import fork
from runs import Trainer, assert_close_runs, evaluations_of, steps_of

import ddp_utils
import startup.run
import train_gpt2
from cli.errors import UserError
from ddp_utils import list_checkpoints
from model import GPT2 as GPT2Model
from model import GPT2Block
from prepare import packing
from prepare.pipeline import prepare
from weights.init_from import nearest_size

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5)


@pytest.fixture
def world():
    yield ddp_utils.init("gloo", "cpu")
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("ranks", (0, 2, 3))
@pytest.mark.parametrize("changes", ({}, {"dropout": 0.1, "precision": "bf16"}, {"precision": "fp16"}))
def test_a_killed_run_resumes_bit_for_bit(tmp_path, shards, ranks, changes):
    GPT2.check_killed_run(tmp_path, ranks, shards, **changes)


@pytest.mark.long
def test_the_number_of_processes_changes_nothing_but_rounding(tmp_path, shards):
    GPT2.train(0, shards, tmp_path / "one", steps=20)
    assert GPT2.train(3, shards, tmp_path / "three", steps=20, batch=2).code == 0
    assert_close_runs(tmp_path / "one", tmp_path / "three")


def test_fp16_scales_the_loss_and_skips_what_overflows(tmp_path, shards):
    done = GPT2.train(0, shards, tmp_path / "run", precision="fp16", batch=1, steps=20, eval_every=20)
    assert done.code == 0 and "GradScaler on" in done.out, done.out
    assert evaluations_of(tmp_path / "run")[-1]["val_loss"] < 5.6
    assert torch.load(list_checkpoints(tmp_path / "run")[0], weights_only=True)["scaler"]["scale"] > 0
    again = GPT2.train(0, shards, tmp_path / "run", precision="fp16", batch=1, steps=24)
    assert again.code == 0 and "resuming after step 20" in again.out


@pytest.mark.full
def test_a_run_can_be_used_and_fine_tuned(tmp_path, shards, corpus):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "run"
    done = GPT2.train(0, shards, out, steps=20, sample_every=1, eval_every=10, sample_prompt="def ñ")
    assert done.code == 0 and done.out.count("a sample after step") == 2, done.out
    shape = r"size +GPT2 tiny, seq_len 32, attention causal, n_layer 1, d_model 32\n"
    assert re.search(shape, done.out), done.out
    exported = GPT2.here("--out", out, "--export")
    assert exported.code == 0, exported.out
    used = GPT2.here("--out", out, "--prompt", "def ", "--max-new-tokens", "20", "--temperature", "0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # for what a notebook starts next
    assert used.code == 0, used.out
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "hf")
    ids = model.generate(**tokenizer("def ", return_tensors="pt"), do_sample=False, max_new_tokens=20)[0]
    assert ids[0] == tokenizer.bos_token_id  # as --prompt begins
    assert tokenizer.decode(ids, skip_special_tokens=True) in used.out
    tuned = GPT2.train(0, shards, tmp_path / "tuned", size="tiny", init_from=f"hf:{out / 'hf'}", lr=0,
                       steps=1, eval_every=1)
    losses = [evaluations_of(run)[-1]["val_loss"] for run in (out, tmp_path / "tuned")]
    assert abs(losses[0] - losses[1]) < 1e-5, tuned.out
    for steps in (4, 6):  # with 6 it goes on
        shorter = GPT2.train(0, shards, tmp_path / "short", size="tiny", init_from=out, seq_len=16,
                             steps=steps)
        assert shorter.code == 0, shorter.out
    other = GPT2.train(0, shards, tmp_path / "short", steps=8, size="tiny", init_from=out)
    assert other.code == 2 and "seq_len 16, not 32" in other.out, other.out
    gentle = GPT2.train(0, shards, tmp_path / "gentle", size="tiny", init_from=out, epochs=0.01, steps=None,
                        lr=None, warmup=None, global_batch=None)
    assert gentle.code == 0 and "= 16 sequences" in gentle.out, gentle.out
    assert steps_of(tmp_path / "gentle")[0]["lr"] == 3e-5
    prepare(f"text:{corpus}", tmp_path / "again", str(out / "tokenizer.json"), workers=1)
    named = GPT2.train(0, tmp_path / "again", tmp_path / "named", size="tiny", init_from=out, steps=1)
    assert named.code == 0, named.out  # the same tokenizer under another name
    longer = GPT2.train(0, shards, tmp_path / "long", size="tiny", init_from=out, seq_len=64, steps=4)
    assert longer.code == 2 and "learned positions" in longer.out


@pytest.mark.full
def test_a_run_above_the_loss_of_a_model_without_context_says_so(tmp_path, shards):
    """After a tenth of its steps, at each evaluation."""
    warning = re.compile(r"WARNING: after (\d+) steps the loss is above .*?(\d\.\d{4})")
    flags = {"steps": 21, "eval_every": 2, "eval_batches": 1, "seq_len": 16}
    wild = GPT2.train(0, shards, tmp_path / "wild", lr=1e-9, **flags)
    assert wild.code == 0, wild.out
    assert [int(step) for step, _ in warning.findall(wild.out)] == [4, 6, 8, 10, 12, 14, 16, 18, 20, 21]
    info = run(0, "data.py", "info", shards).out
    entropies = dict(re.findall(r"(train|val): .* unigram entropy (\d\.\d{4}) nats", info))
    assert {entropy for _, entropy in warning.findall(wild.out)} == {entropies["val"]}
    assert f"unigram entropy {entropies['val']} nats per token" in wild.out
    enough = {"steps": 200, "eval_every": 200, "save_every": 200, "lr": 1e-2, "seq_len": 32}
    tame = GPT2.train(0, shards, tmp_path / "tame", **flags | enough)
    assert tame.code == 0 and not warning.search(tame.out), tame.out


def test_the_plan_names_what_differs_from_the_size(tmp_path, shards):
    flags = {"n_layer": None, "n_head": None, "d_model": None, "seq_len": None, "steps": 1, "eval_batches": 1}
    plain = GPT2.train(0, shards, tmp_path / "plain", **flags)
    assert "GPT2 tiny, attention causal\n" in plain.out, plain.out
    other = GPT2.train(0, shards, tmp_path / "other", **flags | {"n_layer": 1, "attention": "isolated"})
    assert re.search(r"GPT2 tiny, attention isolated, n_layer 1\n", other.out), other.out


def found(world, *flags: str) -> argparse.Namespace:
    """The flags that a run would have."""
    argv = [str(flag) for flag in flags]
    with mock.patch.object(startup.run, "start", lambda command: world):
        return startup.run.find_run(GPT2Model, train_gpt2.parse_args(argv), vars(train_gpt2)).args


def test_shape_context_and_tokenizer_come_from_the_weights(tmp_path, shards, corpus, monkeypatch, world):
    """Of a run directory, of a checkpoint in it, of hf:. Without --size, and before any data are prepared;
    prepared data and --tokenizer decide first.
    """
    monkeypatch.chdir(tmp_path)
    text = f"text:{corpus}"
    flags = GPT2.flags(shards, "run", seq_len=48, steps=1, eval_every=1)
    assert fork(0, "train_gpt2.py", *flags, cwd=tmp_path).code == 0
    assert fork(0, "train_gpt2.py", "--out", "run", "--export", cwd=tmp_path).code == 0
    newest = list_checkpoints("run")[0]
    for source, own in (("run", "run"), (newest, "run"), ("hf:run/hf", "run/hf")):
        args = found(world, "--init-from", source, "--data", text)
        assert (args.size, args.seq_len, args.n_layer, args.lr) == ("tiny", 48, 1, 3e-5)
        assert args.tokenizer == f"{own}/tokenizer.json"
        with pytest.raises(UserError, match="learned positions for 48 tokens: lower --seq-len"):
            found(world, "--init-from", source, "--data", text, "--seq-len", "64")
        with pytest.raises(UserError, match="was trained with n_layer 1, not 2: leave that flag out"):
            found(world, "--init-from", source, "--n-layer", "2")
    assert found(world, "--init-from", "run", "--n-layer", "1", "--data", shards).tokenizer is None
    assert found(world, "--init-from", "run", "--tokenizer", "bytes").tokenizer == "bytes"
    with pytest.raises(UserError, match="nowhere does not exist: train first, or name another run directory"):
        found(world, "--init-from", "nowhere")
    Path("run/hf/config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="holds a model of type 'llama'; GPT2 reads 'gpt2'"):
        found(world, "--init-from", "hf:run/hf")
    tuned = fork(0, "train_gpt2.py", "--init-from", "run", "--data", shards, "--steps", "2", "--out", "tuned",
                 cwd=tmp_path)
    assert tuned.code == 0 and "seq_len 48" in tuned.out, tuned.out
    assert "starting from run/checkpoints/step_" in tuned.out
    other = fork(0, "train_hrm.py", "--init-from", "run", "--data", text, cwd=tmp_path)
    assert other.code == 2 and "a model of the family GPT2, not HRM: use its own" in other.out, other.out
    assert not Path("shards").exists()


def test_the_size_of_weights_is_the_nearest():
    config = {"n_layer": 24, "n_head": 16, "d_model": 1024, "seq_len": 1024}
    record = {"model_config": config, "settings": {}}
    assert nearest_size(train_gpt2.SIZES, record) == "gpt2-medium"
    assert nearest_size(train_gpt2.SIZES, record | {"settings": {"size": "gpt2"}}) == "gpt2"


def test_refusals(tmp_path, shards):
    assert GPT2.train(0, shards, tmp_path / "modern", modern=True, steps=2, eval_every=2).code == 0
    done = GPT2.here("--out", tmp_path / "modern", "--export")
    assert done.code == 0 and "is ready for from_pretrained of transformers" in done.out
    done = Trainer("train_hrm.py").here("--out", tmp_path / "modern", "--prompt", "x")
    assert done.code == 2 and "family GPT2" in done.out
    for changes, words in (({"modern": None, "n_layer": 2}, "n_layer 1, not 2: leave that flag out, or"),
                           ({"init_from": tmp_path / "modern"}, "was trained with init_from None, not ")):
        done = GPT2.train(0, shards, tmp_path / "modern", **changes)
        assert done.code == 2 and words in done.out, done.out
    done = GPT2.here(*GPT2.flags(shards, tmp_path / "modern", steps=4), "--no-modern")
    assert done.code == 2 and "modern True, not False: leave that flag out, or" in done.out, done.out


def test_a_checkpoint_of_another_version_is_refused(tmp_path, shards, monkeypatch):
    assert GPT2.train(0, shards, tmp_path / "run", steps=2).code == 0
    init = GPT2Block.__init__

    def with_one_more(self, config):
        init(self, config)
        self.gain = torch.nn.Parameter(torch.ones(config.d_model))

    monkeypatch.setattr(GPT2Block, "__init__", with_one_more)
    for done in (GPT2.train(0, shards, tmp_path / "run", steps=4),
                 GPT2.here("--out", tmp_path / "run", "--prompt", "x")):
        assert done.code == 2, done.out
        assert "(only one of them has transformer.blocks.0.gain): use the code that trained it" in done.out


def test_the_recipe_fits_three_processes_and_its_number_stays(tmp_path, shards):
    """The 16 sequences of `tiny` become 15, and no row is skipped or repeated when one process goes on."""
    flags = {"global_batch": None, "out": tmp_path / "run", "log_every": 1, "save_every": 2}
    three = GPT2.fork(3, shards, steps=2, **flags)
    assert three.code == 0 and " 5 x accumulation 1 x processes 3 = 15 sequences\n" in three.out
    assert "16 sequences per step don't divide among 3 processes: taking 15" in three.out
    assert "WARNING: 15 instead of 16 sequences per step " in three.out
    one = GPT2.train(0, shards, steps=4, **flags)
    assert one.code == 0 and " 5 x accumulation 3 x processes 1 = 15 sequences\n" in one.out, one.out
    assert [line["tokens"] for line in steps_of(tmp_path / "run")] == [15 * 32 * step for step in range(1, 5)]


def test_short_documents_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("posts.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 200)))
    flags = {"tokenizer": "bytes", "min_words": 150, "steps": 1, "eval_every": 1}
    done = GPT2.train(0, "jsonl:posts.jsonl", tmp_path / "run", **flags)
    assert done.code == 0 and ", 50 documents" in done.out, done.out
    other = GPT2.train(0, "jsonl:posts.jsonl", tmp_path / "run", **flags | {"min_words": 20})
    assert other.code == 2 and "with another --min-words (150, now 20)" in other.out, other.out


def test_what_a_run_shows(tmp_path, shards):
    """Each entry has the time, and the first one has the date. The plan and what --prompt prints have
    neither. The command at the end works.
    """
    out, stamp = tmp_path / "run", r"\d\d:\d\d:\d\d "
    done = GPT2.train(0, shards, out, steps=2, save_every=2, eval_every=2, eval_batches=1, max_new_tokens=3)
    text = (out / "train.log").read_text()
    assert done.code == 0 and done.out.endswith(text), done.out
    assert re.match(r"\d{4}-\d\d-\d\d " + stamp, text)
    entries = ("run directory", "[Rank 0/1 | Node node0 | Device cpu] step 1/2 | loss", "saved step 2",
               "step 2 | ", "a sample after step 2", "2 steps in", "training complete: 2 steps", "next:")
    for entry in entries:
        assert re.search(f"^{stamp}{re.escape(entry)}", text, re.M), (entry, text)
    lines = text.splitlines()
    plan = lines[lines.index("machine"):]
    plan = [*itertools.takewhile(lambda line: not re.match(stamp, line), plan)]
    assert plan.count("steps and batches") == plan.count("model and data") == 1
    assert max(map(len, plan)) <= 80, plan
    assert re.match("  model +layers 1, heads 2, width 32, context 32, parameters ",
                    plan[plan.index("model and data") + 1])
    assert lines[-2].endswith(" next:")
    prompt = shlex.split(lines[-1])
    assert prompt[:2] == ["python", os.path.relpath(ROOT / GPT2.script)]
    answer = GPT2.here(*prompt[2:], "--max-new-tokens", "3")
    assert answer.code == 0 and "The" in answer.out and not re.search(stamp, answer.out), answer.out


@pytest.mark.full
def test_a_small_text_is_evaluated_and_saved_at_the_asked_intervals_only(tmp_path, corpus):
    """Although each step is more than a pass over it. The run says so, and what it saves and removes."""
    (tmp_path / "notes.txt").write_text(corpus.read_text()[:20_000])
    small, out = tmp_path / "small", tmp_path / "run"
    prepare(f"text:{tmp_path / 'notes.txt'}", small, "bytes", workers=1)
    done = GPT2.train(0, small, out, global_batch=600, steps=12, eval_every=4, save_every=6)
    assert done.code == 0, done.out
    assert [line["step"] for line in evaluations_of(out)] == [4, 8, 12]
    assert re.findall(r"^\S+ saved step (\d+) \(", done.out, re.MULTILINE) == ["4", "6", "8", "12"]
    assert done.out.count("; removed step_00000004_") == 1 and done.out.count("; removed") == 1
    assert "WARNING: the run reads" not in done.out and done.out.count("best so far") == 2
    best = min((line["val_loss"], line["step"]) for line in evaluations_of(out))
    assert re.search(rf"^\S+ 12 steps in .* best evaluation {best[0]:.4f} at step {best[1]}; peak memory",
                     done.out, re.MULTILINE), done.out
    longer = GPT2.train(0, small, out, global_batch=600, steps=20, eval_every=20, save_every=20)
    assert re.search(r"WARNING: the run reads this text 2\d times", longer.out), longer.out


@pytest.mark.parametrize("script, ranks", [("train_gpt2.py", 3), ("train_hrm.py", 0), ("train_mlm.py", 0)])
def test_a_run_ends_at_an_id_beyond_the_vocabulary_with_its_file(script, ranks, tmp_path):
    """In whichever shard it is, with one sentence on all ranks, and not with an infinite loss."""
    directory = tmp_path / "shards"
    directory.mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 32 * 200 + 1).astype("u2")
    packing.write_shard(directory / "x_train_1.bin", [tokens], "uint16")
    packing.write_shard(directory / "x_val_1.bin", [tokens[:700]], "uint16")
    tokens[::32] = 300
    packing.write_shard(directory / "x_train_2.bin", [tokens], "uint16")
    trainer = Trainer(script, tokenizer="bytes", ff=None if "gpt2" in script else 48)
    done = trainer.fork(ranks, directory, tmp_path / "run")
    assert done.code == 2, done.out
    assert f"error: {directory}/x_train_2.bin holds the id 300, but bytes has 257 ids: " in done.out
    assert "--tokenizer" in done.out
    assert "Traceback" not in done.out and "complete" not in done.out


@pytest.mark.parametrize("kind", ["hf", "run"])
def test_weights_that_are_not_finite_are_refused_when_they_are_read(kind, shards, tmp_path, monkeypatch):
    source = tmp_path / "source"
    assert GPT2.train(0, shards, source, steps=1).code == 0
    if kind == "hf":
        import safetensors.torch
        pytest.importorskip("transformers")
        assert GPT2.here("--out", source, "--export").code == 0
        file = source / "hf" / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        tensors["transformer.ln_f.weight"][0] = torch.nan
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        source = f"hf:{source}/hf"
    else:
        monkeypatch.setattr(ddp_utils, "bit_sums", lambda tensors: {})  # it was saved so
        file = list_checkpoints(source)[0]
        saved = torch.load(file, weights_only=True)
        saved["tensors"]["model"]["norm.weight"][0] = torch.inf
        torch.save(saved | {"sums": {}}, file)
    done = GPT2.train(0, shards, tmp_path / "run", init_from=source, steps=1)
    assert done.code == 2 and re.search("error: norm.weight of .* is not finite, so", done.out), done.out
