"""Does an HRM answer better with more cycles? Prints and draws exact matches by level of difficulty, for all
held-out samples, several runs and any numbers of cycles. weights/levels.py draws the end of a single run.

    torchrun --nproc_per_node=2 train_hrm.py --size puzzle
    python bench/cycles.py runs/hrm-puzzle-task-addition-bytes --picture cycles.png

The levels are the validation sets of --data. Training has those with a name that begins with trained.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
import ddp_utils
from cli.errors import UserError
from cli.parser import ArgumentParser, local_path, positive_int
from model import HRM, use_device
from ops.device import compute_dtype
from weights.levels import by_cycles, draw, means
from weights.use import load_model


def cycle_numbers(text: str) -> list[int]:
    return [positive_int(n) for n in text.split(",")]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=local_path, nargs="+", help="run directories")
    parser.add_argument("--data", type=local_path, default="shards/task-addition-bytes",
                        help="prepared samples")
    parser.add_argument("--cycles", type=cycle_numbers, default="1,2,3,4,6,8,12,16,24",
                        help="numbers of cycles, the columns of the table")
    parser.add_argument("--picture", type=local_path, help="draw the first run as a PNG, a line per level")
    args = parser.parse_args()
    world = ddp_utils.init("gloo", "auto")
    columns = args.cycles
    if args.picture and not args.picture.parent.is_dir():
        raise UserError(f"{args.picture.parent} is not a directory: create it, or give another --picture.")
    print("| run | level |" + "".join(f" {n} |" for n in columns) + "\n" + "|---" * (len(columns) + 2) + "|")
    for run in args.runs:
        model = load_model(HRM, ddp_utils.load_checkpoint(run, lambda text: None), world)
        if model.config.response < 0 or model.config.halt:
            raise UserError(f"{run} was trained on text or with --halt: name a run on a task.")
        use_device(model, world.device, compute_dtype("auto", world.device))
        model.eval()
        dataset = data.Dataset([args.data], model.config.seq_len)
        levels = {name: by_cycles(model, shards, max(columns), world, 16)[0]
                  for name, shards in dataset.val.items()}
        for name, exact in (levels | means(levels)).items():
            cells = [f"{exact[n - 1]:.1%}" for n in columns]
            print(f"| {run.name} | {name} | {' | '.join(cells)} |", flush=True)
        if args.picture and run == args.runs[0]:
            draw(levels, model.config.h_cycles, args.picture)


if __name__ == "__main__":
    ddp_utils.launch(main)
