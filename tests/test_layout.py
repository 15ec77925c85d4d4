"""What imports what: imports point down and form no circle, not even inside a function."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
# Imports that point up.
UPWARDS = {
    ("data", "prepare.command"): "python data.py forwards to its command",
    ("monitor", "loggers.command"): "python monitor.py forwards to its command"}


def modules(root: Path) -> dict[str, Path]:
    """The files of the program by module."""
    paths = [*root.glob("*.py"), *(path for init in root.glob("*/__init__.py")
                                   for path in init.parent.glob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}


def imports(path: Path):
    """The modules that a file imports anywhere, with the names that may be modules of a package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(root: Path) -> set[tuple[str, str]]:
    known = modules(root)
    return {(name, target) for name, path in known.items() for target in imports(path)
            if target in known and target != name}


def on_a_circle(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows from whose end others lead back to their beginning."""
    def reached(start: str) -> set[str]:
        seen, new = set(), {start}
        while new:
            seen |= new
            new = {target for source, target in found if source in new} - seen
        return seen

    return {(source, target) for source, target in found if source in reached(target)}


def test_imports_point_down():
    found = arrows(ROOT)
    assert not on_a_circle(found - UPWARDS.keys())
    for arrow in UPWARDS:
        assert arrow in on_a_circle(found - UPWARDS.keys() | {arrow}), f"{arrow} is no exception any more"


@pytest.mark.parametrize("files, circle", [
    ({"top.py": "from lower.a import b\n"}, False),
    ({"top.py": "from lower.a import b\n", "lower/a.py": "import top\n"}, True),
    ({"top.py": "from lower import a\n", "lower/a.py": "def f():\n  from top import g\n"}, True),
    ({"top.py": "import lower.a\n", "lower/a.py": "import other\n", "other.py": "from top import f\n"}, True),
    ({"top.py": "import lower.a\n", "lower/a.py": "import lower.c\n", "lower/c.py": ""}, False)])
def test_a_circle_is_found(tmp_path, files, circle):
    """Negative control."""
    for name, text in ({"lower/__init__.py": "", "lower/a.py": "b = 1\n"} | files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bool(on_a_circle(arrows(tmp_path))) is circle
