"""The flags that all trainers share, and those of a model's configuration.

startup/resume.py says which flags may change when a run resumes. refuse_together in training/strategies.py
refuses flags that can't train together, weights/use.py those that don't go with --prompt or --export.
make_optimizers in model.py makes the --optimizer.
"""

import itertools
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from dataclasses import dataclass, fields

from cli.errors import UserError, joined
from cli.files import without_surrogates
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


def flag_fields(config_class: type) -> list:
    """The fields of a model's configuration that are flags: those made with `flag` of model.py."""
    return [field for field in fields(config_class) if field.metadata]


def flags_of_model(config_class: type, args) -> dict:
    return {field.name: getattr(args, field.name) for field in flag_fields(config_class)}


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")
SHARDED = ("zero2", "zero3", "zero3-offload")  # no process has all parameters
# What --help shows of the flags that all trainers share; --help-all shows all of them
USUAL = ("--data --tokenizer --max-tokens --steps --epochs --global-batch --batch --optimizer --lr "
         "--warmup --precision --checkpoint-activations --strategy --out --eval-every --save-every --resume "
         "--init-from --wandb --eval-only --prompt --chat --temperature --top-k").split()


def make_parser(description: str, config_class: type, sizes: dict[str, dict], presets=()) -> ArgumentParser:
    """The parser of a trainer: --size or --preset, the flags of its model, and those that all share."""
    keys = dict.fromkeys(itertools.chain(*sizes.values()))
    parser = ArgumentParser(description=description, usage="%(prog)s [FLAGS]")
    keys.pop("checkpoint_activations", None)  # its name is too wide; --help-all says this default
    parser.epilog = table_of_sizes(keys, config_class, sizes)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--size", choices=sizes, help="model and recipe: a column of the table below (tiny)")
    if presets:
        choice.add_argument("--preset", dest="size", choices=presets, metavar="NAME",
                            help="a recipe of --list-presets, instead of --size")
    flag = flag_group(parser, "model")
    for option in flag_fields(config_class):
        kinds = {bool: BooleanOptionalAction, int: positive_int if option.default != 0 else nonnegative_int}
        kind = option.metadata["type"] or kinds.get(option.type, fraction)
        default = None if option.name in keys or option.type is bool else option.default  # to show
        flag(f"--{option.name.replace('_', '-')}", kind, option.metadata["help"], default)
    add_training_flags(parser)
    if hasattr(config_class, "response"):  # a CausalConfig: the model generates text
        add_text_flags(parser)
    return parser


