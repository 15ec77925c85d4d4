"""What stands where: imports go down the floors, the guides name what is there, and tests are in three tiers
and compare few sentences.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, finish, start
from count_tokens import BOUNDS, sizes

# Commands that forward to a higher floor, but only inside their main()
FORWARD = {"data.py", "monitor.py"}


def floors(guide: str) -> list[list[str]]:
    """The floors of docs/changing.md, from the top: the names of each row of its table."""
    rows = guide.split("| floor, from the top |")[1].split("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`(\w+)(?:\.py|/)`", row.split("|")[1]) for row in rows]


def modules(root: Path) -> dict[str, Path]:
    """The files of the program by module. A copied trainer isn't one."""
    paths = [*root.glob("*.py"), *(path for init in root.glob("*/__init__.py")
                                   for path in init.parent.rglob("*.py"))]
    found = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
    own = {"train_gpt2", "train_hrm", "train_mlm"}
    return {name: path for name, path in found.items() if name in own or not name.startswith("train_")}


def imports(path: Path):
    """The modules that a file imports anywhere, with the names that may be modules of a package."""
    tree = ast.parse(path.read_text())
    if path.name in FORWARD:
        tree.body = [node for node in tree.body if getattr(node, "name", "") != "main"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def faults(root: Path, guide: str) -> set:
    """Imports that don't go down a floor, or from whose target others lead back. Names on no floor or without
    code.
    """
    height = {name: -i for i, names in enumerate(floors(guide)) for name in names}
    known = modules(root)
    arrows = {name: {target for target in imports(path) if target in known and target != name}
              for name, path in known.items()}

    def reached(name: str) -> set[str]:
        seen, new = set(), {name}
        while new:
            seen |= new
            new = {target for source in new for target in arrows[source]} - seen
        return seen

    top = {name: name.partition(".")[0] for name in known}
    return {*top.values()} ^ height.keys() | {
        (name, target) for name, targets in arrows.items() for target in targets if name in reached(target)
        or top[name] != top[target] and height.get(top[name], 99) <= height.get(top[target], 99)}


def test_imports_go_down():
    assert not faults(ROOT, (ROOT / "docs/changing.md").read_text())


GUIDE = """
| floor, from the top | what |
|---|---|
| `top.py` | the program |
| `left/` `right/` | rooms |
| `data.py` | data |
| `ground/` | errors |

more"""


@pytest.mark.parametrize("files, wrong", [
    ({}, False),
    ({"ground/a.py": "def f():\n  from top import g\n"}, True),
    ({"top.py": "def main():\n  from left.a import b\n"}, False),
    ({"data.py": "def main():\n  import top\n"}, False),  # it forwards
    ({"data.py": "def f():\n  import top\n"}, True),
    ({"left/a.py": "from right import a\n"}, True),  # on the same floor
    ({"left/a.py": "from left.c import a\n", "left/c.py": "from left.a import b\n"}, True),
    ({"left/a.py": "from left.c import a\n", "left/c.py": ""}, False),
    ({"other.py": ""}, True),  # on no floor
    ({"train_mine.py": "import top\n"}, False)])
def test_an_import_upwards_is_found(tmp_path, files, wrong):
    """Negative control."""
    house = {f"{folder}/{name}": text for folder in ("left", "right", "ground")
             for name, text in {"__init__.py": "", "a.py": "b = 1\n"}.items()}
    house |= {"data.py": "", "top.py": "from left.a import b\n", "left/a.py": "from ground import a\n"}
    for name, text in (house | files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bool(faults(tmp_path, GUIDE)) is wrong


def test_each_name_on_a_floor_has_a_bound_of_tokens(tmp_path):
    named = {name for row in floors((ROOT / "docs/changing.md").read_text()) for name in row}
    bounded = {name.removesuffix("/").removesuffix(".py") for row in BOUNDS for name in row.split(" + ")}
    assert bounded - {"together", "lines of ddp_utils", "tests"} == named
    for name in ("ddp_utils.py", "train_gpt2.py", "train_mine.py"):  # the copy of a trainer doesn't count
        (tmp_path / name).write_text("a = 1\n")
    assert sizes(tmp_path)["together"] == 6
    (tmp_path / "other.py").write_text("")
    with pytest.raises(KeyError, match="other.py"):  # what is in no row would grow unseen
        sizes(tmp_path)


# -----------------------------------------------------------------------------------------------------------
# The guides

FOLDERS = ["bench", "docs", "examples", "tests", *(path.parent.name for path in ROOT.glob("*/__init__.py"))]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "bench" / "results").glob("*.md"))
STUBS = [ROOT / "tests" / "README.md", ROOT / "bench" / "NOTES.md"]  # where a guide was before


