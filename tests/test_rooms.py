"""Rooms: the folders that can be taken out. What imports what, and what a run does without them."""

import argparse
import ast
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, finish, run, start
from processes import Group, fork
from runs import Trainer, assert_same_run, log_of, steps_of

import data
import ddp_utils
from data import ROOMS
from ddp_utils import list_checkpoints
from prepare.bpe import train_bpe
from prepare.pipeline import prepare

# Arrows that run up, from a file to a door's room that imports this file again. This list may only shrink.
UPWARDS = {
    ("data", "prepare.command"): "python data.py forwards to its command",
    ("monitor", "loggers.command"): "python monitor.py forwards to its command",
    ("data", "prepare.tokenizer"): "prepared data have a tokenizer that encodes, where prepare/ is there",
    ("ddp_utils", "weights.init_from"): "find_run and new_model; to be redesigned"}
# What runs in each step. Doors open once, at a start.
IN_A_STEP = {"forward", "backward", "block", "attend", "attention", "step", "optimizer_step", "update",
             "clip_gradients", "vote", "add", "end_step", "no_sync", "async_sum", "machines", "write"}
TRAINERS = {name: Trainer(f"train_{name}.py") for name in ("gpt2", "hrm", "mlm")}


def modules(root: Path) -> dict[str, Path]:
    """The files of the program by module."""
    rooms = {path.name for path in root.iterdir() if path.name in {*ROOMS, "upper", "lower"}}
    paths = [*root.glob("*.py"), *(path for room in rooms for path in (root / room).glob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}


def imports(path: Path):
    """(module, functions around it, rooms whose helper is around it) of each import in a file."""
    def walk(node, functions: list[str], rooms: list[str]):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            functions = [*functions, getattr(node, "name", "lambda")]
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            rooms = rooms + [call.args[0].value for call in calls if ast.unparse(call.func).endswith("room")]
        if isinstance(node, ast.Import):
            yield from ((alias.name, functions, rooms) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module, functions, rooms
            yield from ((f"{node.module}.{alias.name}", functions, rooms) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, functions, rooms)

    yield from walk(ast.parse(path.read_text()), [], [])


def arrows(root: Path) -> set[tuple[str, str]]:
    known = modules(root)
    return {(name, target) for name, path in known.items() for target, *_ in imports(path)
            if target in known and target != name}


def on_a_circle(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of these arrows from whose end others lead back to their beginning."""
    def reached(start: str) -> set[str]:
        seen, new = set(), {start}
        while new:
            seen |= new
            new = {target for source, target in found if source in new} - seen
        return seen

    return {(source, target) for source, target in found if source in reached(target)}


def ill_placed(root: Path) -> list[str]:
    """Imports of rooms, but for those of a room in itself, that are not in a function behind the helper, or
    are in what runs in each step.
    """
    known = modules(root)
    rooms = {name.partition(".")[0] for name in known if "." in name}
    found = []
    for name, path in known.items():
        for target, functions, behind in imports(path):
            room = target.partition(".")[0]
            if room not in rooms or room == name.partition(".")[0]:
                continue
            if not functions or room not in behind or IN_A_STEP & {*functions}:
                found.append(f"{name} imports {target} in {functions}")
    return found


def test_arrows_run_down():
    found = arrows(ROOT)
    assert not on_a_circle(found - UPWARDS.keys())
    for arrow in UPWARDS:
        assert arrow in on_a_circle(found - UPWARDS.keys() | {arrow}), f"{arrow} is no exception any more"


def test_rooms_are_imported_in_functions_behind_the_helper():
    assert not ill_placed(ROOT)


def test_a_trainer_that_is_imported_opens_no_room():
    code = f"import sys, train_hrm; print([m for m in sys.modules if m.partition('.')[0] in {ROOMS}])"
    done = finish(start([sys.executable, "-c", code], cwd=ROOT))
    assert done.code == 0 and done.out.splitlines()[-1] == "[]", done.out


DOOR = "def f():\n  with room('upper'):\n    from upper.a import b\n"


@pytest.mark.parametrize("files, circle, placed", [
    ({"core.py": DOOR}, False, ""),
    ({"core.py": DOOR.replace("room(", "data.room(").replace("')", "', 'x')")}, False, ""),
    ({"core.py": DOOR, "upper/a.py": "import core\n"}, True, ""),
    ({"core.py": DOOR.replace("upper.a import b", "upper import a"), "upper/a.py": "import top\n",
      "top.py": "from core import f\n"}, True, ""),
    ({"core.py": "with room('upper'):\n  import upper.a\n"}, False, "core imports upper.a in []"),
    ({"core.py": "def f():\n  from upper.a import b\n"}, False, "core imports upper.a in ['f']"),
    ({"core.py": DOOR.replace("room('upper", "room('lower")}, False, "core imports upper.a in ['f']"),
    ({"core.py": DOOR.replace("f()", "forward(self)")}, False, "core imports upper.a in ['forward']"),
    ({"upper/a.py": "from lower import b\n"}, False, "upper.a imports lower in []")])
def test_these_rules_find_what_breaks_them(tmp_path, files, circle, placed):
    """Negative controls."""
    usual = {"upper/__init__.py": "", "upper/a.py": "b = 1\n", "lower/__init__.py": "", "lower/b.py": ""}
    for name, text in (usual | files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bool(on_a_circle(arrows(tmp_path))) is circle
    found = ill_placed(tmp_path)
    assert found[0].startswith(placed) if placed else not found


# ----------------------------------------------------------------------------------- what a run does without


def copy_without(rooms, directory: Path):
    """The program in a directory, without some folders."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, directory)
    for room in {*ROOMS} - {*rooms}:
        shutil.copytree(ROOT / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))


def losses(out: Path) -> list[float]:
    return [record.get("loss", record.get("val_loss")) for record in log_of(out)]


WITHOUT = [(2, ROOMS)] + [pytest.param(n, [room], marks=pytest.mark.full) for n in (1, 2) for room in ROOMS]


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("processes, gone", [*WITHOUT, pytest.param(1, ROOMS, marks=pytest.mark.full)])
def test_folders_can_be_deleted(name, processes, gone, tmp_path, shards):
    """The trainers go on with prepared shards, and have the same losses."""
    trainer, short = TRAINERS[name], {"steps": 3, "eval_every": 3}
    (tmp_path / "program").mkdir()
    copy_without(gone, tmp_path / "program")
    flags = trainer.flags(shards, tmp_path / "without", **short)
    done = fork(processes, tmp_path / "program" / trainer.script, *flags, PYTHONPATH="")
    assert done.code == 0 and "Traceback" not in done.out, done.out
    assert all(f"there is no folder {room}/ beside" in done.out for room in {*gone} - {"prepare"}), done.out
    assert trainer.fork(processes, shards, tmp_path / "with", **short).code == 0
    found, usual = losses(tmp_path / "without"), losses(tmp_path / "with")
    assert len(found) == len(usual) == 4
    assert found == (pytest.approx(usual, abs=1e-6) if "ops" in gone else usual)


def test_ranks_with_unlike_folders_are_refused(tmp_path, shards):
    """One would write the plan, a sample or averaged weights in a collective that the other does not join."""
    copy_without(["weights"], tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # also where a flag needs the folder before the processes have met
    flags = TRAINERS["gpt2"].flags(shards, tmp_path / "run", steps=1, timeout=60, init_from="runs/none")
    common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "PYTHONPATH": ""}
    processes = [Group(program / "train_gpt2.py", *flags, RANK=rank, LOCAL_RANK=rank, **common)
                 for rank, program in enumerate((ROOT, tmp_path))]
    for done in map(Group.finish, processes):
        assert done.code == 2 and "error: which of the folders beside data.py are there on rank 1" in done.out
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_run_goes_on_after_folders_were_deleted(tmp_path, shards):
    """It says once what is lost. What its state needs is refused in a sentence."""
    (tmp_path / "program").mkdir()
    copy_without(ROOMS, tmp_path / "program")
    gpt2 = TRAINERS["gpt2"]
    for name, more in (("plain", {}), ("late", {"comm": "late"})):
        flags = {"steps": 8, "eval_every": 4, "sample_every": 1} | more
        assert gpt2.train(2, shards, tmp_path / name, **flags).code == 0
        again = gpt2.flags(shards, tmp_path / name, **flags | {"steps": 12})
        done = run(2, tmp_path / "program" / gpt2.script, *again, PYTHONPATH=None)
        if more:
            assert done.code and "error: --comm late needs the folder cluster/, which is not" in done.out
            continue
        assert done.code == 0 and [r["step"] for r in steps_of(tmp_path / name)] == [*range(1, 13)], done.out
        for room in ROOMS:
            assert done.out.count(f"there is no folder {room}/") == 1, done.out


@pytest.mark.parametrize("flags, sentence", [
    (["--prompt", "x"], "using a run (--prompt, --export, --eval-only and the like) needs the folder "
                        "weights/"),
    (["--init-from", "hf:x"], "--init-from needs the folder weights/"),
    (["--dry-run"], "--dry-run needs the folder cluster/"),
    (["--wandb"], "--wandb needs the folder loggers/"),
    (["--data", "stdlib", "--out", "run"], "--data stdlib needs the folder prepare/")])
def test_what_needs_a_folder_says_so(flags, sentence, tmp_path, shards):
    copy_without(ROOMS, tmp_path)
    usual = [] if "--data" in flags else TRAINERS["gpt2"].flags(shards, tmp_path / "run", steps=1)
    if "--prompt" in flags:
        assert fork(0, tmp_path / "train_gpt2.py", *usual, PYTHONPATH="").code == 0
    done = fork(0, tmp_path / "train_gpt2.py", *usual, *flags, cwd=tmp_path, PYTHONPATH="")
    assert done.code == 2 and f"error: {sentence}, which is not beside data.py" in done.out, done.out
    assert "Traceback" not in done.out and ((tmp_path / "run").exists() == ("--prompt" in flags))


def test_a_file_that_is_missing_in_a_folder_is_no_missing_folder(tmp_path):
    """As where new trainers were copied beside an older cluster/."""
    with pytest.raises(ModuleNotFoundError, match="cluster.no_such_file"), data.room("cluster"):
        import cluster.no_such_file  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), data.room("cluster", "x"):
        import no_such_package  # noqa: F401


def test_prepared_data_go_on_without_prepare_with_the_limits_that_they_have(tmp_path, monkeypatch, corpus):
    source, limits = f"text:{corpus}", {"max_tokens": 50_000, "max_samples": None, "min_words": None}
    monkeypatch.chdir(tmp_path)
    out = data.directory_of(source, "bytes")
    prepare(source, out, "bytes", max_tokens=50_000)
    monkeypatch.setitem(sys.modules, "prepare.pipeline", None)  # its import fails
    monkeypatch.setattr(data, "rooms_here", list)
    args = argparse.Namespace(tokenizer="bytes", seq_len=32, **limits)
    assert ddp_utils.located(source, args, 0, 0) == out
    args.max_tokens = 1000
    with pytest.raises(data.UserError, match="needs the folder prepare/"):
        ddp_utils.located(source, args, 0, 0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "hrm"])