def add_training_flags(parser: ArgumentParser):
    flag = flag_group(parser, "data", USUAL)
    flag("--data", expanded, "what to train on: stdlib, 'text:books/*.txt', fineweb-edu, … or a prepared "
         "directory\nA source is prepared first, from the hub 20 tokens per parameter. A,B,B reads two "
         "directories, and B twice per epoch.")
    flag("--tokenizer", expanded, "gpt2, cl100k_base, o200k_base, bytes, bpe:4096 or the path of a "
         "tokenizer.json\nbpe:N trains N tokens on the data. Default: as in the prepared data; for new "
         "data gpt2, except bpe:4096 for stdlib and bytes for task:addition.")
    flag("--max-tokens", parse_count, "prepare at most this many training tokens, before pairs are packed: "
         "500k, 20M, 1.5B")
    flag("--max-samples", parse_count, "prepare at most this many documents")
    flag("--min-words", positive_int, "prepare only documents with at least this many words")
    flag("--seed", bounded(0, 2**31, int), "seed of weights, sample order, dropout and samples of text", 0)
    flag = flag_group(parser, "steps and batches", USUAL)
    flag("--steps", positive_int, "optimizer steps of the run")
    flag("--epochs", bounded(1e-9), "passes over the data, instead of --steps")
    flag("--global-batch", positive_int, "sequences per step, over all processes")
    flag("--batch", positive_int, "sequences per micro-batch, on one process\n"
         "Default: the largest number up to the table's that divides the step evenly.")
    flag("--grad-accum", positive_int, "micro-batches per step, instead of --batch")
    flag = flag_group(parser, "optimization", USUAL)
    flag("--optimizer", ("adamw", "muon", "adam-atan2"), "muon: for matrices in blocks, AdamW for the rest; "
         "adam-atan2: AdamW without epsilon", "adamw")
    flag("--lr", bounded(0), "peak learning rate")
    flag("--schedule", ("cosine", "wsd", "constant"), "wsd: constant, then falling (--decay)", "cosine")
    flag("--min-lr", fraction, "last learning rate of cosine and wsd, as a fraction of --lr", 0.1)
    flag("--decay", bounded(0.001, 1), "fraction of the steps after the warm-up in which wsd decays", 0.2)
    flag("--warmup", steps_or_fraction, "steps of linear warm-up, or below 1 a fraction of the run\n"
         "Default: see the table. A run with fewer steps than its size warms up for fewer, too.")
    flag("--weight-decay", bounded(0), "weight decay of matrices", 0.1)
    flag("--grad-clip", bounded(0), "clip the gradient norm to this; 0: no clipping", 1.0)
    flag("--ema", fraction, "decay of averaged weights, to evaluate, prompt and export; try 0.999; 0: off\n"
         "After n steps the decay is at most (1 + n) / (10 + n).", 0.0)
    flag = flag_group(parser, "running", USUAL)
    flag("--precision", ("auto", "fp32", "bf16", "fp16"), "type of activations; parameters stay fp32\n"
         "auto: bf16 where that is faster", "auto")
    flag("--checkpoint-activations", ("auto", "none", "selective", "block"), "recompute activations to save "
         "memory: block saves the most, selective is faster\nblock keeps only the input of each "
         "block, selective also matrix products. Compiled on GPUs, selective rounds some sums differently. "
         "auto: on GPUs the fastest that fits, which a resumed run keeps; on CPUs none (the HRM's 350m: "
         "selective, its 1b: block).", "auto")
    flag("--strategy", STRATEGIES, "what to shard across processes, to save memory\n"
         "zero1: optimizer state; zero2: also gradients; zero3: also parameters; zero3-offload: the same, in "
         "host memory. A run can resume with any of them.", "ddp")
    flag("--device", ("auto", "cuda", "cpu"), "auto: a GPU if there is one", "auto")
    parser.add_argument("--dry-run", nargs="?", const="", metavar="GPUSxGB",
                        help="only estimate memory, for this machine or for 8x141 (8 GPUs with 141 GB each)")
    flag("--comm", ("fp32", "bf16", "late"), "what processes send each other; bf16 and late help slow "
         "networks\nbf16: gradients of ddp; parameters and gradients of blocks with shards and bf16 "
         "activations. late: int8 gradients, applied one step late; best with --optimizer muon.", "fp32")
    flag = flag_group(parser, "output", USUAL)
    flag("--out", utf8_path, "directory of the run (default: runs/MODEL-SIZE-DATA-TOKENIZER)\n"
         "A run that is there is resumed or used. It keeps its own flags, except those that you give.")
    flag("--log-every", positive_int, "steps between log lines", 10)
    flag("--eval-every", positive_int, "steps between evaluations")
    flag("--eval-batches", nonnegative_int, "batches to evaluate of each validation set; 0: all\n"
         "Such a batch has as many sequences as the table's global_batch.")
    flag("--save-every", positive_int, "steps between checkpoints")
    flag("--keep-last", positive_int, "checkpoints to keep, besides the best", 3)
    flag("--resume", expanded, "auto: the newest checkpoint in --out; none: a new run; or the path of a "
         "checkpoint or run\nA new run needs an --out without checkpoints.", "auto")
    flag("--init-from", expanded, "start from the weights of hf:DIR_OR_ID, a checkpoint or a run directory\n"
         "Then the defaults are 3 epochs, 32 sequences per step, a learning rate of 3e-5 and no warm-up.")
    flag("--wandb", BooleanOptionalAction, "also log to Weights & Biases (pip install wandb)\n"
         "With WANDB_MODE=offline it logs to wandb/ in the run; upload that with wandb sync.")
    flag("--eval-only", bool, "evaluate the newest checkpoint, or --resume, without training\n"
         "It prints a line and a JSON object. --data names other validation sets. The run stays as it is.")
    parser.add_argument("--export", nargs="?", const="hf", default=False, choices=("hf", "gguf"),
                        help="write hf/ for transformers, or model.gguf for llama.cpp, without training")