def prose(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", prose(path), re.M)}


@pytest.mark.parametrize("path", [*GUIDES, *RESULTS, *STUBS, ROOT / "CHANGELOG.md"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose(path)) if not link.startswith("http")]
    assert links or path not in GUIDES + STUBS
    for link in links:
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists() and (not anchor or anchor in anchors(target)), link


def test_what_is_named_is_there():
    for path in [*GUIDES, *(ROOT / "examples").glob("*.py")]:
        for name in re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w@./-]*\w", path.read_text()):
            # a file of a cluster's own, and a command that prints a file of an older commit
            assert (ROOT / name).exists() or name in ("cluster/.env", "bench/results/NAME.md"), (path, name)
    text = "".join(path.read_text() for path in [*GUIDES, *RESULTS])
    for path in (ROOT / "bench" / "results").iterdir():
        assert f"results/{path.name}" in text or f"({path.name})" in text, path


# -----------------------------------------------------------------------------------------------------------
# The tests themselves

SENTENCE = re.compile(r"(?:[A-Za-z][A-Za-z'’,-]* ){3}[A-Za-z]{2,}")
SENTENCES = 20  # in tests/

COMPARED = """
'this is a docstring'
path.write_text('this is one of the data')
assert 'run this in train.py now' in out, 'this is a message'
assert 'compares this one sentence' in f'{name}: this is one too'
with pytest.raises(ValueError, match='a third of these sentences'): pass
"""
FOUND = {"compares this one sentence", ": this is one too", "a third of these sentences"}


def sentences(path: Path) -> list[str]:
    """Texts of four or more words in assertions, `match` and parameters, which a new wording may break.
    Commands don't count.
    """
    compared = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            compared.append(node.test)
        elif getattr(node, "arg", "") == "match":
            compared.append(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            compared += node.args[1:]
    texts = [node.value for part in compared for node in ast.walk(part) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and SENTENCE.search(text)
            and not re.search(r"\n| --|\.py ", text)]


def test_few_sentences_are_compared(tmp_path):
    found = {path: len(sentences(path)) for path in (ROOT / "tests").rglob("*.py")}
    assert sum(found.values()) <= SENTENCES, sorted(found.items(), key=lambda item: -item[1])[:9]
    path = tmp_path / "test_a.py"
    path.write_text(COMPARED)
    assert {*sentences(path)} == FOUND


GOOD = """
import pytest
def test_first(): pass
@pytest.mark.full
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.long)])
def test_full(n): pass
@pytest.mark.long
def test_long(): pass
"""
BAD = {
    "test_misspelt.py": "import pytest\n@pytest.mark.ful\ndef test_a(): pass\n",
    "test_replaced.py": "def test_a(): pass\ndef test_a(): pass\n",
    "test_no_case.py": "import pytest\n@pytest.mark.parametrize('n', [])\ndef test_a(n): pass\n"}


@pytest.mark.full
@pytest.mark.parametrize("flags, passed", [
    ([], 1), (["--full"], 2), (["--long"], 4), (["--full", "-m", "full"], 1), (None, 0)])
def test_a_tier_runs_those_before_it(tmp_path, flags, passed):
    """And -m full, which CI gives, leaves out the first. A test in no tier fails."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / ".pytest.ini", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    for name, text in (BAD if flags is None else {"test_good.py": GOOD}).items():
        (tmp_path / "tests" / name).write_text(text)
    done = finish(start([sys.executable, "-m", "pytest", "-n0", *(flags or [])], cwd=tmp_path))
    if flags is None:
        assert done.code == 2 and all(f"ERROR tests/{name}" in done.out for name in BAD), done.out
    else:
        assert done.code == 0 and re.search(rf"\b{passed} passed", done.out), done.out
        assert "skipped" not in done.out  # which looks as if something were missing
