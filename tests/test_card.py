"""The card of an export, README.md: what the hub reads of it, where its numbers are from, what stays private,
and what stays.
"""

import json
import re
import shlex

import pytest
from processes import fork
from runs import Trainer

from prepare.packing import write_manifest
from weights import card
from weights.card import card_of, write_card

hub = pytest.importorskip("huggingface_hub")  # comes with datasets

FAMILIES = {"GPT2": "text-generation", "HRM": "text-generation", "MLM": "fill-mask"}
SETTINGS = {"size": "tiny", "data": "text:/home/alice/books/**/*.txt", "tokenizer": None, "lr": 3e-3,
            "ema": 0.0, "mask_rate": None, "trainer": "train_gpt2.py", "out": "/home/alice/runs/x",
            "BETAS": [0.9, 0.95]}
COMMANDS = [
    "torchrun --nproc_per_node=2 --nnodes=2 --node_rank=0 --master_addr=10.0.0.7 --master_port=29500 "
    "/home/alice/code/train_gpt2.py --data 'text:/home/alice smith/a,/home/alice/b/' --out=/home/alice/x "
    "--sample-prompt 'Once, and/or never' --init-from hf:/home/alice/gpt2",
    "python train_gpt2.py --out runs/x --steps 40"]


def saved_run(directory, family: str = "GPT2", step: int = 20, **changes) -> dict:
    """What the card asks a checkpoint for, and its run."""
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"commands": [*COMMANDS, COMMANDS[1]]}))
    records = [{"step": 10, "val_loss": 3.0, "val_bits_per_byte": 4.0, "time": 0},
               {"step": 20, "loss": 2.5},
               {"step": 20, "val_loss": 2.0, "val_mine": None, "val_loss/easy": 1.5},
               {"step": 30, "val_loss": None}, {"step": 40, "val_loss": 1.0}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"path": str(directory / "checkpoints" / "x.pt"), "family": family, "step": step, "samples": 320,
            "seq_len": 64, "loss": 2.5, "tokenizer": "/home/alice/words.json (0123456789ab)",
            "model_config": {"global_every": 1} if family == "MLM" else {}, "settings": SETTINGS | changes}


def prepared(directory, dataset: str, source: str) -> str:
    directory.mkdir()
    words = {"name": "bytes", "sha256": "", "vocab_size": 257, "eot": 256, "mask": 257}
    write_manifest(directory, {"format": 1, "dataset": dataset, "settings": {"source": source},
                               "complete": True, "shards": [], "dtype": "uint16", "tokenizer": words})
    return str(directory)


def metadata_of(text: str, directory) -> dict:
    (directory / "card.md").write_text(text)
    found = hub.metadata_load(directory / "card.md")
    assert hub.ModelCard.load(directory / "card.md").data.to_dict() == found
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hub_reads_the_metadata_of_each_family(family, tmp_path):
    text = card_of(saved_run(tmp_path, family))
    assert metadata_of(text, tmp_path) == {"library_name": "transformers", "pipeline_tag": FAMILIES[family],
                                           "tags": [family.lower()]}
    filled = text.replace("\ntags:", "\nlicense: mit\ntags:")
    assert metadata_of(filled, tmp_path)["license"] == "mit"
    with pytest.raises(Exception, match="expected"):  # the control
        metadata_of(text.replace("tags:", "tags: ["), tmp_path)


def test_the_hub_reads_data_sets_that_are_known(tmp_path):
    """Of a mixture of prepared directories, each once; of files nothing is known."""
    spanish = prepared(tmp_path / "a", "wikipedia-es", "wikimedia/wikipedia:20231101.es")
    own = prepared(tmp_path / "b", "text:/home/alice/notes.txt", "text, 1 files, 9 bytes, content 0123")
    hf = prepared(tmp_path / "c", "hf:roneneldan/TinyStories", "roneneldan/TinyStories:None")
    text = card_of(saved_run(tmp_path, data=f"{spanish},{own},{hf},{hf}"))
    found = metadata_of(text, tmp_path)
    assert found["datasets"] == ["wikimedia/wikipedia", "roneneldan/TinyStories"]
    assert "`a,b,c,c`, from `wikipedia-es`, from `text:notes.txt`, from `hf:roneneldan/TinyStories`" in text
    assert "datasets" not in metadata_of(card_of(saved_run(tmp_path, data=own)), tmp_path)


def test_the_numbers_are_those_of_the_checkpoint(tmp_path):
    text = card_of(saved_run(tmp_path))
    assert "20,480 tokens in 20 steps, to a loss of 2.5000" in text
    assert "after step 20:\n  validation loss 2.0000, easy 1.5000\n" in text and "mine" not in text
    assert "- **Recipe**: size tiny, lr 0.003, BETAS [0.9, 0.95], ema 0.0\n" in text
    later = card_of(saved_run(tmp_path, step=35))  # which was not evaluated
    assert "after step 20:" in later and "in 35 steps" in later
    earlier = card_of(saved_run(tmp_path, step=15))
    assert "after step 10:\n  validation loss 3.0000, 4.0000 bits per byte\n" in earlier


