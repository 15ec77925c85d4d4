"""The documents: their links lead somewhere, and the commands that others rely on are there."""

import re
import shutil
import subprocess

import pytest
from conftest import ROOT

DOCUMENTS = [ROOT / folder / "README.md" for folder in (".", "cluster", "tests")]


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
        for name in re.findall(r"\b(?:bench|cluster|tests)/[\w@./-]*\w", path.read_text()):
            assert (ROOT / name).exists() or name == "cluster/.env", (path, name)


def test_readme_is_one_page_and_has_the_line_that_ci_runs(tmp_path):
    assert len(DOCUMENTS[0].read_text().splitlines()) <= 350
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