def test_a_run_goes_on_without_prepare(name, tmp_path, corpus):
    """With the same numbers, bits per byte among them, and weights, but without samples and prompts."""
    words = tmp_path / "words.json"
    words.write_text(train_bpe([corpus.read_text(encoding="utf-8")], 400).to_json())
    shards = prepare(f"text:{corpus}", tmp_path / "shards", str(words), val_split="tail:0.1")
    (tmp_path / "program").mkdir()
    copy_without(["prepare"], tmp_path / "program")
    trainer, flags = TRAINERS[name], {"steps": 8, "eval_every": 4, "sample_every": 1, "tokenizer": words}

    def begun(out: str, steps: int = 4):
        done = trainer.train(0, shards, tmp_path / out, **flags | {"steps": steps, "schedule": "constant"})
        assert done.code == 0 and f"a sample after step {steps}" in done.out, done.out

    for out in "with", "without":
        begun(out)
    begun("with", 8)
    script = tmp_path / "program" / trainer.script
    again = trainer.flags(shards, tmp_path / "without", **flags | {"schedule": "constant"})
    done = run(0, script, *again, PYTHONPATH=None)
    assert done.code == 0 and "Traceback" not in done.out, done.out
    assert "there is no folder prepare/" in done.out and "a sample after" not in done.out, done.out
    assert_same_run(tmp_path / "without", tmp_path / "with")
    assert [record for record in log_of(tmp_path / "without") if record.get("val_bits_per_byte")]
    for asked in ["--prompt", "x"], ["--export", "hf"]:
        done = run(0, script, *again, *asked, PYTHONPATH=None)
        assert done.code == 2 and "the like) needs the folder prepare/, which is not" in done.out, done.out
        assert "Traceback" not in done.out
    done = run(0, script, *again, "--eval-only", PYTHONPATH=None)
    assert done.code == 0 and "step 8 from" in done.out, done.out


