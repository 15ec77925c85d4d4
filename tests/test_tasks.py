"""The sums of task:addition: answers and levels are right, and a trainer prepares and learns them."""

import argparse
import collections
import itertools
import json
import random
import re
import shlex
from pathlib import Path

import pytest
import torch
from processes import fork
from runs import Trainer, evaluations_of, run
from states import flags_of

import data
import startup.run
import train_hrm
from ddp_utils import list_checkpoints, read_checkpoint
from examples import levels, sudokus
from prepare import pipeline, sources
from prepare.pipeline import prepare
from vocab.vocabulary import EOT, RESPONSE
from weights import sampling
from weights.sampling import first_pair


def level_of(prompt: str) -> int:
    nines = [int(x) + int(y) == 9 for x, y in zip(*prompt.split("+"))]
    return max(len([*run]) for nine, run in itertools.groupby(nines) if nine)


def check_sum(prompt: str, answer: str) -> None:
    a, b = prompt.split("+")
    assert len(a) == len(b) == 12 and len(answer) == 13 and int(a) + int(b) == int(answer)


@pytest.mark.parametrize("level", range(1, sources.LEVELS + 1))
def test_addition(level):
    for i in range(40):
        prompt, answer = sources.addition(random.Random(f"addition {level} {i}"), level)
        check_sum(prompt, answer)
        assert level_of(prompt) == level


def test_a_task_is_a_function_of_the_number_of_its_sample(tmp_path):
    """So it is the same with any number of workers, and after a stop."""
    whole = prepare("task:addition", tmp_path / "whole", max_samples=3000, shard_tokens=20000, workers=1)
    prepare("task:addition", tmp_path / "two", max_samples=3000, shard_tokens=20000, workers=2)
    for path in whole.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    source = sources.Source("task:addition", pipeline.settings_of("task:addition", max_samples=3000))
    first = list(itertools.islice(source.documents(0), 50))
    assert list(itertools.islice(source.documents(20), 30)) == first[20:]
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["row"] == 256 and manifest["settings"]["val_split"] == "hash:0.025"


def test_the_harder_half_of_the_levels_is_all_held_out(tmp_path):
    half = sources.LEVELS // 2
    count = 1000
    source = sources.Source("task:addition", pipeline.settings_of("task:addition", max_samples=count))
    found = collections.Counter()
    for (prompt, _), split, name in itertools.islice(source.documents(0), count):
        kind, number = name.split("-")
        assert int(number) == level_of(prompt)
        assert (kind, split) == (("trained", None) if level_of(prompt) <= half else ("untrained", "val"))
        found[name] += 1
    untrained = sum(n for name, n in found.items() if name.startswith("untrained"))
    assert len(found) == 2 * half and 5 < untrained < 60
    shards = prepare("task:addition", tmp_path / "shards", max_samples=count, workers=1)
    dataset = data.Dataset([shards], 256)
    assert dataset.val.keys() <= found.keys()
    text = "".join(dataset.tokenizer.decode(tokens[:]) for tokens in dataset.train.tokens)
    prompts = re.findall(rf"{re.escape(EOT)}([^<]+){re.escape(RESPONSE)}", text)
    assert len(prompts) > 900 and {level_of(prompt) for prompt in prompts} == {*range(1, half + 1)}


