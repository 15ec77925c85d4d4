"""Write 4 x 4 sudokus with one solution for the HRM. It trains on 2 to 5 blanks and is tested on 6 to 9, too.

    python examples/sudokus.py                   # writes sudokus/trained.jsonl and sudokus/untrained.jsonl
    fields="--prompt-field prompt --response-field response --val-field level --tokenizer bytes --row 256"
    python data.py prepare --data jsonl:sudokus/trained.jsonl $fields --val-split hash:0.025
    python data.py prepare --data jsonl:sudokus/untrained.jsonl $fields --val-split hash:1
    python train_hrm.py --size puzzle --data shards/trained-bytes,shards/untrained-bytes
"""

import json
import random
from pathlib import Path

BLANKS = {"trained": range(2, 6), "untrained": range(6, 10)}
SAMPLES = {"trained": 90_000, "untrained": 2_000}  # for 600 steps, and for about 500 a level
CELLS = range(16)
UNITS = [(i // 4, i % 4, i // 8 * 2 + i % 4 // 2) for i in CELLS]  # row, column and 2 x 2 box of each cell
PEERS = [[j for j in CELLS if any(a == b for a, b in zip(UNITS[i], UNITS[j]))] for i in CELLS]


def solutions(grid: list[int]):
    """Yields all solutions of a grid of 16 digits, in which 0 is a blank."""
    if 0 not in grid:
        yield grid
        return
    i = grid.index(0)
    for digit in {1, 2, 3, 4} - {grid[j] for j in PEERS[i]}:
        yield from solutions([*grid[:i], digit, *grid[i + 1:]])


def sudoku(some: random.Random, blanks: int, solved: list[list[int]]) -> tuple[str, str]:
    """A sudoku with one solution, and that solution, as four lines of digits each."""
    def lines(grid: list[int]) -> str:
        return "\n".join("".join(map(str, grid[i:i + 4])) for i in range(0, 16, 4))

    while True:
        solution = some.choice(solved)
        empty = some.sample(CELLS, blanks)
        grid = [0 if i in empty else solution[i] for i in CELLS]
        if len([*solutions(grid)]) == 1:
            return lines(grid), lines(solution)


def main():
    some, solved = random.Random(0), [*solutions([0] * 16)]  # all 288
    Path("sudokus").mkdir(exist_ok=True)
    for name, levels in BLANKS.items():
        with open(f"sudokus/{name}.jsonl", "w") as file:
            for _ in range(SAMPLES[name]):
                level = some.choice(levels)
                prompt, response = sudoku(some, level, solved)
                row = {"prompt": prompt, "response": response, "level": f"{name}-{level}"}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
