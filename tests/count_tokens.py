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
BOUNDS = {"trainers": 4450, "model.py": 8010, "data.py": 6400, "ddp_utils.py": 12040, "monitor.py": 3565,
          "test_ddp.py": 1550, "cli/": 6840, "prepare/": 13935, "weights/": 12420, "loggers/": 6100,
          "cluster/": 6300, "ops/": 3250, "together": 84245}
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


def sizes() -> dict[str, int]:
    """Counts the tokens for each name in BOUNDS."""
    found = dict.fromkeys(BOUNDS, 0)
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    for path in [*ROOT.glob("*.py"), *(path for folder in packages for path in folder.rglob("*.py"))]:
        name = f"{path.relative_to(ROOT).parts[0]}/" if path.parent != ROOT else path.name
        tokens = count(path)
        found["trainers" if name.startswith("train_") else name] += tokens
        found["together"] += tokens
    return found


if __name__ == "__main__":
    worse = False
    for name, tokens in sizes().items():
        over = max(tokens - BOUNDS[name], 0)
        worse |= over > 0
        print(f"{name:14} {tokens:7,} of {BOUNDS[name]:7,}" + f"  EXCEEDED by {over}" * (over > 0))
    sys.exit(worse)
