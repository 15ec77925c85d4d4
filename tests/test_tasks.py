"""Tasks of many steps: their answers are right, their levels too, and a trainer learns from them."""

import collections
import itertools
import json
import random
import re

import pytest
from runs import Trainer

import data
import ddp_utils
import train_hrm


def made(name: str, level: int, count: int = 40) -> list[tuple[str, str]]:
    make, levels = data.TASKS[name]
    assert level <= levels
    return [make(random.Random(f"{name} {level} {i}"), level) for i in range(count)]


@pytest.mark.parametrize("level", range(1, 9))
def test_addition(level):
    for text, answer in made("addition", level):
        a, b = text.split("+")
        assert len(a) == len(b) == 12 and len(answer) == 13 and int(a) + int(b) == int(answer)
        nines = [int(x) + int(y) == 9 for x, y in zip(a, b)]
        assert max(len([*run]) for nine, run in itertools.groupby(nines) if nine) == level


@pytest.mark.parametrize("level", range(1, 9))
def test_doubling(level):
    for text, answer in made("doubling", level):
        times, number = map(int, text.split())
        assert len(text) == 20 and len(answer) == 18 and times == level
        for _ in range(level):
            number += number
        assert int(answer) == number


@pytest.mark.parametrize("level", range(1, 5))
def test_sudoku(level):
    def units(cells):
        rows = [cells[i:i + 6] for i in range(0, 36, 6)]
        boxes = [sum((row[c:c + 3] for row in rows[r:r + 2]), []) for r in (0, 2, 4) for c in (0, 3)]
        return [*rows, *map(list, zip(*rows)), *boxes]

    def count(cells, i=0):  # solutions, by trying everything in order
        if i == 36:
            return 1
        total = 0
        for digit in [cells[i]] if cells[i] != "0" else "123456":
            trial = cells[:i] + [digit] + cells[i + 1:]
            if all(len({*filled}) == len(filled) for unit in units(trial)
                   for filled in [[c for c in unit if c != "0"]]):
                total += count(trial, i + 1)
        return total

    for n, texts in enumerate(made("sudoku", level, 12)):
        assert [*map(len, texts[0].splitlines())] == [6] * 6
        puzzle, solution = (text.replace("\n", "") for text in texts)
        assert all({*unit} == {*"123456"} for unit in units(list(solution)))
        assert all(a in ("0", b) for a, b in zip(puzzle, solution)) and puzzle.count("0") == 6 * level
        assert n > 1 or count(list(puzzle)) == 1
    assert count([c if c > "2" else "0" for c in solution]) > 1  # all 1 and 2 can change places


def test_a_task_is_a_function_of_the_number_of_its_sample(tmp_path):
    """So it is the same with any number of workers, and after a stop."""
    whole = data.prepare("task:doubling", tmp_path / "whole", max_samples=3000, shard_tokens=20000, workers=1)
    data.prepare("task:doubling", tmp_path / "two", max_samples=3000, shard_tokens=20000, workers=2)
    for path in whole.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    source = data.Source("task:doubling", data.settings_of("task:doubling", max_samples=3000))
    first = list(itertools.islice(source.documents(0), 50))
    assert list(itertools.islice(source.documents(20), 30)) == first[20:]
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["row"] == 256 and manifest["settings"]["val_split"] == "hash:0.025"


