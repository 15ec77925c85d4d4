"""weights/card.py: what the hub reads of the card of an export, and what stays private."""

import json
import re
import shlex

import pytest
from runs import Trainer

from weights import card
from weights.card import write_card

hub = pytest.importorskip("huggingface_hub")  # comes with datasets

COMMAND = ("torchrun --nproc_per_node=2 --node_rank=0 --master_addr=10.0.0.7 --master_port=29500 "
           "/home/alice/code/train_gpt2.py --data 'text:/home/alice smith/a,/home/alice/b/' --out=~/x "
           "--sample-prompt 'Once, and/or never' --init-from hf:../alice/gpt2")


def card_of(directory, family: str = "GPT2", **record) -> str:
    """The card of a checkpoint and its run."""
    (directory / "config.json").write_text(json.dumps(record))
    write_card(directory / "card.md", {
        "path": str(directory / "checkpoints" / "x.pt"), "family": family, "step": 1200, "loss": 2.5,
        "model_config": {"global_every": 1} if family == "MLM" else {},
        "settings": {"size": "tiny", "data": "text:/home/alice smith/books/**/*.txt"}})
    return (directory / "card.md").read_text()


@pytest.mark.parametrize("family, task", [("GPT2", "text-generation"), ("MLM", "fill-mask")])
def test_the_hub_reads_the_metadata(family, task, tmp_path):
    text = card_of(tmp_path, family)
    found = hub.ModelCard(text.replace("\ntags:", "\nlicense: mit\ntags:")).data.to_dict()
    assert found == {"library_name": "transformers", "pipeline_tag": task, "tags": [family.lower()],
                     "license": "mit"}


def test_no_folder_of_this_machine_is_in_the_card(tmp_path, monkeypatch):
    text = card_of(tmp_path, commands=[COMMAND, "python train_gpt2.py --out runs/x"])
    assert not re.search(r"alice|/home|10\.0\.0\.7|29500|" + re.escape(str(tmp_path)), text)
    assert "`text:*.txt`" in text and "2.5000" in text and "1,200" in text
    assert shlex.split(text.rpartition("\n\n")[2]) == [
        "torchrun", "--nproc_per_node=2", "--node_rank=0", "train_gpt2.py", "--data", "text:a,b/", "--out=x",
        "--sample-prompt", "Once, and/or never", "--init-from", "hf:gpt2"]
    monkeypatch.setattr(card, "public", str)  # the control
    assert "/home/alice" in card_of(tmp_path, commands=[COMMAND])


def test_an_export_has_a_card(shards, tmp_path):
    pytest.importorskip("transformers")
    trainer, out = Trainer("train_gpt2.py", steps=4), tmp_path / "run"
    assert trainer.train(0, shards, out).code == 0
    assert trainer.here("--out", out, "--export").code == 0
    text = (out / "hf" / "README.md").read_text()
    assert " 4 " in text and str(tmp_path) not in text
    assert len({path.stat().st_mode for path in (out / "hf").iterdir()}) == 1
