"""The flags that all trainers share, and those of a model's configuration. Which of them may change when a
run resumes, and which are refused together (refuse_together), is in cli/run.py; weights/use.py refuses those
of --prompt and --export. --optimizer is chosen in model.py.
"""

import itertools
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from dataclasses import dataclass, field, fields

from cli.errors import UserError
from cli.parser import (
    ArgumentParser,
    bounded,
    expanded,
    flag_group,
    fraction,
    nonnegative_int,
    parse_count,
    positive_int,
    steps_or_fraction,
    table_of_sizes,
    utf8_path,
)
from prepare.vocabulary import without_surrogates


def flag(default, help: str, type=None):
    """A configuration field that is also a command-line flag of the trainer, with this default and help text.
    `type`, choices or a function, is for values that are neither a number nor a switch.
    """
    return field(default=default, metadata={"help": help, "type": type})


def flag_fields(config_class: type) -> list:
    """The fields of a model's configuration that are flags; see `flag`."""
    return [field for field in fields(config_class) if field.metadata]


def flags_of_model(config_class: type, args) -> dict:
    return {field.name: getattr(args, field.name) for field in flag_fields(config_class)}


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")
SHARDED = ("zero2", "zero3", "zero3-offload")  # no process holds all parameters


def make_parser(description: str, config_class: type, sizes: dict[str, dict], presets=()) -> ArgumentParser:
    """The parser of a trainer: --size or --preset, its model's flags, and those that all trainers share."""
    keys = dict.fromkeys(itertools.chain(*sizes.values()))
    parser = ArgumentParser(description=description, usage="%(prog)s [FLAGS]")
    parser.epilog = table_of_sizes(keys, config_class, sizes)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--size", choices=sizes, help="a row of the defaults below (tiny)")
    if presets:
        choice.add_argument("--preset", dest="size", choices=presets, help="a recipe instead of a --size")
    flag = flag_group(parser, "model")
    for option in flag_fields(config_class):
        kinds = {bool: BooleanOptionalAction, int: positive_int if option.default != 0 else nonnegative_int}
        text = option.metadata["help"]
        if option.name not in keys and option.default is not None and option.type is not bool:
            text += f" ({option.default})"  # `parse_flags` sets it, because sizes have their own
        kind = option.metadata["type"] or kinds.get(option.type, fraction)
        flag(f"--{option.name.replace('_', '-')}", kind, text)
    add_training_flags(parser)
    if hasattr(config_class, "response"):  # a CausalConfig: the model writes text
        add_text_flags(parser)
    return parser