@pytest.mark.full
def test_a_hub_source_is_prepared_without_cluster(tmp_path):
    """Up to 20 tokens for each parameter; those of the largest vocabulary, which only cluster/ tells."""
    (tmp_path / "program").mkdir()
    copy_without(["cluster"], tmp_path / "program")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "a b c"}\n' * 1000)
    gpt2 = TRAINERS["gpt2"]
    flags = gpt2.flags("hf:corpus", "run", steps=1, tokenizer="bytes", val_split=None)
    done = run(0, tmp_path / "program" / gpt2.script, *flags, cwd=tmp_path, PYTHONPATH=None)
    assert done.code == 0 and "corpus is prepared up to 32,470,400 tokens" in done.out, done.out


@pytest.mark.full
def test_a_run_with_wandb_goes_on_without_loggers(tmp_path, shards):
    """What a resumed run was logged to is no state of it. A new one is refused, see above."""
    (tmp_path / "program").mkdir()
    copy_without(["loggers"], tmp_path / "program")
    gpt2, out = TRAINERS["gpt2"], tmp_path / "run"
    assert gpt2.train(0, shards, out, steps=4).code == 0
    path, = list_checkpoints(out)
    content = torch.load(path, weights_only=True)
    content["settings"]["wandb"] = True
    torch.save(content, path)
    flags = gpt2.flags(shards, out, steps=6)
    done = run(0, tmp_path / "program" / gpt2.script, *flags, PYTHONPATH=None)
    assert done.code == 0 and "there is no folder loggers/" in done.out, done.out


