"""Nothing that is read, from disk or from a hub, can execute code or lead out of its directory, and no port
is open to others but those of torchrun."""

import ast
import contextlib
import json
import os
import pickle
import re
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from processes import Group
from runs import Trainer

import data
from cli.errors import RunError, UserError
from ddp_utils import list_checkpoints, read_checkpoint
from model import GPT2
from prepare import packing
from prepare.command import verify
from prepare.pipeline import prepare
from vocab.tokenizer import load_tokenizer
from weights.huggingface import from_hf

GPT2_RUN = Trainer("train_gpt2.py", max_new_tokens=5)
SCRIPTS = sorted(ROOT.glob("*.py"))
SCRIPTS += [path for init in sorted(ROOT.glob("*/__init__.py")) for path in sorted(init.parent.glob("*.py"))]


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


# -----------------------------------------------------------------------------------------------------------
# What the sources say


def calls(path: Path):
    """(dotted name, keywords) of each call in a source file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name != "importlib.import_module" or not ast.unparse(node.args[0]).startswith("f'train_"):
                yield name, {k.arg: k.value for k in node.keywords}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_sources_call_nothing_that_executes_what_it_reads(path):
    imported = {alias.name.partition(".")[0] for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])}
    assert not imported & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml",
                           "runpy"}
    for name, keywords in calls(path):
        assert name not in ("eval", "exec", "os.system", "os.popen", "__import__", "importlib.import_module")
        assert not name.endswith(("read_pickle", "torch.hub.load", "load_state_dict_from_url")), name
        assert {"trust_remote_code", "allow_pickle", "shell"}.isdisjoint(keywords), name
        if name == "torch.load":
            assert ast.literal_eval(keywords["weights_only"]) is True
        opens = name.endswith((".bind", ".listen", "create_server", "HTTPServer"))
        assert not opens or path.name == "roll_call.py", "a port is opened"  # that one is torchrun's own
    assert "weights_only=False" not in path.read_text()


def test_server_advice_binds_to_localhost():
    assert "listens on localhost" in (ROOT / "docs" / "running.md").read_text()
    text = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert not re.search(r"--bind_all|0\.0\.0\.0|--host[ =](?!localhost|127)", text)


# -----------------------------------------------------------------------------------------------------------
# Malicious files


def test_checkpoints(tmp_path, shards, planted, capsys):
    """A pickle anywhere in a checkpoint: beside the tensors, in place of the file, and by way of a resume."""
    saved = {"format": 1, "step": 3, "tensors": {}, "sums": {}, "x": Planted(planted)}
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    path = out / "checkpoints" / "step_00000003_loss1.0000_20260101_000000.pt"
    for write in (lambda: torch.save(saved, path),
                  lambda: torch.save(saved, path, _use_new_zipfile_serialization=False),
                  lambda: path.write_bytes(pickle.dumps(Planted(planted)))):
        write()
        with pytest.raises(RunError):
            read_checkpoint(path)
        for flags in ({"out": out}, {"out": out, "prompt": "x"},
                      {"out": tmp_path / "other", "size": "tiny", "init_from": path}):
            done = GPT2_RUN.here(*GPT2_RUN.flags(shards, **flags))
            said = done.out + capsys.readouterr().err
            assert done.code == 2 and f"{path} is damaged" in said, said


def test_the_plant_grows(tmp_path):
    """Shows that these files would do it if they were trusted."""
    torch.save({"x": Planted(tmp_path / "planted")}, tmp_path / "bad.pt")
    torch.load(tmp_path / "bad.pt", weights_only=False)
    assert (tmp_path / "planted").is_dir()


def test_directories_from_hugging_face(tmp_path, planted):
    """Pickles and code beside, or under the name of, what is read."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32,
              "vocab_size": 258, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
              "auto_map": {"AutoModelForCausalLM": "modeling.Evil", "AutoConfig": "modeling.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling.py").write_text(f"import os; os.mkdir({str(planted)!r})")
    torch.save({"x": Planted(planted)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="no readable config.json with"):
        from_hf(GPT2, str(tmp_path))
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        from_hf(GPT2, str(tmp_path))


def test_tokenizers(tmp_path, planted):
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "tokenization.py").write_text(f"import os; os.mkdir({str(planted)!r})")
    (directory / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["tokenization.Evil", null]}}')
    good = json.loads(load_tokenizer("bytes").to_json())
    for content in (pickle.dumps(Planted(planted)), b"!!python/object/apply:os.mkdir [planted]",
                    json.dumps(good | {"pre_tokenizer": {"type": "tokenization.Evil"}}).encode(),
                    json.dumps(good | {"model": {"type": "tokenization.Evil", "vocab": {}}}).encode()):
        (directory / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError):
            load_tokenizer(str(directory))


