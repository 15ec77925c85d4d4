"""train_mlm.py: what is its own. The loop is that of train_hrm.py, whose tests go further."""

import math
import re
import sys

import pytest
from conftest import finish, run, start
from runs import Trainer, ended, evaluations_of

MLM = Trainer("train_mlm.py", ff=48, window=16)


def test_a_run_can_be_used(tmp_path, shards):
    out = tmp_path / "run"
    ended(MLM.train(0, shards, out, steps=8, eval_every=8))
    record = evaluations_of(out)[-1]
    assert 0 <= record["val_accuracy"] <= 1
    # ids are bytes
    assert record["val_bits_per_byte"] == pytest.approx(record["val_loss"] / math.log(2), rel=1e-12)
    filled = ended(MLM.here("--out", out, "--fill", "def [MASK]elf(x[MASK]:"))
    assert filled.out.startswith("'")  # nothing before it
    lines = [re.findall(r"([\d.]+)%", line) for line in filled.out.splitlines()[-2:]]
    assert [*map(len, lines)] == [5, 5]
    for text, named in (("no mask here", "[MASK]"), ("[MASK]" * 40, "the 32")):
        ended(MLM.here("--out", out, "--fill", text), named, code=2)
    transformers = pytest.importorskip("transformers")
    ended(MLM.here("--out", out, "--export"))
    theirs = transformers.pipeline("fill-mask", str(out / "hf"), top_k=5)("def [MASK]elf(x[MASK]:")
    for ours, candidates in zip(lines, theirs):
        assert [float(probability) / 100 for probability in ours] == pytest.approx(
            [candidate["score"] for candidate in candidates], abs=1e-3)
    ended(MLM.train(0, shards, tmp_path / "tuned", size="tiny", init_from=f"hf:{out / 'hf'}", lr=0, steps=1,
                    eval_every=1))
    assert abs(evaluations_of(tmp_path / "tuned")[-1]["val_loss"] - record["val_loss"]) < 1e-5


@pytest.mark.full
def test_presets_are_listed_with_commands_that_work(tmp_path, shards):
    """Whatever started Python: here it is -c."""
    code = "import train_mlm; train_mlm.main(['--list-presets'])"
    listed = ended(finish(start([sys.executable, "-c", code])))
    commands = re.findall(r"^torchrun --nproc_per_node=\d+ train_mlm.py (--preset \S+)", listed.out, re.M)
    assert len(commands) == 9
    ended(run(0, "train_mlm.py", *commands[0].split(), "--data", shards, "--batch", "64", "--epochs", "1",
               "--out", tmp_path / "run"), "= 512 sequences")


@pytest.mark.parametrize("flags, named", [
    (["--preset", "huge"], "--preset"), (["--preset", "1gpu_17m", "--size", "tiny"], "--size"),
    (["--mask-rate", "1"], "--mask-rate"), (["--out", "/nowhere", "--fill", "x"], "/nowhere")])
def test_refusals(flags, named):
    ended(MLM.here(*flags), named, code=2)


def test_more_masks_than_ids(tmp_path, shards):
    ended(MLM.train(0, shards, tmp_path / "run", seq_len=2048, steps=2, global_batch=1, eval_batches=1))