def add_rare_flags(parser: ArgumentParser):
    flag = flag_group(parser, "rarely needed", USUAL)
    flag("--compile", BooleanOptionalAction, "compile each block (default: on GPUs)")
    flag("--fast", BooleanOptionalAction, "on GPUs, allow kernels that are faster but not deterministic\n"
         "Rounding then differs after a resume, and in compiled blocks that are recomputed.")
    flag("--backend", ("auto", "nccl", "gloo"), "auto: nccl on GPUs", "auto")
    flag("--timeout", positive_int, "seconds that a collective may take", 600)


def add_text_flags(parser: ArgumentParser):
    flag = flag_group(parser, "prompts and responses", USUAL)
    flag("--loss", ("response", "all"), "tokens to learn (default: response with pairs, else all)")
    text = without_surrogates
    flag("--prompt", text, "continue or answer this text with the newest checkpoint, without training")
    flag("--chat", bool, "answer the prompts that you type; with --chat < FILE, each line of the file")
    flag("--condition", text, "text, or name of a special token, to put before each prompt", "")
    flag("--sample-prompt", text, "prompt of samples in training (default with pairs: a held-out one)", "")
    flag("--sample-every", nonnegative_int, "evaluations between samples; 0: only at the end", 0)
    flag = flag_group(parser, "sampling", USUAL)
    flag("--num-samples", positive_int, "texts for each --prompt, written at once", 1)
    flag("--max-new-tokens", positive_int, "tokens in a sample (default: 200; an answer: up to the context)")
    flag("--temperature", bounded(0), "divides the logits; 0: always the likeliest token", 0.8)
    flag("--top-k", nonnegative_int, "sample only from the N likeliest tokens; 0: from all", 50)
    flag("--top-p", bounded(0, 1), "sample only from the fewest tokens with a probability of N together", 1.0)


def uses_model(args: Namespace) -> bool:
    """Whether the flags use a model (use_model) instead of training."""
    return any(vars(args).get(name) not in (None, False)
               for name in ("eval_only", "export", "prompt", "chat", "fill"))


@dataclass
class Command:
    """A command line, parsed once."""

    parser: ArgumentParser
    config_class: type
    sizes: dict[str, dict]
    argv: list[str] | None
    given: dict  # the flags on the command line
    defaults: dict  # of all flags, for values that neither the command line nor the row sets


def parse_flags(parser: ArgumentParser, config_class: type, sizes: dict[str, dict],
                argv: list[str] | None) -> Command:
    """Parses the command line of a trainer. Raises UserError for flags that exclude each other."""
    add_rare_flags(parser)  # after the trainer's flags, so that --help-all ends with them
    defaults = dict(parser._defaults)  # of set_defaults
    for action in parser._actions:
        if isinstance(action.default, str) and action.default != SUPPRESS:  # as argparse does
            action.default = parser._get_value(action, action.default)
        if action.default is not SUPPRESS:
            defaults[action.dest] = action.default
        action.default = SUPPRESS  # a flag that isn't given is absent
    parser._defaults.clear()
    defaults |= {"vocab_size": None} | {option.name: option.default for option in flag_fields(config_class)}
    given = vars(parser.parse_args(argv))
    for name, row in sizes.items():
        if unknown := sorted(row.keys() - defaults):
            raise UserError(f"the row {name} of the sizes sets {joined(unknown)}, which is no flag's name.")
    if "steps" in given:
        if "epochs" in given:
            raise UserError("--epochs and --steps exclude each other: leave one out.")
        given["epochs"] = None
    if "dry_run" in given:
        if uses_model(Namespace(**given)):
            raise UserError("--dry-run only estimates: leave out --prompt, --export and the like.")
        if "init_from" in given and "size" not in given:
            raise UserError("--dry-run doesn't read the weights of --init-from: give their --size, too.")
    return Command(parser, config_class, sizes, argv, given, defaults)
