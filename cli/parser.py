"""The parser of all commands, its help, the types of flags, and hints for unknown flags."""

import argparse
import contextlib
import difflib
import math
import os
import re
import sys
import textwrap
from itertools import takewhile
from pathlib import Path

from cli.errors import UserError, local_rank


class Help(argparse.RawDescriptionHelpFormatter):
    """--help: leaves out rare flags (see flag_group), and shows only the first line about the others."""

    full = False

    def add_argument(self, action):
        if self.full or not getattr(action, "rare", False):
            super().add_argument(action)

    def _get_default_metavar_for_optional(self, action):
        is_number = re.search("number|count|int", getattr(action.type, "__name__", ""))
        return "N" if is_number else super()._get_default_metavar_for_optional(action)

    def _split_lines(self, text, width):
        lines = text.splitlines() if self.full else [text.partition("\n")[0]]
        width = min(width, 76)  # 100 with the flags
        return [row for line in lines for row in textwrap.wrap(line, width, break_on_hyphens=False)]


class FullHelp(Help):
    """--help-all: all flags, with all that there is to say about them."""

    full = True


class HelpAll(argparse._HelpAction):
    def __call__(self, parser, *given):
        parser.formatter_class = FullHelp
        super().__call__(parser, *given)


class ArgumentParser(argparse.ArgumentParser):
    """The parser of all commands. A mistake raises UserError. One process per node prints the help."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=Help, allow_abbrev=False, **kwargs)
        self.add_argument("--help-all", action=HelpAll, help="show all flags, and more about each of them")
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:  # closed, as by >&-
                setattr(sys, name, open(os.devnull, "r+"))
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):  # a terminal may lack characters; a notebook doesn't
                with contextlib.suppress(ValueError):  # a script has already read from it, or closed it
                    stream.reconfigure(errors="replace")

    def parse_known_args(self, args=None, namespace=None):
        """Names all unknown flags of a command at once, even if a required flag is missing."""
        words = takewhile("--".__ne__, sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
        unknown = [name + hint_for(name, known) for name in names if name not in known and " " not in name]
        if unknown and not self._subparsers:
            self.error(f"unrecognized arguments: {', '.join(unknown)}")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        message = message.replace("ignored explicit argument", "it takes no value, but got")
        raise UserError(f"{message}; --help-all lists all flags.")

    def print_help(self, file=None):
        if local_rank() == 0:
            super().print_help(file)


def parse_count(text: str) -> int:
    """'500k' → 500000; k, M and B stand for a thousand, a million and a billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbB]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count such as 5000, 500k, 20M or 1.5B")
    return round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2].lower()])


def flag_group(parser: ArgumentParser, title: str, usual: list[str] | None = None):
    """Starts a group of flags. Returns a function that adds a flag, given its name, type, help and default.
    The type is bool, an argparse action, a tuple of choices or a function.

    --help shows the first line of a flag's help (at most 100 characters), --help-all also the second. If you
    give `usual`, --help shows only these flags of the group.
    """
    group = parser.add_argument_group(title)

    def flag(name: str, flag_type, text: str, default=None):
        if default not in (None, ""):
            first, newline, more = text.partition("\n")
            text = f"{first} ({default}){newline}{more}"
        kind = {"choices" if isinstance(flag_type, tuple) else "type": flag_type, "default": default}
        if flag_type in (bool, argparse.BooleanOptionalAction):
            kind = {"action": "store_true" if flag_type is bool else flag_type}
        group.add_argument(name, help=text, **kind).rare = usual is not None and name not in usual

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
    """A type for argparse: a path or a source, or several with commas. A shell leaves the ~ in --out=~/x, so
    it's expanded here, unless a file of that name exists.
    """
    return text if os.path.exists(text) else ",".join(map(os.path.expanduser, text.split(",")))


def local_path(text: str) -> Path:
    """A type for argparse; see `expanded`."""
    return Path(expanded(text))


def utf8_path(text: str) -> Path:
    """A type for argparse. Raises ValueError if a path isn't UTF-8, because torch needs that."""
    return local_path(text.encode().decode())


def steps_or_fraction(text: str) -> int | float:
    """A type for argparse: a number of steps or, below 1, a fraction of the run."""
    value = bounded(0)(text)
    if value > 1 and value % 1:
        raise argparse.ArgumentTypeError(f"{text} is neither a whole number nor below 1")
    return int(value) if value >= 1 else value


steps_or_fraction.__name__ = "number"  # for argparse: "invalid number value"


