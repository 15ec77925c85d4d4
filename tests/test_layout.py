"""What imports what: each file only from floors below its own, and no circle of files or folders."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT
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
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(root: Path) -> set[tuple[str, str]]:
    known = modules(root)
    return {(name, target) for name, path in known.items() for target in imports(path)
            if target in known and target != name}


def circles(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows from whose end others lead back to their beginning."""
    def reached(start: str) -> set[str]:
        seen, new = set(), {start}
        while new:
            seen |= new
            new = {target for source, target in found if source in new} - seen
        return seen

    return {(source, target) for source, target in found if source in reached(target)}


def faults(root: Path, guide: str) -> set:
    """Arrows that don't go down a floor, or are part of a circle of files. Names on no floor or without code.
    """
    rows = floors(guide)
    height = {name: -i for i, names in enumerate(rows) for name in names}
    found = arrows(root)
    tops = {name.partition(".")[0] for name in modules(root)}
    folders = {(a.partition(".")[0], b.partition(".")[0]) for a, b in found}
    up = {(a, b) for a, b in folders if a != b and height.get(a, 99) <= height.get(b, 99)}
    return up | circles(found) | (tops ^ height.keys())


def test_imports_go_down():
    guide = (ROOT / "docs/changing.md").read_text()
    assert not faults(ROOT, guide)


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
    ({"ground/a.py": "import top\n"}, True),
    ({"ground/a.py": "def f():\n  from top import g\n"}, True),
    ({"top.py": "def main():\n  from left.a import b\n"}, False),
    ({"data.py": "def main():\n  import top\n"}, False),  # it forwards
    ({"data.py": "def f():\n  import top\n"}, True),
    ({"ground/a.py": "if TYPE_CHECKING:\n  from left.a import b\n"}, True),
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


def test_each_name_on_a_floor_has_a_bound_of_tokens():
    named = {name for row in floors((ROOT / "docs/changing.md").read_text()) for name in row}
    bounded = {name.removesuffix("/").removesuffix(".py") for row in BOUNDS for name in row.split(" + ")}
    assert bounded - {"together", "lines of ddp_utils"} == named


def test_copies_of_trainers_are_not_counted(tmp_path):
    for name in ("ddp_utils.py", "train_gpt2.py", "train_mine.py"):
        (tmp_path / name).write_text("a = 1\n")
    assert sizes(tmp_path)["together"] == 6
    (tmp_path / "other.py").write_text("")
    with pytest.raises(KeyError, match="other.py"):  # what is in no row would grow unseen
        sizes(tmp_path)
