"""cli/errors.py: bad input to any script is one sentence, exit code 2, no traceback, nothing overwritten. And
packages that are missing or broken, numbers of a launcher, lists of names.

A line of MISTAKES is a command, and what its message has to name: the flag, file, value or choice that the
user got wrong. The tests of each file of the program have more. A command runs in a directory with one
example of everything that can be wrong. `new` is where a run or shards may be written.
"""

import contextlib
import importlib
import io
import json
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Finished, finish, start
from processes import Group
from runs import Trainer

import train_mlm
from cli.errors import UserError, first_line, from_launcher, joined, local_rank, needed
from prepare import packing, sources
from prepare.pipeline import prepare
from vocab import bpe
from weights import use

TRAINERS = {"train_hrm.py": Trainer("train_hrm.py", ff=64), "train_gpt2.py": Trainer("train_gpt2.py"),
            "train_mlm.py": Trainer("train_mlm.py", ff=48, window=16)}
MODULES = {"data.py": "prepare.command", "monitor.py": "loggers.command", "test_ddp.py": "test_ddp"}
# What a command says before what its line says, which overrides it.
USUAL = {"data.py prepare": "--dataset text:good.txt --out new --tokenizer bytes --workers 1"} | {
    script: " ".join(trainer.flags("ready", "new", steps=8)) for script, trainer in TRAINERS.items()}
SHARD = "train_000000.bin"
MISTAKES = {
    "data.py": "command",
    "data.py nonsense": "nonsense",
    "data.py peek ready --split test": "--split test train",
    "data.py peek ready --seq-len 100000000": "ready 100000000 --seq-len",
    "data.py prepare --dataset nonsense": "nonsense text:GLOB",
    "data.py prepare --dataset text:none/*.txt": "none/*.txt shards/",
    "data.py prepare --dataset text:ready/train_000000.bin": "train_000000.bin array",
    "data.py prepare --dataset jsonl:bad.jsonl": "bad.jsonl 2",
    "data.py prepare --tokenizer cl100k_base": "cl100k_base TIKTOKEN_CACHE_DIR",
    "data.py prepare --out ready --tokenizer bpe:300": "ready bytes bpe:300 --out",
    "data.py prepare --out ready --dataset text:changed.txt": "ready 1000 1004 --out",
    "data.py prepare --out damaged": "damaged/manifest.json",
    "data.py prepare --out strangers": "strangers notes.txt --out",
    "data.py prepare --out nomanifest": "nomanifest train_000000.bin --out",
    "data.py verify truncated": "truncated/train_000000.bin 2824 2826",
    "data.py verify last": "last/train_000000.bin",
    "data.py info unfinished": "unfinished prepare",
    "data.py info ready --tokenizer bpe:300": "ready bytes bpe:300 --tokenizer",
    # the same for all trainers
    "train_hrm.py --data nowhere": "nowhere text:GLOB",
    "train_hrm.py --data good.txt --tokenizer bytes": "good.txt text:good.txt",
    "train_hrm.py --data ready,other": "ready other",
    "train_hrm.py --seq-len 1000000": "ready 1000000 --seq-len",
    "train_hrm.py --loss response": "--loss response --prompt-field",
    "train_hrm.py --learning-rate 1": "--learning-rate",
    "train_hrm.py --lr nan": "--lr nan 0",
    "train_hrm.py --backend nccl --device cpu": "--backend nccl",
    "train_hrm.py --out good.txt/run": "good.txt/run --out",
    "train_hrm.py --out run-hrm --data other": "run-hrm bytes bpe:300 --out",
    "train_hrm.py --out run-gpt2": "run-gpt2 GPT2 HRM",
    "train_hrm.py --resume good.txt": "good.txt --out",
    "train_hrm.py --out run-broken": "run-broken --out",
    "train_hrm.py --size tiny --init-from nowhere": "nowhere hf:nowhere",
    "train_hrm.py --size tiny --init-from run-gpt2": "run-gpt2 GPT2 HRM",
    "train_hrm.py --prompt x": "new hf:new",
    # models
    "train_gpt2.py --dry-run 8": "--dry-run 8 GB",
    "train_gpt2.py --export --modern --out run-gpt2": "run-gpt2 modern False True",
    "train_mlm.py --prompt x": "--prompt",
    "test_ddp.py --device nonsense": "--device nonsense cuda",
    "monitor.py --interval 0": "--interval 0 0.1",
}
# What may go well later with the same command has the exit code 1.
NOT_NOW = {"data.py prepare --dataset imdb": "stanfordnlp/imdb",
           "data.py prepare --dataset fineweb-edu": "HuggingFaceFW/fineweb-edu"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("scene")
    good = b"good text\n" * 100
    (root / "strangers").mkdir()
    for name, content in (("good.txt", good), ("changed.txt", good + b"more"), ("empty.txt", b""),
                          ("bad.jsonl", b'{"text": "a"}\n{"text": "b"\n'), ("strangers/notes.txt", b"mine")):
        (root / name).write_bytes(content)
    ready = prepare(f"text:{root}/good.txt", root / "ready", "bytes", workers=1)
    prepare(f"text:{root}/good.txt", root / "other", "bpe:300", workers=1)
    for name, file, change in (
            ("truncated", SHARD, lambda content: content[:-2]),
            ("last", SHARD, lambda content: content[:-1] + b"\1"),
            ("damaged", "manifest.json", lambda content: content[:-100]),
            ("changed", "tokenizer.json", lambda content: content + b" "),
            ("nomanifest", "manifest.json", None), ("unfinished", "manifest.json", lambda content: content)):
        path = shutil.copytree(ready, root / name) / file
        path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    manifest = json.loads((ready / "manifest.json").read_text())
    packing.write_manifest(root / "unfinished", manifest | {"complete": False})
    for name in ("hrm", "gpt2"):
        trainer, out = TRAINERS[f"train_{name}.py"], root / f"run-{name}"
        done = trainer.train(0, ready, out, steps=8, eval_every=8)
        assert done.code == 0, done.out
    for path in (shutil.copytree(root / "run-hrm", root / "run-broken") / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-50])
    return root