def add_training_flags(parser: ArgumentParser):
    flag = flag_group(parser, "data")
    flag("--data", expanded, "a prepared directory, or a source such as stdlib, text:GLOB or fineweb-edu, "
         "which is prepared if needed (from the hub 20 tokens per parameter); A,B,B reads two directories, "
         "and B twice in each epoch")
    flag("--tokenizer", expanded, "gpt2, cl100k_base, o200k_base, bytes, bpe:N or the path of a "
         "tokenizer.json (default: that of the prepared data; bpe:4096 for stdlib, bytes for task:addition, "
         "else gpt2)")
    flag("--max-tokens", parse_count, "prepare at most this many training tokens, of pairs before they are "
         "packed: 500k, 20M, 1.5B")
    flag("--max-samples", parse_count, "prepare at most this many documents")
    flag("--min-words", positive_int, "prepare only documents with at least this many words")
    flag("--seed", bounded(0, 2**31, int),
         "seed of weights, sample order, dropout and samples of text", 0)
    flag = flag_group(parser, "steps and batches")
    flag("--steps", positive_int, "optimizer steps of the run")
    flag("--epochs", bounded(1e-9), "passes over the data, instead of --steps")
    flag("--global-batch", positive_int, "sequences in a step, summed over all processes")
    flag("--batch", positive_int, "sequences in a micro-batch (default: the largest divisor up to the "
         "table's)")
    flag("--grad-accum", positive_int, "micro-batches in a step, instead of --batch")
    flag = flag_group(parser, "optimization")
    flag("--optimizer", ("adamw", "muon", "adam-atan2"), "muon: for matrices in blocks, AdamW for "
         "the rest; adam-atan2: AdamW without an epsilon, as HRM-Text has it", "adamw")
    flag("--lr", bounded(0), "peak learning rate")
    flag("--schedule", ("cosine", "wsd", "constant"), "wsd: constant, then falling (--decay)", "cosine")
    flag("--min-lr", fraction, "rate of the last step of cosine and wsd, as a fraction of --lr", 0.1)
    flag("--decay", bounded(0.001, 1), "last part of the steps of wsd in which the rate falls", 0.2)
    flag("--warmup", steps_or_fraction, "steps of linear warm-up; below 1 a fraction of the run "
         "(default: see below; in proportion where a run has fewer steps than its size)")
    flag("--weight-decay", bounded(0), "weight decay of matrices", 0.1)
    flag("--grad-clip", bounded(0), "clip the gradient norm to this; 0: no clipping", 1.0)
    flag("--ema", fraction, "decay of averaged weights for evaluation, --prompt and --export, after n steps "
         "at most (1 + n) / (10 + n); 0: off", 0.0)
    flag = flag_group(parser, "running")
    flag("--precision", ("auto", "fp32", "bf16", "fp16"), "type of activations (parameters: fp32); "
         "auto: bf16 where the hardware has it", "auto")
    flag("--checkpoint-activations", ("none", "selective", "block"), "recompute in the backward "
         "pass, exactly: block keeps only the input of a block, selective the matrix products too (compiled "
         "on GPUs, some sums are then rounded otherwise); large sizes of the HRM have a default, for 80 GB",
         "none")
    flag("--strategy", STRATEGIES, "what is sharded across processes: nothing, the optimizer state, "
         "also gradients, also parameters, also into host memory; each resumes from any other", "ddp")
    flag("--device", ("auto", "cuda", "cpu"), "auto: a GPU if there is one", "auto")
    parser.add_argument("--dry-run", nargs="?", const="", metavar="GPUSxGB",
                        help="only estimate the memory of each process: here, or on 8x141 (8 GPUs of 141 GB)")
    flag("--comm", ("fp32", "bf16", "late"), "type of what is sent: with --strategy ddp gradients, with "
         "shards and bf16 activations the parameters and gradients of blocks; late, for slow links: int8 "
         "gradients, sent during the next step and applied one step late, best with --optimizer muon", "fp32")
    flag = flag_group(parser, "output")
    flag("--out", utf8_path, "directory of the run (default: runs/MODEL-SIZE-DATA); if it holds one, that is "
         "resumed or used as it was, but for the flags that are given")
    flag("--log-every", positive_int, "steps between log lines", 10)
    flag("--eval-every", positive_int, "steps between evaluations")
    flag("--eval-batches", nonnegative_int, "batches of a validation set to evaluate, each with the table's "
         "global_batch sequences, whatever --global-batch is; 0: all")
    flag("--save-every", positive_int, "steps between checkpoints")
    flag("--keep-last", positive_int, "checkpoints to keep, beside the best", 3)
    flag("--resume", expanded, "auto: from the newest checkpoint in --out; none: start from scratch, in "
         "an --out without checkpoints; or the path of a checkpoint or of a run directory", "auto")
    flag("--init-from", expanded, "start from the weights of hf:DIR_OR_ID, a checkpoint or a run directory, "
         "by default for 3 epochs of 32 sequences a step, with a learning rate of 3e-5 and no warm-up")
    flag("--wandb", BooleanOptionalAction, "also log to Weights & Biases (pip install wandb); with "
         "WANDB_MODE=offline into wandb/ of the run, for wandb sync")
    flag("--eval-only", bool, "evaluate the newest checkpoint, or that of --resume, on the validation "
         "sets of --data (default: of the run), and do nothing else: prints a line and a JSON object, and "
         "leaves the run as it is")
    parser.add_argument("--export", nargs="?", const="hf", default=False, choices=("hf", "gguf"),
                        help="write hf/ for transformers, or with gguf model.gguf for llama.cpp, from the "
                        "newest checkpoint, without training")


