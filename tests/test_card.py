"""The card of an export, README.md: what the hub reads of it, its numbers, and what stays private."""

import json
import re
import shlex

import pytest
from processes import fork
from runs import Trainer

from weights import card
from weights.card import write_card

hub = pytest.importorskip("huggingface_hub")  # comes with datasets

FAMILIES = {"GPT2": "text-generation", "HRM": "text-generation", "MLM": "fill-mask"}
COMMANDS = [
    "torchrun --nproc_per_node=2 --nnodes=2 --node_rank=0 --master_addr=10.0.0.7 --master_port=29500 "
    "/home/alice/code/train_gpt2.py --data 'text:/home/alice smith/a,/home/alice/b/' --out=/home/alice/x "
    "--sample-prompt 'Once, and/or never' --init-from hf:/home/alice/gpt2",
    "python train_gpt2.py --out runs/x --steps 40"]


def card_of(directory, family: str = "GPT2", commands: list[str] = COMMANDS) -> str:
    """The card of a checkpoint and its run."""
    (directory / "config.json").write_text(json.dumps({"commands": commands}))
    write_card(directory / "card.md", {
        "path": str(directory / "checkpoints" / "x.pt"), "family": family, "step": 1200, "loss": 2.5,
        "model_config": {"global_every": 1} if family == "MLM" else {},
        "settings": {"size": "tiny", "data": "text:/home/alice smith/books/**/*.txt"}})
    return (directory / "card.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hub_reads_the_metadata_of_each_family(family, tmp_path):
    text = card_of(tmp_path, family)
    found = hub.ModelCard(text).data.to_dict()
    assert found == {"library_name": "transformers", "pipeline_tag": FAMILIES[family],
                     "tags": [family.lower()]}
    filled = text.replace("\ntags:", "\nlicense: mit\ntags:")
    assert hub.ModelCard(filled).data.license == "mit"
    with pytest.raises(Exception, match="expected"):  # the control
        hub.ModelCard(text.replace("tags:", "tags: ["))


def test_data_and_loss_are_those_of_the_checkpoint(tmp_path):
    text = card_of(tmp_path)
    assert "# GPT2 of size tiny\n" in text and "`text:*.txt`\n" in text
    assert "Training loss: 2.5000 after 1,200 steps\n" in text
    assert "Training loss" in card_of(tmp_path, commands=[])  # of a trainer in a notebook


def test_no_folder_of_this_machine_is_in_the_card(tmp_path, monkeypatch):
    text = card_of(tmp_path)
    assert not re.search(r"alice|/home|10\.0\.0\.7|29500|" + re.escape(str(tmp_path)), text)
    assert shlex.split(text.partition("Training began with\n")[2]) == [
        "torchrun", "--nproc_per_node=2", "--nnodes=2", "--node_rank=0", "train_gpt2.py", "--data",
        "text:a,b/", "--out=x", "--sample-prompt", "Once, and/or never", "--init-from", "hf:gpt2"]
    monkeypatch.setattr(card, "public", str)  # the control
    assert "/home/alice" in card_of(tmp_path)


TINY = {"steps": 4, "save_every": 4, "eval_every": 4}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **TINY), "hrm": Trainer("train_hrm.py", ff=64, **TINY),
            "modern": Trainer("train_gpt2.py", modern=True, **TINY),
            "mlm": Trainer("train_mlm.py", ff=48, window=16, **TINY)}


@pytest.mark.parametrize("name", ["gpt2", *[pytest.param(name, marks=pytest.mark.full) for name in TRAINERS
                                            if name != "gpt2"]])
def test_an_export_has_a_card(name, shards, tmp_path):
    """A GGUF has none."""
    pytest.importorskip("transformers")
    trainer, out = TRAINERS[name], tmp_path / "run"
    assert trainer.train(0, shards, out).code == 0
    if name == "gpt2":
        pytest.importorskip("gguf")
        assert trainer.here("--out", out, "--export", "gguf").code == 0
        assert not [*out.rglob("README.md")]
    done = trainer.here("--out", out, "--export")
    assert done.code == 0 and "README" not in done.out, done.out
    files = [*(out / "hf").iterdir()]
    assert len(files) == (5 if name == "mlm" else 6) and len({path.stat().st_mode for path in files}) == 1
    text = (out / "hf" / "README.md").read_text()
    assert f"- {'gpt2' if name == 'modern' else name}\n" in text and str(tmp_path) not in text
    assert f"{trainer.script} " in text and "after 4 steps" in text


@pytest.mark.full
def test_two_processes_write_one_card(shards, tmp_path):
    trainer, out = TRAINERS["gpt2"], tmp_path / "run"
    assert trainer.fork(2, shards, out).code == 0
    done = fork(2, trainer.script, "--out", out, "--export")
    assert done.code == 0 and done.out.count("is ready for") == 1 and "README" not in done.out, done.out
    assert "after 4 steps" in (out / "hf" / "README.md").read_text()
