"""Write pairs of any task of Reasoning Gym (github.com/open-thought/reasoning-gym), and hold out some levels.

    pip install reasoning-gym
    python examples/reasoning_gym.py chain_sum min_digits=N max_digits=N --trained 1:3 --untrained 4:6
    fields="--prompt-field prompt --response-field response --val-field level --tokenizer bytes --row 256"
    python data.py prepare --data jsonl:chain_sum-trained.jsonl $fields --val-split hash:0.025
    python data.py prepare --data jsonl:chain_sum-untrained.jsonl $fields --val-split hash:1
    python train_hrm.py --size puzzle --data shards/chain_sum-trained-bytes,shards/chain_sum-untrained-bytes

N stands for the level, so this one trains on numbers of one to three digits. Where pairs are longer than 256
bytes, give a larger --row, and give it to the trainer as --seq-len.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.remove(str(Path(__file__).resolve().parent))  # else the next line imports this file
import reasoning_gym


def level_range(text: str) -> range:
    low, _, high = text.partition(":")
    return range(int(low), int(high or low) + 1)


def value_of(text: str, level: int):
    """N is the level. Other values are numbers, true, false or lists as in JSON, or else a string."""
    try:
        return level if text == "N" else json.loads(text)
    except json.JSONDecodeError:
        return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", help="its name, such as chain_sum")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="of the task; N is the level")
    parser.add_argument("--trained", type=level_range, required=True, help="levels to train on: 1:3")
    parser.add_argument("--untrained", type=level_range, required=True, help="levels to hold out: 4:6")
    parser.add_argument("--samples", type=int, default=90_000, help="pairs to train on (%(default)s)")
    args = parser.parse_intermixed_args()
    for name, levels in ("trained", args.trained), ("untrained", args.untrained):
        count = args.samples // len(levels) if name == "trained" else 500
        try:
            settings = dict(setting.partition("=")[::2] for setting in args.settings)
            tasks = {level: reasoning_gym.create_dataset(args.task, seed=level, size=count, **{
                key: value_of(text, level) for key, text in settings.items()}) for level in levels}
        except (AssertionError, TypeError, ValueError) as error:  # what the package raises for wrong settings
            parser.error(f"{error}")
        with open(f"{args.task}-{name}.jsonl", "w") as file:
            for i in range(count):
                for level, task in tasks.items():
                    pair = {"prompt": task[i]["question"], "response": task[i]["answer"]}
                    file.write(json.dumps(pair | {"level": f"{name}-{level}"}) + "\n")


if __name__ == "__main__":
    main()
