"""The documents: their links lead somewhere, and the commands that others rely on are there."""

import importlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from conftest import ROOT
from runs import Trainer
from states import flags_of

from cluster import memory
from data import ROOMS
from ddp_utils import STRATEGIES, run_directory
from model import GPT2, HRM, MLM, num_params

DOCUMENTS = [ROOT / name for name in ("README.md", "cluster/README.md", "cluster/RUNS.md", "tests/README.md")]


def prose(path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.M | re.S)


def anchors(path) -> set:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", prose(path), re.M)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose(path)) if not link.startswith("http")]
    for link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    assert links


def test_files_that_are_named_exist():
    for path in DOCUMENTS:
        for name in re.findall(rf"\b(?:bench|tests|{'|'.join(ROOMS)})/[\w@./-]*\w", path.read_text()):
            assert (ROOT / name).exists() or name == "cluster/.env", (path, name)


def test_readme_is_one_page_and_has_the_line_that_ci_runs(tmp_path):
    assert len(DOCUMENTS[0].read_text().splitlines()) <= 200
    pattern, = re.findall(r"sed -n '(/.*/p)' README.md", (ROOT / ".ci" / "run").read_text())
    if shutil.which("sed"):
        done = subprocess.run(["sed", "-n", pattern, ROOT / "README.md"], capture_output=True, text=True)
        assert done.stdout.splitlines()[0].endswith("&& pytest tests")


def test_the_torch_of_the_tests_is_among_those_that_are_allowed():
    low, high = re.findall(r"^torch>=([\d.]+),<([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.M)[0]
    pinned, = re.findall(r"^torch==([\d.]+)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.M)
    numbers = [tuple(map(int, version.split("."))) for version in (low, pinned, high)]
    assert numbers == sorted(numbers)
    last = high.rpartition(".")[0] + f".{int(high.rpartition('.')[2]) - 1}"
    assert f"any torch from {low} to {last}" in DOCUMENTS[0].read_text()


MEMORY = re.findall(r"^\| [\w-]+ ([\d.]+)([MB]) \(`train_(\w+)\.py (.+?)`\) \|([\d. |]+)\| ([\d.]+) "
                    r"\((\d+) x (\d+)(?:, (\w+))?\) \|$", DOCUMENTS[1].read_text(), re.M)


def model_of(name: str, flags: str):
    args = flags_of(importlib.import_module(f"train_{name}"), flags.split())
    return args, memory.empty_model({"gpt2": GPT2, "hrm": HRM, "mlm": MLM}[name], args)


def rounded(cell: str) -> float:
    """By how much a number may differ from what is printed."""
    return 0.51 / 10 ** len(cell.partition(".")[2])


def test_the_table_of_memory_is_what_dry_run_says():
    assert len(MEMORY) == 8
    for size, unit, name, flags, cells, *_ in MEMORY:
        args, model = model_of(name, flags)
        assert abs(num_params(model) / {"M": 1e6, "B": 1e9}[unit] - float(size)) <= rounded(size)
        for strategy, cell in zip(STRATEGIES, cells.strip(" |").split(" | "), strict=True):
            held = sum(memory.memory_of(model, strategy, args, 8, activations=0).values()) / 1e9
            assert abs(held - float(cell)) <= rounded(cell), (name, flags, strategy)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", MEMORY, ids=lambda row: f"{row[2]}-{row[0]}")
def test_the_activations_of_the_table_are_what_dry_run_says(row):
    _, _, name, flags, _, gigabytes, batch, seq_len, mode = row
    checkpointing = ["--checkpoint-activations", mode] if mode else []
    done = Trainer(f"train_{name}.py").here(*flags.split(), *checkpointing, "--dry-run", "8x80")
    assert f"{batch} x {seq_len}, bf16, compile on, activation checkpointing {mode or 'none'};" in done.out
    activations = float(re.search(r"^ddp( +[\d.]+){4} +([\d.]+)", done.out, re.M)[2])
    assert abs(activations - float(gigabytes)) <= rounded(gigabytes) + 0.01, done.out


def test_all_results_are_linked():
    text = "".join(path.read_text() for path in [*DOCUMENTS, *(ROOT / "bench").rglob("*.md")])
    for path in (ROOT / "bench" / "results").iterdir():
        assert f"results/{path.name}" in text or f"({path.name})" in text, path


def test_the_directory_of_a_fine_tuned_hrm(tmp_path, monkeypatch):
    """Its tokenizer, and so its name, is that of the weights."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "hrm-tiny-stdlib-bpe4096" / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.touch()
    args = SimpleNamespace(size="tiny", data="text:books/*.txt", out=None, tokenizer=str(file))
    assert f"`{run_directory(args, 'train_hrm')}`" in (ROOT / "cluster" / "RUNS.md").read_text()