# What to use instead of flags of other programs, if difflib wouldn't find it. Nothing before the colon: not
# needed.
OTHER_NAMES = """
--lr: learning-rate max-lr peak-lr
--steps: max-steps max-iters iters num-iterations num-steps total-steps train-steps train-iters
--steps: max-train-steps
--epochs: num-epochs num-train-epochs max-epochs
--schedule: lr-scheduler-type lr-scheduler scheduler
--warmup: warmup-steps warmup-iters warmup-ratio num-warmup-steps
--min-lr: lr-min min-lr-ratio min-learning-rate
--decay: warmdown-ratio decay-frac
--optimizer: optim
--weight-decay: wd
--batch or --global-batch: batch-size
--batch: micro-batch-size micro-batch device-batch-size per-device-train-batch-size
--global-batch: train-batch-size total-batch-size effective-batch-size global-batch-size
--grad-accum: gradient-accumulation gradient-accumulation-steps accumulate-grad-batches accumulation-steps
--grad-clip: max-grad-norm clip-grad-norm gradient-clip-val
--seq-len: block-size context context-length max-length max-seq-length sequence-length n-ctx
--d-model: n-embd hidden-size hidden-dim embed-dim dim width
--n-layer: depth layers num-hidden-layers h-layers
--n-head: heads num-attention-heads
--dropout: attention-dropout
--preset: custom-preset
--size: model model-size model-type preset custom-preset
--precision: dtype mixed-precision amp use-amp autocast
--precision fp16: fp16 half
--precision bf16: bf16 bfloat16
--device cpu: cpu use-cpu no-cuda
--strategy: fsdp deepspeed zero-stage
--checkpoint-activations: gradient-checkpointing grad-checkpointing activation-checkpointing
--compile: torch-compile
--init-from: model-name-or-path model-name pretrained from-pretrained
--data: dataset dataset-name data-dir data-path train-data train-file input
--tokenizer: tokenizer-name tokenizer-name-or-path
--out: out-dir output-dir save-dir checkpoint-dir log-dir logging-dir run-name
--resume: resume-from-checkpoint checkpoint load-checkpoint
--log-every: log-interval logging-steps log-steps
--eval-every: eval-interval eval-steps eval-strategy
--eval-batches: eval-iters
--eval-only: evaluate do-eval
--save-every: save-steps save-interval
--keep-last: save-total-limit
--wandb: report-to use-wandb wandb-log
--prompt: start sample
--temperature: temp
--backend: dist-backend ddp-backend distributed-backend
--timeout: ddp-timeout
--text-field: text-column dataset-text-field
--workers: num-proc num-workers preprocessing-num-workers
data.py prepare: text-field text-column dataset-text-field prompt-field response-field condition-field
data.py prepare: prepare val-field val-split split-on shard-tokens
torchrun --nproc_per_node=N: gpus num-gpus n-gpus n-gpu ngpus gpu devices nproc nproc-per-node num-processes
torchrun --nnodes=N: nnodes nodes num-nodes n-nodes num-machines
torchrun --node_rank=N: node-rank machine-rank
torchrun --master_addr=HOST: master-addr main-process-ip
torchrun --master_port=N: master-port main-process-port port
torchrun: distributed ddp multi-gpu
torchrun TRAINER.py: script training-script
the recipe in docs/changing.md: lora use-lora peft lora-r lora-rank lora-alpha use-custom-model custom-model
: local-rank rank world-size streaming num-workers dataloader-num-workers do-train shuffle flash-attn
: overwrite-output-dir lr-decay-iters num-samples max-new-tokens pin-memory
"""


def hint_for(word: str, known: dict) -> str:
    """What to use instead of an unknown flag, such as " (use --lr)". `known` has the flags of the command."""
    word = word.replace("_", "-")
    if word in known:
        return f" (use {word})"
    found = re.findall(rf"^(.*):.* {re.escape(word[2:])}(?!\S)", OTHER_NAMES, re.M)
    for use in found or difflib.get_close_matches(word, known, 1, 0.75):
        # torchrun, for example, only helps commands that join a process group
        if re.sub("torchrun|data.py|the", "--backend", use).partition(" ")[0] in known:
            return f" (use {use})"
    return " (not needed)" if found else ""


def table_of_sizes(keys, config_class: type, sizes: dict[str, dict]) -> str:
    """The sizes as columns, filled up with the defaults of the model. At most 100 characters wide."""
    table = [["--size", *sizes]]
    for key in keys:
        default = "data's" if key == "vocab_size" else getattr(config_class, key, "")
        table.append([key, *(str(row.get(key, default)) for row in sizes.values())])
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  " + " ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(["defaults of each size:", *lines])
