"""--dry-run: how much memory each process would need."""

import pytest
from copies import changed
from runs import Trainer

GPT2 = Trainer("train_gpt2.py")
DATA_SHAPED = """class GPT2(GPT2):
    def hidden(self, idx, cache=None):
        x = super().hidden(idx, cache)
        return x if cache else x + 0 * x.flatten(0, 1)[(idx.flatten() > 2).nonzero()[:, 0]].sum()

"""


def test_a_model_whose_shapes_depend_on_the_data_has_no_count_and_no_mfu(shards, tmp_path, monkeypatch):
    """That of a usual model has both."""
    monkeypatch.setattr("loggers.mfu.peak_flops", lambda device, say: 1e12)
    shaped = changed(tmp_path / "train_shaped.py", (DATA_SHAPED, "WEB = "))
    for trainer, times in ((changed(tmp_path / "train_usual.py"), 0), (shaped, 1)):
        done = trainer.train(0, shards, tmp_path / str(times), steps=1)
        assert done.code == 0 and done.out.count("MFU is not shown") == times, done.out
        dry = trainer.here("--data", shards, "--dry-run", "--seq-len", "32")
        assert dry.code == 0 and "--strategy ddp fits" in dry.out, dry.out
        assert dry.out.count("WARNING: activations of blocks") == times, dry.out


@pytest.mark.parametrize("flags, named", [
    (("--init-from", "base"), "--size"), (("--prompt", "a"), "--prompt"), (("--out", "run"), "--out")])
def test_what_an_estimate_does_not_read(flags, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_00000004_loss1.0.pt").touch()
    done = GPT2.here("--dry-run", "1x8", *flags)
    assert done.code == 2 and named in done.out, done.out


def test_an_estimate_for_weights_takes_their_size():
    assert GPT2.here("--dry-run", "1x8", "--no-compile", "--init-from", "base", "--size", "tiny").code == 0