def add_rare_flags(parser: ArgumentParser):
    flag = flag_group(parser, "rarely needed")
    flag("--compile", BooleanOptionalAction, "compile each block (default: on GPUs)")
    flag("--fast", BooleanOptionalAction, "on GPUs, allow non-deterministic kernels: the last bits then "
         "change when a run resumes, and in compiled blocks with --checkpoint-activations block")
    flag("--backend", ("auto", "nccl", "gloo"), "auto: nccl on GPUs", "auto")
    flag("--timeout", positive_int, "seconds to wait for a lost process", 600)


def add_text_flags(parser: ArgumentParser):
    flag = flag_group(parser, "prompts and responses")
    flag("--loss", ("response", "all"), "tokens to learn (default: response with pairs, else all)")
    text = without_surrogates
    flag("--prompt", text, "continue or answer a text with the newest checkpoint, without training")
    flag("--chat", bool, "answer prompts that are typed in, one after another; --chat < FILE: each line")
    flag("--condition", text, "text, or name of a special token, to put in front of a prompt", "")
    flag("--sample-prompt", text, "prompt of the samples (default with pairs: a held-out one)", "")
    flag("--sample-every", nonnegative_int, "evaluations between samples; 0: only at the end", 0)
    flag = flag_group(parser, "sampling")
    flag("--num-samples", positive_int, "texts for each --prompt, written at once", 1)
    flag("--max-new-tokens", positive_int, "length of a sample (200; an answer's: to the end of the context)")
    flag("--temperature", bounded(0), "0: always the likeliest token", 0.8)
    flag("--top-k", nonnegative_int, "likeliest ids to keep; 0: all", 50)
    flag("--top-p", bounded(0, 1), "then the likeliest ids whose probabilities reach this sum", 1.0)


def uses_model(args: Namespace) -> bool:
    """Whether the flags ask for use_model instead of training."""
    return any(vars(args).get(name) not in (None, False)
               for name in ("eval_only", "export", "prompt", "chat", "fill"))


@dataclass
class Command:
    """A command line, parsed once."""

    parser: ArgumentParser
    config_class: type
    rows: dict[str, dict]  # the sizes
    argv: list[str] | None
    given: dict  # the flags that it gives
    defaults: dict  # of all flags, for what neither it nor a row says


def parse_flags(parser: ArgumentParser, config_class: type, sizes: dict[str, dict],
                argv: list[str] | None) -> Command:
    """Parses the command line of a trainer. Raises UserError for flags that exclude each other."""
    add_rare_flags(parser)  # after those of the trainer, so that --help ends with them
    defaults = dict(parser._defaults)  # of set_defaults
    for action in parser._actions:
        if isinstance(action.default, str) and action.default != SUPPRESS:  # as argparse does
            action.default = parser._get_value(action, action.default)
        if action.default is not SUPPRESS:
            defaults[action.dest] = action.default
        action.default = SUPPRESS  # what is not given is absent
    parser._defaults.clear()
    defaults |= {"vocab_size": None} | {option.name: option.default for option in flag_fields(config_class)}
    given = vars(parser.parse_args(argv))
    if "steps" in given:
        if "epochs" in given:
            raise UserError("--epochs is not allowed with --steps: leave one of them out.")
        given["epochs"] = None
    if "dry_run" in given:
        if uses_model(Namespace(**given)):
            raise UserError("--dry-run is alone: leave out --prompt, --export and the like.")
        if "init_from" in given and "size" not in given:
            raise UserError("--dry-run does not read the weights of --init-from: give their --size as well.")
    return Command(parser, config_class, sizes, argv, given, defaults)
