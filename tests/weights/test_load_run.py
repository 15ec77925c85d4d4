"""load_run of weights/use.py."""

import pytest
from conftest import place
from runs import Trainer, evaluations_of
from torch.nn.functional import cross_entropy

import data
from cli.errors import RunError
from model import GPT2
from weights.use import load_run


@pytest.mark.parametrize("ema", [0.9, pytest.param(0.0, marks=pytest.mark.full)])
def test_a_run_is_loaded_for_use_as_it_was_evaluated(ema, shards, tmp_path):
    trainer = Trainer("train_gpt2.py", steps=8, eval_every=4, max_new_tokens=3)
    assert trainer.train(0, shards, tmp_path / "run", ema=ema, eval_batches=0).code == 0
    model, tokenizer = load_run(GPT2, tmp_path / "run")
    loss = labels = 0
    for x, y in data.validation_batches(data.Dataset([shards], 32).val[""], 4, place(0, 1), 0):
        loss += cross_entropy(model(x).mT, y, ignore_index=-1, reduction="sum").item()
        labels += (y >= 0).sum().item()
    assert loss / labels == pytest.approx(evaluations_of(tmp_path / "run")[-1]["val_loss"], abs=1e-5)
    assert tokenizer.decode(tokenizer.encode("def").tolist()) == "def"
    with pytest.raises(RunError):
        load_run(GPT2, tmp_path)