@pytest.mark.parametrize("command, room", [("data.py", "prepare"), ("monitor.py", "loggers")])
def test_a_command_without_its_folder_says_so(command, room, tmp_path):
    copy_without([room], tmp_path)
    done = run(0, tmp_path / command, PYTHONPATH=None)
    assert done.code == 2 and f"error: python {command} needs the folder {room}/" in done.out, done.out


SHORT = {"steps": 4, "eval_every": 4, "sample_every": 0, "max_new_tokens": 3}


@pytest.mark.parametrize("asked", [
    "--ema 0.9", pytest.param("--optimizer adam-atan2", marks=pytest.mark.full)])
def test_a_start_that_needs_ops_leaves_no_directory(asked, tmp_path, shards):
    (tmp_path / "program").mkdir()
    copy_without(["ops"], tmp_path / "program")
    flags = TRAINERS["gpt2"].flags(shards, tmp_path / "run", **SHORT)
    done = fork(0, tmp_path / "program" / "train_gpt2.py", *flags, *asked.split(), PYTHONPATH="")
    assert done.code == 2 and f"error: {asked.removesuffix(' 0.9')} needs the folder ops/, which" in done.out
    assert "Traceback" not in done.out and not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("ema", [0, 0.9])
def test_a_run_goes_on_without_ops_unless_it_is_averaged(ema, tmp_path, shards):
    """And says once that bits differ, there and where the folder is back. What began before this was
    recorded had it.
    """
    trainer, out = TRAINERS["gpt2"], tmp_path / "run"
    (tmp_path / "program").mkdir()
    copy_without(["ops"], tmp_path / "program")

    def go_on(steps: int, script=tmp_path / "program" / "train_gpt2.py"):
        return run(0, script, *trainer.flags(shards, out, **SHORT | {"steps": steps}), PYTHONPATH=None)

    assert trainer.train(0, shards, out, ema=ema, **SHORT).code == 0
    path, = list_checkpoints(out)
    content = torch.load(path, weights_only=True)
    assert content["settings"].pop("ops") is True
    torch.save(content, path)
    done = go_on(6)
    if ema:
        assert done.code == 2 and "error: --ema needs the folder ops/, which is not" in done.out, done.out
        return
    assert done.code == 0 and done.out.count("resuming without the folder ops/, unlike before") == 1, done.out
    assert done.out.count("there is no folder ops/ beside ddp_utils.py, so loss and") == 1, done.out
    done = go_on(8)
    assert done.code == 0 and "unlike before" not in done.out, done.out
    done = go_on(10, ROOT / "train_gpt2.py")
    assert done.code == 0 and done.out.count("resuming with the folder ops/, unlike before") == 1, done.out
    assert "resuming with ops" not in done.out