@pytest.mark.parametrize("task", ["addition", "doubling", "sudoku"])
def test_the_harder_half_of_the_levels_is_all_held_out(tmp_path, task):
    def level(prompt: str) -> int:
        if task == "sudoku":
            return prompt.count("0") // 6
        if task == "doubling":
            return int(prompt.split()[0])
        nines = [int(x) + int(y) == 9 for x, y in zip(*prompt.split("+"))]
        return max(len([*run]) for nine, run in itertools.groupby(nines) if nine)

    half = data.TASKS[task][1] // 2
    count = 1000
    source = data.Source(f"task:{task}", data.settings_of(f"task:{task}", max_samples=count))
    found = collections.Counter()
    for (prompt, _), split, name in itertools.islice(source.documents(0), count):
        kind, number = name.split("-")
        assert int(number) == level(prompt)
        assert (kind, split) == (("trained", None) if level(prompt) <= half else ("untrained", "val"))
        found[name] += 1
    untrained = sum(n for name, n in found.items() if name.startswith("untrained"))
    assert len(found) == 2 * half and 5 < untrained < 60
    shards = data.prepare(f"task:{task}", tmp_path / "shards", max_samples=count, workers=1)
    dataset = data.Dataset([shards], 256)
    assert dataset.val.keys() <= found.keys()
    text = "".join(dataset.tokenizer.decode(tokens[:]) for tokens in dataset.train.tokens)
    prompts = re.findall(rf"{re.escape(data.EOT)}([^<]+){re.escape(data.RESPONSE)}", text)
    assert len(prompts) > 900 and {level(prompt) for prompt in prompts} == {*range(1, half + 1)}


@pytest.mark.full
def test_samples_answer_a_puzzle_that_is_held_out_and_show_the_solution(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards = data.prepare("task:sudoku", tmp_path / "shards", max_samples=200, workers=1)
    dataset = data.Dataset([shards], 256)
    question, answer = dataset.first_pair()
    assert len(question) == len(answer) == 41 and question.count("0") in (6, 12, 18, 24)
    assert all(given in ("0", digit) for given, digit in zip(question, answer))
    first = dataset.tokenizer.decode([*dataset.val.values()][0].grids[0][1][0])
    assert first.startswith(f"{data.EOT}{question}{data.RESPONSE}{answer}{data.EOT}")
    puzzles = Trainer("train_hrm.py", seq_len=None, size="puzzle", batch=2, steps=1, eval_every=1)
    monkeypatch.setattr(ddp_utils, "continue_text", lambda *_: ["some text"])
    done = puzzles.train(0, shards, tmp_path / "run")
    shown = (f"prompt:\n{question}\nresponse:\nsome text\nresponse in the data:\n{answer}\nask it yourself: "
             f"python train_hrm.py --size puzzle --out {tmp_path / 'run'} --prompt '{question}'\n")
    assert done.code == 0 and shown in done.out, done.out
    short = data.prepare("task:doubling", tmp_path / "short", max_samples=50, workers=1, row=90)
    done = puzzles.train(0, short, tmp_path / "short-run")
    assert done.code == 0 and "rows of 90" in done.out, done.out
    assert train_hrm.parse_args(["--data", f"{short},{short}"]).seq_len == 90
    (short / "manifest.json").write_text("{")
    damaged = puzzles.train(0, short, tmp_path / "short-run")
    assert damaged.code == 2 and "is damaged" in damaged.out, damaged.out
    assert data.row_of(str(short)) is None  # which is too early to tell all ranks
    for own, prompt in (({"sample_prompt": "1 2"}, "1 2"), ({"condition": "3"}, "")):
        done = puzzles.train(0, shards, tmp_path / f"own{prompt}", **own)
        assert f"prompt:\n{prompt}\nresponse:\nsome text\n\n" in done.out and "in the data" not in done.out


def test_a_trainer_prepares_a_task_and_reports_each_level(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "TASK_TOKENS", 30000)
    monkeypatch.setattr(data, "UNTRAINED", 0.3)
    done = Trainer("train_gpt2.py", seq_len=None, size="tiny", batch=2).train(
        0, "task:doubling", tmp_path / "run", steps=2, eval_every=2)
    assert done.code == 0 and "task:doubling is prepared up to 30,000 tokens" in done.out, done.out
    groups = r"\| trained \d+\.\d% \(1 \d+\.\d%, .*\), untrained \d+\.\d% \(5 .*, 8 \d+\.\d%\)"
    assert re.search("exact match .*" + groups, done.out) and "rows of 256" in done.out, done.out
    assert "bits per byte" not in done.out and "cycles" not in done.out
    assert (tmp_path / "shards" / "task-doubling-bytes" / "manifest.json").exists()
    assert data.read_manifest(data.locate("task:sudoku", None, 0, 0, max_samples=50, row=300))["row"] == 300