@pytest.fixture
def inside(scene, monkeypatch):
    """Works in that directory, without a network, and says whether something has changed there."""
    monkeypatch.chdir(scene)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(scene / "cache"))
    monkeypatch.setenv("TIKTOKEN_ENDPOINT", "http://127.0.0.1:9")

    def contents():
        return {path: path.read_bytes() for path in scene.rglob("*") if path.is_file()
                and path.name not in (".lock", "train.log")
                and path.relative_to(scene).parts[0] not in ("new", "cache")}

    before = contents()
    yield
    assert contents() == before
    shutil.rmtree("new", ignore_errors=True)


def arguments(command: str) -> tuple[str, list[str]]:
    """The script and its arguments, with the usual ones."""
    usual = next((name for name in USUAL if command.startswith(name)), command)
    whole = f"{usual} {USUAL.get(usual, '')}{command.removeprefix(usual)}"
    script, *listed = whole.split()
    return script, listed


def here(script: str, listed: list[str]) -> Finished:
    """What the command does, in this process."""
    if script in TRAINERS:
        return TRAINERS[script].here(*listed)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as text:
        patch.setattr(sys, "argv", [script, *listed])
        try:
            return Finished(importlib.import_module(MODULES[script]).main() or 0, text.getvalue())
        except UserError as error:
            return Finished(error.exit_code, f"error: {error}\n")
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def check(done: Finished, command: str) -> None:
    last = done.out.rstrip("\n").splitlines()[-1]
    assert done.code == (1 if command in NOT_NOW else 2) and "Traceback" not in done.out, done.out
    assert last.startswith("error: ") and last.endswith(".") and done.out.count("error: ") == 1, done.out
    for name in (MISTAKES | NOT_NOW)[command].split():  # --row is not in --rows
        assert re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", last), (name, done.out)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("command", [*MISTAKES, *NOT_NOW])
