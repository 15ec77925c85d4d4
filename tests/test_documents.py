"""The documents: their links lead somewhere, what they name is there, and what others rely on."""

import importlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from conftest import ROOT
from runs import Trainer
from states import flags_of

from cli.flags import STRATEGIES
from model import GPT2, HRM, MLM, num_params
from startup import dry_run
from startup.run import run_directory

FOLDERS = ["bench", "docs", "examples", "tests", *(path.parent.name for path in ROOT.glob("*/__init__.py"))]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# where each was before
MOVED = {"tests/README.md": "changing.md", "bench/NOTES.md": "measurements.md"}
RESULTS = sorted((ROOT / "bench" / "results").glob("*.md"))


def prose(path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.M | re.S)


def anchors(path) -> set:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", prose(path), re.M)}


def links_of(path) -> list:
    """The links to files; each file and heading exists."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose(path)) if not link.startswith("http")]
    for link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), (path, link)
        assert not anchor or anchor in anchors(target), (path, link)
    return links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    assert links_of(path)


def test_links_of_results_and_changes():
    for path in [*RESULTS, ROOT / "CHANGELOG.md"]:
        links_of(path)


def test_the_old_addresses_lead_on():
    for old, new in MOVED.items():
        text = (ROOT / old).read_text()
        assert text.count("\n") == 1 and f"../docs/{new}" in links_of(ROOT / old), old


def test_each_guide_begins_with_what_a_reader_wants():
    for path in DOCUMENTS[1:]:
        assert "| I want to … | |\n" in prose(path).partition("\n## ")[0], path


def test_files_that_are_named_exist():
    texts = {path: path.read_text() for path in [*DOCUMENTS, *(ROOT / "examples").glob("*.py")]}
    for path, text in texts.items():
        for name in re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w@./-]*\w", text):
            # a file of a cluster's own, and a command that prints a file of an older commit
            assert (ROOT / name).exists() or name in ("cluster/.env", "bench/results/NAME.md"), (path, name)


def test_no_command_names_a_file_that_a_reader_lacks():
    for path in [*DOCUMENTS, *RESULTS]:
        lacking = re.findall(r"\.\./(?:shared|gpu)\b|(?<![\w.`~])/(?:work|root|tmp)/", path.read_text())
        assert not lacking, (path, lacking)


def sections_of(path) -> list[str]:
    """The headings of a module, between lines of dashes."""
    return re.findall(r"^# -{99,}\n# (.+)$", path.read_text(), re.M)


def test_the_order_of_reading():
    """README says what is in the core files, and so does the beginning of each."""
    rows = re.findall(r"^\| \[`([\w./]+)`\]\(([\w.]+)\) \| (.+) \|$", DOCUMENTS[0].read_text(), re.M)
    names = [name for name, *_ in rows]
    assert names == ["train_gpt2.py", "data.py", "model.py", "training/", "ddp_utils.py", "monitor.py"]
    for name, link, sections in rows:
        assert name.rstrip("/") == link
        if (ROOT / name).is_dir():
            files = {path.name for path in (ROOT / name).glob("*.py")} - {"__init__.py"}
            assert {*re.findall(r"`(\w+\.py)`", sections)} == files
        elif headings := sections_of(ROOT / name):
            summary = (ROOT / name).read_text().partition('\n"""')[0].lower()
            for section, heading in zip(sections.split(", "), headings, strict=True):
                assert heading.lower().startswith(section.lower()), (name, heading)
                assert section.lower() in summary, f"{section} is missing at the beginning of {name}"


def test_readme_is_one_page_and_has_the_line_that_ci_runs(tmp_path):
    assert len(DOCUMENTS[0].read_text().splitlines()) <= 150
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
                    r"\((\d+) x (\d+)(?:, (\w+))?\) \|$", (ROOT / "docs" / "clusters.md").read_text(), re.M)


def model_of(name: str, flags: str):
    args = flags_of(importlib.import_module(f"train_{name}"), flags.split())
    return args, dry_run.empty_model({"gpt2": GPT2, "hrm": HRM, "mlm": MLM}[name], args)


def rounded(cell: str) -> float:
    """By how much a number may differ from what is printed."""
    return 0.51 / 10 ** len(cell.partition(".")[2])


def test_the_table_of_memory_is_what_dry_run_says():
    assert len(MEMORY) == 8
    for size, unit, name, flags, cells, *_ in MEMORY:
        args, model = model_of(name, flags)
        assert abs(num_params(model) / {"M": 1e6, "B": 1e9}[unit] - float(size)) <= rounded(size)
        for strategy, cell in zip(STRATEGIES, cells.strip(" |").split(" | "), strict=True):
            held = sum(dry_run.memory_of(model, strategy, args, 8, activations=0).values()) / 1e9
            assert abs(held - float(cell)) <= rounded(cell), (name, flags, strategy)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", MEMORY, ids=lambda row: f"{row[2]}-{row[0]}")
def test_the_activations_of_the_table_are_what_dry_run_says(row):
    _, _, name, flags, _, gigabytes, batch, seq_len, mode = row
    checkpointing = ["--checkpoint-activations", mode] if mode else []
    done = Trainer(f"train_{name}.py").here(*flags.split(), *checkpointing, "--dry-run", "8x80")
    for said in (rf"batch +{batch} x ", rf"context {seq_len},", r"precision +bf16\n", r"compile +on\n",
                 rf"recompute +{mode or 'none'} "):
        assert re.search(said, done.out), (said, done.out)
    activations = float(re.search(r"^ddp( +[\d.]+){4} +([\d.]+)", done.out, re.M)[2])
    assert abs(activations - float(gigabytes)) <= rounded(gigabytes) + 0.01, done.out


def test_all_results_are_linked():
    text = "".join(path.read_text() for path in [*DOCUMENTS, *RESULTS])
    for path in (ROOT / "bench" / "results").iterdir():
        assert f"results/{path.name}" in text or f"({path.name})" in text, path


def test_the_directory_of_a_fine_tuned_hrm(tmp_path, monkeypatch):
    """Its tokenizer, and so its name, is that of the weights."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "hrm-tiny-stdlib-bpe4096" / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.touch()
    args = SimpleNamespace(size="tiny", data="text:books/*.txt", out=None, tokenizer=str(file))
    assert f"`{run_directory(args, 'train_hrm')}`" in (ROOT / "docs" / "running.md").read_text()