@pytest.mark.full
def test_samples_answer_a_sum_that_is_held_out_and_show_the_solution(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards = prepare("task:addition", tmp_path / "shards", max_samples=200, workers=1)
    dataset = data.Dataset([shards], 256)
    question, answer = first_pair(dataset)
    check_sum(question, answer)
    first = dataset.tokenizer.decode(next(iter(dataset.val.values())).grids[0][1][0])
    assert first.startswith(f"{EOT}{question}{RESPONSE}{answer}{EOT}")
    puzzles = Trainer("train_hrm.py", seq_len=None, size="puzzle", batch=2, steps=1, eval_every=1)
    monkeypatch.setattr(sampling, "samples_of", lambda *_: [["some text"]])
    done = puzzles.train(0, shards, tmp_path / "run")
    shown = f"prompt:\n{question}\nresponse:\nsome text\nresponse in the data:\n{answer}\n"
    assert done.code == 0 and shown in done.out, done.out
    lines = (json.dumps({"q": f"{n}\n{n + 1}", "a": f"{2 * n + 1}"}) for n in range(200))
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    short = prepare(f"jsonl:{tmp_path}/lines.jsonl", tmp_path / "short", "bytes", prompt_field="q",
                    response_field="a", row=90, val_split="hash:0.2", workers=1)
    question, _ = first_pair(data.Dataset([short], 90))
    done = puzzles.train(0, short, tmp_path / "short-run")
    assert done.code == 0 and "rows of 90" in done.out and "\n" in question, done.out
    assert flags_of(train_hrm, ["--data", f"{short},{short}"]).seq_len == 90
    (short / "manifest.json").write_text("{")
    damaged = puzzles.train(0, short, tmp_path / "short-run")
    assert damaged.code == 2 and "is damaged" in damaged.out, damaged.out
    assert data.packed_row_length(str(short)) is None  # which is too early to tell all ranks
    for own, prompt in (({"sample_prompt": "1 2"}, "1 2"), ({"condition": "3"}, "")):
        done = puzzles.train(0, shards, tmp_path / f"own{prompt}", **own)
        assert f"prompt:\n{prompt}\nresponse:\nsome text\n\n" in done.out and "in the data" not in done.out


def test_a_trainer_prepares_a_task_and_reports_each_level(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "TASK_TOKENS", 30000)
    for module in (sources, pipeline):
        monkeypatch.setattr(module, "UNTRAINED", 0.3)
    done = Trainer("train_gpt2.py", seq_len=None, size="tiny", batch=2).train(
        0, "task:addition", tmp_path / "run", steps=2, eval_every=2)
    assert done.code == 0 and "task:addition is prepared up to 30,000 tokens" in done.out, done.out
    groups = r"\| trained-1 \d+\.\d%, .*, untrained-5 \d+\.\d%, .*, untrained-8 \d+\.\d% \|"
    assert re.search("exact match .*" + groups, done.out) and "rows of 256" in done.out, done.out
    assert "bits per byte" not in done.out and "cycles" not in done.out
    used = Trainer("train_gpt2.py").here("--out", "run", "--prompt", "1+2", "--max-new-tokens", "1")
    assert used.code == 0, used.out
    assert (tmp_path / "shards" / "task-addition-bytes" / "manifest.json").exists()
    other = pipeline.locate("task:addition", "bpe:300", 0, 0, max_samples=50, row=300)
    assert data.read_manifest(other)["row"] == 300


# --size puzzle until 2026-11-27, and the flags that give it today
OLD_PUZZLE = train_hrm.TINY | {
    "n_head": 4, "n_layer": 1, "lr": 1e-2, "steps": 600, "eval_every": 200, "save_every": 200,
    "data": "task:addition", "optimizer": "muon", "sample_every": 1, "temperature": 0.0, "max_new_tokens": 48,
    "h_cycles": "4:8", "l_cycles": 1, "bp_cycles": 2, "inject_input": True}
AS_BEFORE = ("--lr 1e-2 --init identity --no-qk-norm --schedule cosine --decay 0.2 --ema 0 --eval-every 200 "
             "--save-every 200 --eval-batches 0 --max-new-tokens 48 --max-tokens 2500000").split()


def plan_of(*flags: str) -> dict:
    """All flags of a run, and what stands behind its batches."""
    return vars(startup.run.resolve_flags(train_hrm.parse_args([*flags])))


def test_flags_give_puzzle_as_it_was(monkeypatch):
    now = plan_of("--size", "puzzle", *AS_BEFORE)
    monkeypatch.setitem(train_hrm.SIZES, "puzzle", OLD_PUZZLE)
    monkeypatch.setattr(sources, "TASK_TOKENS", 2_500_000)
    before = plan_of("--size", "puzzle")
    assert {key for key in now if now[key] != before[key]} == {"max_tokens"}  # which was no flag
    assert now["max_tokens"] == sources.TASK_TOKENS and before["eval_batches"] == 0


def test_an_older_run_of_puzzle_goes_on_as_it_was(tmp_path, monkeypatch):
    shards = prepare("task:addition", tmp_path / "shards", max_samples=100, row=64, workers=1)
    unset = dict.fromkeys(("seq_len", "n_head", "n_layer", "global_batch", "lr", "warmup", "precision",
                           "save_every", "eval_every", "eval_batches"))
    small = {"size": "puzzle", "ff": 32, "eval_cycles": 1, "max_new_tokens": 1}
    puzzle = Trainer("train_hrm.py", **unset | small)

    def settings(steps: int) -> dict:
        done = puzzle.train(0, shards, tmp_path / "run", steps=steps)
        assert done.code == 0 and "= 16 sequences" in done.out and "1,024 a step" in done.out, done.out
        return read_checkpoint(list_checkpoints(tmp_path / "run")[0])["settings"]

    with monkeypatch.context() as older:
        older.setitem(train_hrm.SIZES, "puzzle", OLD_PUZZLE)
        before = settings(1)
    now = settings(2)
    assert {key for key in now if now[key] != before[key]} == {"steps"}


def test_sudokus_hold_out_whole_levels(tmp_path, monkeypatch):
    """The commands of examples/sudokus.py, on fewer sudokus."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sudokus, "SAMPLES", {"trained": 300, "untrained": 60})
    sudokus.main()
    rows = [json.loads(line) for name in sudokus.BLANKS for line in open(f"sudokus/{name}.jsonl")]
    assert len(rows) == 360
    for row in rows:
        cells, solved = (re.sub(r"\n", "", row[key]) for key in ("prompt", "response"))
        units = [[i for i in range(16) if of(i) == n] for n in range(4)
                 for of in (lambda i: i // 4, lambda i: i % 4, lambda i: i // 8 * 2 + i % 4 // 2)]
        assert all({solved[i] for i in unit} == {*"1234"} for unit in units)
        assert all(cell in ("0", digit) for cell, digit in zip(cells, solved))
        assert row["level"].endswith(f"trained-{cells.count('0')}")
        assert len([*sudokus.solutions([*map(int, cells)])]) == 1
    assert len([*sudokus.solutions([0] * 16)]) == 288  # as is known
    lines = [line.strip() for line in sudokus.__doc__.splitlines() if line.startswith("    ")]
    fields, = (shlex.split(line)[0].removeprefix("fields=").split() for line in lines if "fields=" in line)
    for line in lines:
        if " prepare " in line:
            command = shlex.split(line.partition("data.py ")[2].replace("$fields", " ".join(fields)))
            assert run(0, "data.py", *command).code == 0
    flags = shlex.split(lines[-1].partition("train_hrm.py ")[2])
    dataset = data.Dataset([*map(Path, flags[-1].split(","))], 256)
    assert {name.partition("-")[0] for name in dataset.val} == {"trained", "untrained"}
    text = "".join(dataset.tokenizer.decode(tokens[:]) for tokens in dataset.train.tokens)
    prompts = re.findall(rf"{re.escape(EOT)}([^<]+){re.escape(RESPONSE)}", text)
    assert len(prompts) > 250 and {prompt.count("0") for prompt in prompts} <= {*sudokus.BLANKS["trained"]}
    hrm = Trainer("train_hrm.py", seq_len=None, size="puzzle", steps=1, ff=32, h_cycles=1, bp_cycles=1,
                  max_new_tokens=1)
    done = hrm.train(0, flags[-1], tmp_path / "run")
    assert done.code == 0 and "untrained-9" in done.out, done.out
    alone = hrm.train(0, flags[-1].partition(",")[2], tmp_path / "alone")
    assert alone.code == 2 and "no training shard" in alone.out, alone.out
    for split, code in (("hash:1", 0), ("hash:0.999999999", 2)):  # only the first is asked for
        done = run(0, "data.py", "prepare", "--data", "jsonl:sudokus/untrained.jsonl", *fields,
                   "--val-split", split, "--out", split)
        assert done.code == code, done.out
    Path("empty.jsonl").write_text("")
    empty = run(0, "data.py", "prepare", "--data", "jsonl:empty.jsonl", *fields, "--val-split", "hash:1")
    assert empty.code == 2, empty.out


@pytest.fixture
def prepared(tmp_path):
    """Pairs with two validation sets: answers 3 to every third number that is odd, else 1."""
    lines = ({"q": f"{n}", "a": "13"[n % 3 == 0 and n % 2], "of": f"{'un' * (n % 2)}trained-{n % 2}"}
             for n in range(300))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return prepare(f"jsonl:{tmp_path}/lines.jsonl", tmp_path / "shards", "bytes", prompt_field="q",
                   response_field="a", val_field="of", row=32, val_split="hash:0.3", workers=1)


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.full)])
def test_the_table_by_cycles_has_the_exact_matches_of_the_evaluation(processes, tmp_path, prepared):
    """In the column of the cycles of the evaluation."""
    hrm = Trainer("train_hrm.py", steps=20, ff=64, lr=1e-2, eval_batches=0, l_cycles=1, bp_cycles=1,
                  inject_input=True, max_new_tokens=1)
    assert hrm.train(processes, prepared, tmp_path / "run", h_cycles="1:2").code == 0
    done = fork(processes, "examples/levels.py", tmp_path / "run")
    assert done.code == 0 and done.out.count("by cycles (at most 2 in training)") == 1, done.out
    missing = "the curves are not drawn: pip install matplotlib" in done.out
    assert missing != (tmp_path / "run" / "levels.png").exists()
    found = evaluations_of(tmp_path / "run")[-1]
    for name in ("trained-0", "untrained-1"):
        row, = re.findall(rf"^{name} +(.*)$", done.out, re.M)
        shares = [float(share) for share in row.split()]  # after 1, 2, 3 and 4 cycles
        assert len(shares) == 4 and shares[-1] == pytest.approx(100 * found[f"val_exact/{name}"], abs=0.051)
        assert shares[-1] > 10


def test_a_run_on_text_has_no_levels(tmp_path, shards):
    assert Trainer("train_hrm.py", steps=1, ff=64).train(0, shards, tmp_path / "run").code == 0
    done = fork(0, "examples/levels.py", tmp_path / "run")
    assert done.code == 2 and "trained on text" in done.out, done.out


def test_levels_are_counted_after_each_cycle(monkeypatch):
    """A model that answers a sample once it has run as many cycles as the sample says."""
    class Model:
        def high_level_states(self, x, most):
            yield from (torch.full_like(x, n) for n in range(1, most + 1))

        def loss(self, z, x, y):
            return None, {"exact": (z >= x).sum(), "samples": torch.tensor(x.numel())}

    batches = [(torch.tensor([[1], [3]]), None), (torch.tensor([[2], [9]]), None)]
    monkeypatch.setattr(data, "validation_batches", lambda *_: batches)
    monkeypatch.setattr(levels.ddp, "reduce_sum", lambda values, world: [2 * v.item() for v in values])
    world = argparse.Namespace(device="cpu")
    assert levels.by_cycles(Model(), None, 4, world) == [0.25, 0.5, 0.75, 0.75]
    found = {"trained-1": [0.5, 1.0], "trained-2": [0.25, 0.5], "untrained-3": [0.0, 0.125]}
    assert levels.table(found | levels.means(found)).splitlines() == [
        "level                  1      2",
        "trained-1           50.0  100.0",
        "trained-2           25.0   50.0",
        "untrained-3          0.0   12.5",
        "mean of trained     37.5   75.0",
        "mean of untrained    0.0   12.5"]


def test_the_picture_of_the_levels(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    levels.draw({"trained-1": [0.5, 1.0], "untrained-2": [0.0, 0.5]}, 2, tmp_path / "levels.png")
    assert image.imread(tmp_path / "levels.png").shape[:2] == (450, 800)
