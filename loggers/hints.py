"""What --help says of the sizes, and what the author of a mistake may have meant."""

import difflib
import json
from contextlib import suppress
from pathlib import Path

# flags of other programs, by ours; those that difflib finds by itself are not here, and "" are none of ours
OTHER_NAMES = {
    "--lr": "learning-rate", "--steps": "max-steps max-iters iters num-iterations total-steps train-steps",
    "--epochs": "num-train-epochs", "--schedule": "lr-scheduler-type", "--warmup": "warmup-steps",
    "--min-lr": "lr-min min-lr-ratio", "--decay": "warmdown-ratio",
    "--batch": "micro-batch-size micro-batch device-batch-size per-device-train-batch-size",
    "--global-batch": "train-batch-size total-batch-size",
    "--grad-accum": "gradient-accumulation gradient-accumulation-steps accumulate-grad-batches",
    "--grad-clip": "max-grad-norm", "--weight-decay": "wd",
    "--seq-len": "block-size context context-length max-length sequence-length n-ctx",
    "--d-model": "n-embd hidden-size hidden-dim embed-dim dim width", "--size": "model model-size",
    "--n-layer": "depth num-hidden-layers h-layers", "--n-head": "num-attention-heads",
    "--precision": "dtype fp16 bf16 amp use-amp autocast",
    "--init-from": "model-name-or-path model-name pretrained from-pretrained",
    "--data": "data-path dataset-name train-data train-file",
    "--out": "out-dir output-dir save-dir log-dir logging-dir run-name",
    "--resume": "resume-from-checkpoint checkpoint load-checkpoint",
    "--log-every": "log-interval logging-steps log-steps", "--eval-every": "eval-interval eval-steps",
    "--save-every": "save-steps save-interval", "--keep-last": "save-total-limit",
    "--checkpoint-activations": "gradient-checkpointing", "--wandb": "report-to", "--temperature": "temp",
    "--compile": "torch-compile", "--eval-only": "evaluate do-eval",
    "": "max-new-tokens lora port sample num-samples eval-strategy attention-dropout input text-field "
        "prompt-field response-field condition-field",
}


def nearest_flag(word: str, known: list[str]) -> str:
    """The one of the `known` flags that somebody may have meant who typed `word`, or ""."""
    name = word.partition("=")[0].replace("_", "-").lstrip("-")
    for flag, others in OTHER_NAMES.items():
        if name in others.split():
            return flag if flag in known else ""
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