def test_a_mistake_is_one_sentence(command):
    begin = time.perf_counter()
    check(here(*arguments(command)), command)
    assert time.perf_counter() - begin < 15  # without a network the hub's own client tries for 23 s


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("command", ["data.py verify last", "train_hrm.py --learning-rate 1"])
def test_a_mistake_ends_the_process(scene, command):
    script, listed = arguments(command)
    check(Group(script, *listed, cwd=scene).finish(), command)


@pytest.mark.usefixtures("inside")
def test_control_the_scene_is_wrong_in_nothing_else():
    for command in ("data.py prepare", "data.py info ready", "data.py verify ready", "data.py peek ready",
                    "data.py info nomanifest --tokenizer bytes", "data.py verify unfinished",
                    "train_hrm.py --out run-hrm", "train_gpt2.py --out run-gpt2", "train_mlm.py"):
        done = here(*arguments(command))
        assert done.code == 0, done.out
        shutil.rmtree("new", ignore_errors=True)


# -----------------------------------------------------------------------------------------------------------
# Packages, launchers, names


def use_gguf():
    run = SimpleNamespace(model_class=None, args=SimpleNamespace(export="gguf"), world=None, saved=None,
                          command="")
    use.use_model(run)


NEED = [("gguf", use_gguf), ("pyarrow", lambda: next(sources.read_parquet(SimpleNamespace(
            dataset="parquet:x", files=[]), None))),
        ("tokenizers", lambda: bpe.train_bpe(["a"], 300))]


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "SystemExit"])
def test_a_broken_package_is_named(error, tmp_path, monkeypatch):
    """In front of the one that is installed; with what its import raises."""
    (tmp_path / "front").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "front")
    for package, call in NEED:
        (tmp_path / "front" / f"{package}.py").write_text(f"raise {error}('it is broken')")
        for name in [*sys.modules]:
            if name.partition(".")[0] == package:
                monkeypatch.delitem(sys.modules, name)
        with pytest.raises(UserError, match=rf"{error}: it is broken\).*--force-reinstall {package}\.$"):
            call()


@pytest.mark.parametrize("package, call", NEED)
def test_a_missing_package_is_named(package, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {package}.$"):
        call()


def test_a_package_that_another_lacks_is_not_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError, match="--force-reinstall mine"), needed("mine", "--flag"):
        import safetensors  # noqa: F401


def test_what_is_no_number_in_the_environment_is_0(monkeypatch, capsys):
    """The help is printed once on a node."""
    for value, rank in (("x", 0), ("-1", 0), ("", 0), ("2", 2)):
        monkeypatch.setenv("LOCAL_RANK", value)
        assert local_rank() == rank
        with pytest.raises(SystemExit):
            train_mlm.parse_args(["--help-all"])
        assert ("--timeout" in capsys.readouterr().out) == (rank == 0)
    assert from_launcher("NO_SUCH_NUMBER", 3) == 3


def test_errors_and_names_are_shortened():
    assert first_line(ValueError("a  b\nc")) == "ValueError: a b" and first_line(UserError("a\nb")) == "a"
    assert len(first_line(ValueError("x" * 400))) == 300
    assert joined([*"abcdefgh"])[-1] == "h" and joined([*"abcdefghi"]).endswith(", h and 1 more")


@pytest.mark.parametrize("words, said", [("", "at exit"), ("-i", ">>> "), ("-mcProfile", "function calls")])
def test_what_runs_a_script_goes_on_after_it(words, said, tmp_path):
    text = 'import atexit\natexit.register(print, "at exit")\n' + (ROOT / "data.py").read_text()
    (tmp_path / "s.py").write_text(text)
    done = finish(start([sys.executable, *words.split(), tmp_path / "s.py", "info", "nowhere"]))
    assert "error: nowhere" in done.out and "at exit" in done.out and said in done.out, done.out


def test_a_variable_that_is_set_to_nothing_is_not_set():
    """But no GPU is visible if that one is set to nothing."""
    code = "import os, cli.errors; print([*map(os.environ.get, ('WANDB_MODE', 'CUDA_VISIBLE_DEVICES'))])"
    done = finish(start([sys.executable, "-c", code], WANDB_MODE="", CUDA_VISIBLE_DEVICES=""))
    assert done.out == "[None, '']\n"