def test_data_sets_with_code(tmp_path, planted, monkeypatch):
    """A repository whose loading script, as older versions of datasets ran it, would be executed."""
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "repo.py").write_text(f"import os; os.mkdir({str(planted)!r})")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError):
        prepare(f"hf:{repo}", tmp_path / "out", "bytes", workers=1)


@pytest.mark.parametrize("name", [
    "../outside/train_000000.bin", "{outside}/train_000000.bin", "sub/train_000000.bin", "..", "", "/",
    "train_000000.bin/../../outside/train_000000.bin", "train_000000.bin\0"])
def test_paths_in_a_manifest(shards, tmp_path, name):
    """A manifest whose checksum is right, but which names a file elsewhere, is refused by all who read it."""
    for where in ("outside", "inside"):
        (tmp_path / where).mkdir()
        for path in shards.iterdir():
            (tmp_path / where / path.name).write_bytes(path.read_bytes())
    directory = tmp_path / "inside"
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["shards"][0]["file"] = name.format(outside=tmp_path / "outside")
    packing.write_manifest(directory, manifest)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for use in (lambda: data.Dataset([directory], 8), lambda: verify(directory),
                lambda: prepare(manifest["dataset"], directory, "bytes", workers=1)):
        with pytest.raises(UserError, match="manifest.json is damaged"):
            use()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_links_planted_where_files_get_written(tmp_path, shards, corpus):
    """A prepared directory or a run from a stranger may hold links. What is written replaces the link or is
    refused, and what it points to stays as it is."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    out = tmp_path / "data"
    out.mkdir()
    for name in (".tmp-tokenizer.json", ".tmp-manifest.json", "tokenizer.json", ".tmp-train_000000.bin",
                 ".lock"):
        (out / name).symlink_to(mine)
    prepare(f"text:{corpus}", out, "bytes", workers=1)
    assert mine.read_text() == "precious"
    verify(out)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "tb").mkdir()
    for name in ("metrics.jsonl", ".tmp-metrics.jsonl", "config.json", ".tmp-config.json", "history.json",
                 "checkpoints/.tmp-best.pt", "tb/events.out.tfevents.1.run"):
        (run / name).symlink_to(mine)
    done = GPT2_RUN.train(0, out, run, steps=4, eval_every=4)
    assert done.code == 0 and list_checkpoints(run), done.out
    best = run / "checkpoints" / "best.pt"
    best.unlink()
    best.symlink_to(mine)
    done = GPT2_RUN.train(0, out, run, steps=8, eval_every=4)
    assert done.code == 0 and not best.is_symlink(), done.out
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(mine)
    done = GPT2_RUN.train(0, out, run, steps=4, eval_every=4)
    assert done.code == 2 and "cannot be written" in done.out
    assert mine.read_text() == "precious"


# -----------------------------------------------------------------------------------------------------------
# Ports


def listening(pid: int) -> set[str]:
    """Addresses of the TCP sockets on which a process listens, as /proc shows them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    rows = [line.split() for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()]
    return {row[1].rpartition(":")[0] for row in rows if len(row) > 9 and row[3] == "0A" and row[9] in inodes}


def test_a_single_process_is_reached_from_nowhere_else(tmp_path, shards):
    out = tmp_path / "run"
    group = Group(GPT2_RUN.script, *GPT2_RUN.flags(shards, out, steps=100_000))
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert group.all_alive, group.text
        time.sleep(0.01)
    ports = listening(group.processes[0].pid)
    group.kill()
    assert ports <= {"0100007F"}, ports  # 127.0.0.1, where gloo insists on a port
