"""Counts the tokens of the program, without comments and docstrings, and compares them with the bounds below.

    python tests/count_tokens.py    # CI runs this; exit code 1 if a bound is exceeded

Tokens, because lines can be packed. An f-string counts as one token. A change that adds a feature may raise a
bound: say so in its commit.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The most tokens of each row: files and folders with a + between them, as in the floors of docs/changing.md.
# What was reached on 2026-11-29, plus 2 %: nobody has to bend a line to fit.
BOUNDS = {
    "train_gpt2.py + train_hrm.py + train_mlm.py": 4_384,
    "startup/": 8_449,
    "weights/": 12_067,
    "training/": 5_380,
    "test_ddp.py": 1_514,
    "ddp_utils.py": 6_437,
    "loggers/ + monitor.py": 7_004,
    "prepare/": 10_658,
    "model.py": 7_952,
    "data.py": 4_835,
    "vocab/": 3_741,
    "cluster/": 5_329,
    "ops/": 3_287,
    "cli/": 3_945,
    "together": 85_148,
    "lines of ddp_utils.py": 1_110,
    "tests/": 146_074,  # not in "together"
}
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER)


def count(path: Path) -> int:
    """Counts the tokens of a Python file. From Python 3.12 on an f-string is several tokens: only its first
    one counts.
    """
    text = path.read_text(encoding="utf-8")
    docstrings = {line for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)
                  and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
                  for line in range(node.lineno, node.end_lineno + 1)}
    begin, end = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))
    tokens = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == begin:
            tokens += not depth
            depth += 1
        elif token.type == end:
            depth -= 1
        elif not depth and token.type not in LAYOUT and token.start[0] not in docstrings:
            tokens += 1
    return tokens


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Counts the tokens of each row of BOUNDS. A copy of a trainer beside the originals doesn't count. Raises
    KeyError for a file or a folder that is in no row.
    """
    rows = {name: row for row in BOUNDS for name in row.split(" + ")}
    found = dict.fromkeys(BOUNDS, 0)
    folders = [path.parent for path in root.glob("*/__init__.py")]
    for path in [*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]:
        top = path.relative_to(root).parts[0]
        name = top if path.parent == root else f"{top}/"
        if name in rows or not name.startswith("train_"):
            tokens = count(path)
            found[rows[name]] += tokens
            found["together"] += tokens
    found["tests/"] = sum(count(path) for path in (root / "tests").rglob("*.py"))
    found["lines of ddp_utils.py"] = len((root / "ddp_utils.py").read_text(encoding="utf-8").splitlines())
    return found


if __name__ == "__main__":
    worse = False
    for row, size in sizes().items():
        over = max(size - BOUNDS[row], 0)
        worse |= over > 0
        print(f"{row:44} {size:7,} of {BOUNDS[row]:7,}" + (f"  EXCEEDED by {over}" if over else ""))
    sys.exit(worse)