def test_files_that_are_gone_or_damaged_are_left_out(tmp_path, capsys):
    whole = card_of(saved_run(tmp_path))
    for name in ("metrics.jsonl", "config.json"):
        saved = saved_run(tmp_path, data=prepared(tmp_path / name[:3], "imdb", "stanfordnlp/imdb:None"))
        (tmp_path / name).unlink()
        (tmp_path / name[:3] / "manifest.json").write_text("{")
        text = card_of(saved)
        assert ("**Evaluation**" in text) == (name == "config.json")
        assert ("It was trained" in text) == (name == "metrics.jsonl") and "datasets" not in text
    assert "**Evaluation**" in whole and "It was trained" in whole and not capsys.readouterr().out


def test_no_folder_of_this_machine_is_in_the_card(tmp_path, monkeypatch):
    text = card_of(saved_run(tmp_path, data=prepared(tmp_path / "b", "text:/home/alice/notes.txt", "text")))
    assert not re.search(r"alice|/home|10\.0\.0\.7|29500|" + re.escape(str(tmp_path)), text)
    commands = re.search(r"trained with\n\n```bash\n(.*?)\n```", text, re.S)[1].splitlines()
    assert [shlex.split(command) for command in commands] == [
        ["torchrun", "--nproc_per_node=2", "--nnodes=2", "--node_rank=0", "train_gpt2.py", "--data",
         "text:a,b/", "--out=x", "--sample-prompt", "Once, and/or never", "--init-from", "hf:gpt2"],
        ["python", "train_gpt2.py", "--out", "runs/x", "--steps", "40"]]
    assert "tokenizer `words.json (0123456789ab)`" in text
    monkeypatch.setattr(card, "public", str)  # the control
    assert "/home/alice" in card_of(saved_run(tmp_path))


@pytest.mark.parametrize("family, first", [("HRM", "**Pass question and answer as two texts**"),
                                           ("OwnModel", "**Pass question and answer as two texts**"),
                                           ("GPT2", "Transformers has no prefix mask")])
def test_a_prefix_is_said_in_the_first_line(family, first, tmp_path):
    saved = saved_run(tmp_path, family)
    for attention, begins in ("prefix", first), ("isolated", f"# {family} of size tiny"):
        text = card_of(saved | {"model_config": {"attention": attention}})
        assert text.partition("\n---\n")[2].startswith(begins)
        assert (first in text) == (attention == "prefix")


def test_a_card_that_was_edited_stays(tmp_path, capsys):
    path = tmp_path / "README.md"
    write_card(path, saved_run(tmp_path))
    first = path.read_text()
    path.write_text(first, newline="\r\n")  # as git may write it
    write_card(path, saved_run(tmp_path, step=15))  # the control
    second = path.read_text()
    assert "in 20 steps" in first and "in 15 steps" in second and not capsys.readouterr().out
    for mine in (second.replace("\ntags:", "\nlicense: mit\ntags:"), "mine", "",
                 second + "mine", "mine" + second, "\udcff"):
        content = mine.encode("utf-8", "surrogateescape")
        path.write_bytes(content)
        write_card(path, saved_run(tmp_path))
        assert path.read_bytes() == content, mine
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and f"{path} was edited, so it is kept" in out, out
    path.unlink()  # as the sentence says
    write_card(path, saved_run(tmp_path))
    assert path.read_text() == first


USES = r"```python\n(.*?)\n```"
TINY = {"steps": 4, "save_every": 4, "eval_every": 4}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **TINY), "hrm": Trainer("train_hrm.py", ff=64, **TINY),
            "modern": Trainer("train_gpt2.py", modern=True, **TINY),
            "mlm": Trainer("train_mlm.py", ff=48, window=16, **TINY)}


@pytest.mark.parametrize("name", ["gpt2", *[pytest.param(name, marks=pytest.mark.full) for name in TRAINERS
                                            if name != "gpt2"]])
def test_an_export_has_a_card_whose_lines_work(name, shards, tmp_path, monkeypatch, capsys):
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
    assert "validation loss" in text and "bits per byte" in text
    monkeypatch.chdir(out / "hf")
    exec(re.search(USES, text, re.S)[1])
    assert capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINERS)
def test_two_processes_write_one_card(name, shards, tmp_path):
    trainer, out = TRAINERS[name], tmp_path / "run"
    assert trainer.fork(2, shards, out).code == 0
    done = fork(2, trainer.script, "--out", out, "--export")
    assert done.code == 0 and done.out.count("is ready for") == 1 and "README" not in done.out, done.out
    path = out / "hf" / "README.md"
    assert "tokens in 4 steps" in path.read_text()
    path.write_text("mine")
    done = fork(2, trainer.script, "--out", out, "--export")
    assert done.code == 0 and done.out.count("README.md was edited") == 1, done.out
    assert path.read_text() == "mine"
