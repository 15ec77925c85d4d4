"""The parser of all commands, the types of their flags, and the flag that somebody may have meant."""

import argparse
import contextlib
import difflib
import math
import os
import re
import sys
from pathlib import Path

from cli.errors import UserError, local_rank


class ArgumentParser(argparse.ArgumentParser):
    """The parser of all commands. A mistake raises UserError; one process per node prints the help."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:  # it was closed, as by >&-
                setattr(sys, name, open(os.devnull, "r+"))
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):  # a terminal that cannot show every character; a notebook can
                with contextlib.suppress(ValueError):  # a script has read from it, or closed it
                    stream.reconfigure(errors="replace")

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if near := nearest_flag(word, self._option_string_actions):
                self.error(f"unrecognized arguments: {' '.join(unknown)}; the nearest flag to "
                           f"{word.partition('=')[0]} is {near}")
        return parsed, unknown

    def check_row(self, name: str, row: dict):
        """Raises UserError for a row of the sizes with a key that is no flag or a value that its flag
        refuses.
        """
        for key in row.keys() - {"vocab_size"}:
            value = row[key]
            switch = isinstance(value, bool)
            sets = f"the row {name!r} of the sizes sets {key}={value!r}"
            try:
                read = self.parse_args([f"--{key.replace('_', '-')}" + f"={value}" * (not switch)])
            except UserError as error:
                raise UserError(f"{sets}: {error}") from None
            if vars(read) != {key: switch or value}:
                raise UserError(f"{sets}: write names with underscores and numbers without quotes.")

    def error(self, message):
        message = message.replace("ignored explicit argument", "it takes no value, not")
        raise UserError(f"{message}; --help lists all flags.")

    def print_help(self, file=None):
        if local_rank() == 0:
            super().print_help(file)


def parse_count(text: str) -> int:
    """'500k' → 500000; k, M and B stand for a thousand, a million and a billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbB]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count such as 5000, 500k, 20M or 1.5B")
    return round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2].lower()])


def flag_group(parser: ArgumentParser, title: str):
    """Begins a group of flags. Returns a function that adds a flag, given name, type, help and default. The
    type is bool, an action of argparse, a tuple of choices or a function.
    """
    group = parser.add_argument_group(title)

    def flag(name: str, flag_type, text: str, default=None):
        text += "" if default in (None, "") else f" ({default})"
        kind = {"choices" if isinstance(flag_type, tuple) else "type": flag_type, "default": default}
        if flag_type in (bool, argparse.BooleanOptionalAction):
            kind = {"action": "store_true" if flag_type is bool else flag_type}
        group.add_argument(name, help=text, **kind)

    return flag


def bounded(low: float, high: float = math.inf, number_type=float, open_end: bool = False):
    """A type for argparse: a number in [low, high], or in [low, high) with `open_end`."""
    def parse(text: str):
        value = number_type(text)
        if not math.isfinite(value) or not low <= value <= high or open_end and value == high:
            limit = f"in [{low:g}, {high:g}{')' if open_end else ']'}"
            limit = limit if high < math.inf else f"at least {low:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {limit}")
        return value
    parse.__name__ = "whole number" if number_type is int else "number"
    return parse


positive_int = bounded(1, number_type=int)
nonnegative_int = bounded(0, number_type=int)
fraction = bounded(0, 1, open_end=True)


def expanded(text: str) -> str:
    """A type for argparse: a path or a source, or several with commas. The ~ that a shell leaves in --out=~/x
    is the home directory, unless there is something of that name here.
    """
    return text if os.path.exists(text) else ",".join(map(os.path.expanduser, text.split(",")))


def local_path(text: str) -> Path:
    """A type for argparse, see `expanded`."""
    return Path(expanded(text))


def utf8_path(text: str) -> Path:
    """A type for argparse. ValueError if a path is not UTF-8, which torch needs."""
    return local_path(text.encode().decode())


def steps_or_fraction(text: str) -> int | float:
    """A type for argparse: a number of steps, or below 1 a fraction of the run."""
    value = bounded(0)(text)
    if value > 1 and value % 1:
        raise argparse.ArgumentTypeError(f"{text} is neither a whole number nor below 1")
    return int(value) if value >= 1 else value


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
