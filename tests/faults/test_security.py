"""Nothing that is read, from disk or from a hub, can execute code or lead out of its directory, and no port
is open to others except those of torchrun.
"""

import ast
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT
from processes import Group
from runs import Trainer
from waiting import wait_for

import data
from cli.errors import RunError, UserError
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2
from prepare import packing
from prepare.command import verify
from prepare.pipeline import prepare
from vocab.tokenizer import load_tokenizer
from weights.huggingface import from_hf

RUN = Trainer("train_gpt2.py", max_new_tokens=5, eval_every=4)
MODULES = "pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve|yaml|runpy"
CALLS = (r"eval|exec|os\.(system|popen)|__import__|importlib\.import_module(?!\(f'train_)|[\w.]*read_pickle|"
         r"torch\.hub\.load|[\w.]*load_state_dict_from_url")
PORTS = r"[\w.]+\.(bind|listen)|[\w.]*(create_server|HTTPServer)"


class Planted:
    """What a pickle does when it is read: it makes a directory."""

    def __init__(self, where: Path):
        self.where = where

    def __reduce__(self):
        return os.mkdir, (str(self.where),)


@pytest.fixture
def planted(tmp_path):
    """A place that must not come into being."""
    yield tmp_path / "planted"
    assert not (tmp_path / "planted").exists()


def test_the_sources_call_nothing_that_executes_what_it_reads():
    scripts = [*ROOT.glob("*.py"), *(path for init in ROOT.glob("*/__init__.py")
                                     for path in init.parent.glob("*.py"))]
    assert len(scripts) > 20
    for path in scripts:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node)
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not re.match(rf"(import|from) ({MODULES})\b", text), (path, text)
            elif isinstance(node, ast.Call):
                assert not re.match(rf"({CALLS})\(", text), (path, text)
                assert not re.search(r"\b(trust_remote_code|allow_pickle|shell)=", text), (path, text)
                loads = re.search(r"(?<![\w.])torch\.load\b", text)
                assert not loads or "weights_only=True" in text, (path, text)
                # the port of roll_call.py is torchrun's own
                assert not re.match(rf"({PORTS})\(", text) or path.name == "roll_call.py", (path, text)


def test_checkpoints(tmp_path, shards, planted):
    """A pickle beside the tensors and in place of the file, which is read, resumed, sampled and tuned."""
    saved = {"format": 1, "step": 3, "tensors": {}, "sums": {}, "x": Planted(planted)}
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    path = out / "checkpoints" / "step_00000003_loss1.0000_20260101_000000.pt"
    for write in (lambda: torch.save(saved, path),
                  lambda: torch.save(saved, path, _use_new_zipfile_serialization=False),
                  lambda: path.write_bytes(pickle.dumps(Planted(planted)))):
        write()
        with pytest.raises((RunError, UserError)):
            read_checkpoint(path)
        for flags in ({"out": out}, {"out": out, "prompt": "x"},
                      {"out": tmp_path / "other", "size": "tiny", "init_from": path}):
            assert RUN.here(*RUN.flags(shards, **flags)).code == 2


def test_control_the_plant_grows_in_a_file_that_is_trusted(tmp_path):
    torch.save({"x": Planted(tmp_path / "planted")}, tmp_path / "bad.pt")
    torch.load(tmp_path / "bad.pt", weights_only=False)
    assert (tmp_path / "planted").is_dir()


def test_directories_from_hugging_face(tmp_path, planted, monkeypatch):
    """Pickles and code stand beside, or under the name of, what is read."""
    code = f"import os; os.mkdir({str(planted)!r})"
    for name in ("modeling.py", "tokenization.py", f"{tmp_path.name}.py"):
        (tmp_path / name).write_text(code)
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32,
              "vocab_size": 258, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
              "auto_map": {"AutoModelForCausalLM": "modeling.Evil", "AutoConfig": "modeling.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("pytorch_model.bin", "model.safetensors"):
        torch.save({"x": Planted(planted)}, tmp_path / name)
        with pytest.raises(UserError, match="safetensors"):
            from_hf(GPT2, str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization.Evil", None]}}))
    good = json.loads(load_tokenizer("bytes").to_json())
    for content in (pickle.dumps(Planted(planted)), b"!!python/object/apply:os.mkdir [planted]",
                    json.dumps(good | {"pre_tokenizer": {"type": "tokenization.Evil"}}).encode(),
                    json.dumps(good | {"model": {"type": "tokenization.Evil", "vocab": {}}}).encode()):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError):
            load_tokenizer(str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError):  # older versions of datasets ran a script with the name of the folder
        prepare(f"hf:{tmp_path}", tmp_path / "out", "bytes", workers=1)


@pytest.mark.parametrize("name", ["../outside/train_000000.bin", "{outside}/train_000000.bin",
                                  "sub/train_000000.bin", "..", "", "train_000000.bin\0",
                                  "val_000009.bin"])
def test_paths_in_a_manifest(shards, tmp_path, name):
    """A manifest with a file elsewhere or of another split, and a right checksum, is refused by all."""
    shutil.copytree(shards, tmp_path / "outside")
    directory = shutil.copytree(shards, tmp_path / "inside")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["shards"][0]["file"] = name.format(outside=tmp_path / "outside")
    packing.write_manifest(directory, manifest)
    for use in (lambda: data.Dataset([directory], 8), lambda: verify(directory),
                lambda: prepare(manifest["dataset"], directory, "bytes", workers=1)):
        with pytest.raises(UserError, match="manifest.json"):
            use()


def test_links_planted_where_files_get_written(tmp_path, corpus):
    """What is written replaces the link or is refused, and what it points to stays as it is."""
    mine, out, run = (tmp_path / name for name in ("mine", "data", "run"))
    mine.write_text("precious")

    def plant(folder, *names):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(mine)

    plant(out, ".tmp-tokenizer.json", ".tmp-manifest.json", "tokenizer.json", ".tmp-train_000000.bin",
          ".lock")
    prepare(f"text:{corpus}", out, "bytes", workers=1)
    verify(out)
    plant(run, "metrics.jsonl", ".tmp-metrics.jsonl", "config.json", ".tmp-config.json", "history.json",
          "checkpoints/.tmp-best.pt", "tb/events.out.tfevents.1.run")
    assert RUN.train(0, out, run, steps=4).code == 0 and list_checkpoints(run)
    plant(run, "checkpoints/best.pt")
    assert RUN.train(0, out, run, steps=8).code == 0
    assert not (run / "checkpoints" / "best.pt").is_symlink()
    plant(run, ".lock")
    assert RUN.train(0, out, run, steps=8).code == 2
    assert mine.read_text() == "precious"


def test_a_single_process_is_reached_from_nowhere_else(tmp_path, shards, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    metrics = tmp_path / "run" / "metrics.jsonl"
    group = Group(RUN.script, *RUN.flags(shards, tmp_path / "run", steps=100_000))
    wait_for(lambda: metrics.exists() and metrics.read_text(), 60, lambda: group.all_alive)
    pid = group.processes[0].pid
    found = [each for each in psutil.net_connections("tcp") if each.pid == pid and each.status == "LISTEN"]
    group.kill()
    assert {each.laddr.ip for each in found} == {"127.0.0.1"}, found  # where gloo insists on a port
