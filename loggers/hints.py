"""What --help says of the sizes, and what the author of a mistake may have meant."""

import difflib
import json
from contextlib import suppress
from pathlib import Path

# flags of other programs, by ours; those that difflib finds by itself are not here
OTHER_NAMES = {
    "--lr": "learning-rate", "--steps": "max-steps max-iters iters", "--epochs": "num-train-epochs",
    "--schedule": "lr-scheduler-type", "--warmup": "warmup-steps",
    "--batch": "micro-batch-size per-device-train-batch-size", "--global-batch": "train-batch-size",
    "--grad-accum": "gradient-accumulation-steps accumulate-grad-batches", "--grad-clip": "max-grad-norm",
    "--weight-decay": "wd", "--seq-len": "block-size context-length max-length",
    "--d-model": "n-embd hidden-size", "--precision": "dtype fp16 bf16", "--init-from": "model-name-or-path",
    "--out": "out-dir output-dir", "--resume": "resume-from-checkpoint",
    "--log-every": "log-interval logging-steps", "--eval-every": "eval-interval eval-steps",
    "--checkpoint-activations": "gradient-checkpointing",
}


def nearest_flag(word: str, known: list[str]) -> str:
    """The one of the `known` flags that somebody may have meant who typed `word`, or ""."""
    name = word.partition("=")[0].replace("_", "-").lstrip("-")
    for flag, others in OTHER_NAMES.items():
        if name in others.split() and flag in known:
            return flag
    near = difflib.get_close_matches(name, [flag.removeprefix("--") for flag in known], 1, 0.65)
    return f"--{near[0]}" if near and word.startswith("--") else ""


def table_of_sizes(keys, config_class: type, sizes: dict[str, dict]) -> str:
    """The rows of the sizes as columns, with the model's defaults where they are silent."""
    table = [["--size", *sizes]]
    for key in keys:
        default = getattr(config_class, key, "")
        table.append([key, *(str(row.get(key, default)) for row in sizes.values())])
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(["defaults of each size:", *lines])


def family_of(run_directory: Path) -> str:
    """The class of a run's model, "" if config.json does not say."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((run_directory / "config.json").read_text(encoding="utf-8"))["family"]
    return ""


def runs_beside(path: Path, family: str) -> list[str]:
    """The runs beside a path where none is, of that family or, if it is "", of any."""
    runs = sorted({found.parents[1] for found in path.parent.glob("*/checkpoints/*.pt")})
    return [str(run) for run in runs if not family or family_of(run) in ("", family)]
