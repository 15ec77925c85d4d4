"""`python data.py`."""

import argparse
import os
import re
import signal
from pathlib import Path

import numpy as np

from cli.errors import UserError, owns_python
from cli.files import sha256_of
from cli.parser import ArgumentParser, expanded, flag_group, local_path, parse_count, positive_int
from data import (
    HOW_TO_RESTORE,
    SOURCES,
    Dataset,
    Shards,
    open_shard,
    packed_row_length,
    read_manifest,
    read_rows,
    read_tokenizer,
    shuffled,
    unigram_entropy,
)
from prepare.pipeline import describe, prepare
from prepare.sources import LARGEST_ROW, TASK_ROW
from vocab.tokenizer import TOKENIZERS


def parse_val_split(text: str) -> str:
    if re.fullmatch(r"(hash|tail):0\.\d+|hash:1", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not hash:F or tail:F with a fraction F such as 0.01")


class NotPreparedError(UserError):
    """Its argument, a path, is no prepared directory."""


def verify(directory: Path):
    """Compares the checksums of the tokenizer and of all shards with the manifest. Raises UserError if one
    differs, and NotPreparedError without a manifest.
    """
    manifest = read_manifest(directory)
    if not manifest:
        raise NotPreparedError(directory)
    read_tokenizer(directory, manifest)
    for shard in manifest["shards"]:
        path = directory / shard["file"]
        open_shard(path)  # raises if header or length are wrong, with a more precise error
        if sha256_of(path) != shard["sha256"]:
            raise UserError(f"{path} has changed: {HOW_TO_RESTORE}")
        print(f"{shard['file']}: {shard['tokens']:,} tokens, checksum OK")
    print(f"{directory}: OK" + ("" if manifest["complete"] else ", but incomplete: run prepare again"))


def splits_of(dataset: Dataset) -> dict[str, Shards]:
    """The sets of a data set by split: `train`, `val` or `val_NAME`."""
    held_out = {f"val_{name}".rstrip("_"): shards for name, shards in dataset.val.items()}
    return {"train": dataset.train, **held_out}


def info(directory: Path, tokenizer_name: str | None):
    """Prints what a prepared directory holds."""
    dataset = Dataset([directory], packed_row_length(directory) or 1, tokenizer_name)
    print(f"{dataset.manifest['dataset']}: {describe(dataset.manifest)}")
    print("settings: " + ", ".join(f"{k} {v}" for k, v in dataset.manifest["settings"].items() if v))
    for split, shards in splits_of(dataset).items():
        entropy = unigram_entropy([shards])
        print(f"{split}: {shards.num_tokens:,} tokens in {len(shards.tokens)} shards of {shards.dtype}, "
              f"unigram entropy {entropy:.4f} nats")
    tokenizer = dataset.tokenizer
    print(f"tokenizer: {tokenizer.name}, {tokenizer.vocab_size} ids, end of text is {tokenizer.eot}, "
          f"[MASK] is {tokenizer.mask}\nfingerprint: {dataset.fingerprint}")


def peek(directory: Path, tokenizer_name: str | None, rows: int, split: str, seq_len: int | None):
    """Prints a few random rows of a split as text; the same ones each time."""
    seq_len = seq_len or packed_row_length(directory) or 128
    dataset = Dataset([directory], seq_len, tokenizer_name)
    splits = splits_of(dataset)
    if split not in splits:
        raise UserError(f"{directory} has no --split {split}: use one of {', '.join(splits)}.")
    shards = splits[split]
    picked = np.sort(shuffled(np.arange(min(rows, shards.rows)), shards.rows, 0))
    for row, tokens in zip(picked, read_rows(shards, picked)[0]):
        print(f"--- {split} row {row}\n{dataset.tokenizer.decode(tokens)}")


def main():
    parser = ArgumentParser(description="Prepares and inspects shards of tokens.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="tokenize a data set into shards; run it again to resume",
                            usage="%(prog)s --dataset DATASET [FLAGS]")
    p.add_argument("--dataset", "--data", required=True,
                   help=f"stdlib, 'text:books/*.txt', fineweb-edu or another one of --help-all\n{SOURCES}")
    p.add_argument("--out", type=local_path, help="directory to write (default: shards/DATASET-TOKENIZER)")
    p.add_argument("--tokenizer", type=expanded, dest="tokenizer_name",
                   help=f"{TOKENIZERS}\nDefault: gpt2, but bpe:4096 for stdlib and bytes for task:addition.")
    flag = flag_group(p, "settings")
    flag("--max-samples", parse_count, "stop after this many documents: 500k, 2M")
    flag("--max-tokens", parse_count, "stop at this many training tokens, before pairs are packed: 20M, 1.5B")
    flag("--min-words", int, "skip documents with fewer words", 0)
    flag("--text-field", str, "field or column with the text; meta.text is the field text in meta", "text")
    flag("--split-on", str, "text between the documents of a text: file, such as '<|endoftext|>'\n"
         "If it includes the newlines around it: $'\\n<|endoftext|>\\n'. Default: a file is one document.")
    flag("--val-split", parse_val_split, "hash:0.01 holds out 1 %% of the documents, by a hash of the text; "
         "tail:0.1 its last tenth\nhash:1 holds out all. Default: tail:0.1 for fewer than 100 text files; "
         "hash:0.1 for less than 40 MB, --max-tokens below 10M, --max-samples below 10k, or a stdlib of "
         "less than 1,000 files; 0.05 for task:addition; else hash:0.01.")
    flag("--val-field", str, "make a validation set, val_VALUE, for each value of this field, at most 16\n"
         "Default: none; the level for task:addition.")
    flag("--shard-tokens", parse_count, "tokens per shard", "100M")
    flag("--workers", positive_int, "threads that tokenize (default: one per core)")
    flag = flag_group(p, "pairs of prompt and response")
    flag("--prompt-field", str, "field that holds the prompt of a pair")
    flag("--response-field", str, "field with the response, or again --prompt-field for a list of messages\n"
         "In a list, each answer is a response, and all messages before it are its prompt.")
    flag("--condition-field", str, "field to put before the prompt: text, or the name of a special token")
    flag("--row", int, "tokens per row of whole pairs: the trainer's --seq-len\nDefault: the multiple of 64 "
         f"for the longest of the first 10,000 pairs, up to {LARGEST_ROW}; {TASK_ROW} for task:addition.")
    flag("--long", ("truncate", "drop"), "what to do with a response that is too long (default: truncate)")
    p.set_defaults(run=prepare)
    for run, text in ((info, "what a prepared directory holds"),
                      (verify, "compare each byte of prepared data, a run or a checkpoint with its checksum"),
                      (peek, "print a few rows as text")):
        p = commands.add_parser(run.__name__, help=text, usage="%(prog)s [FLAGS] directory")
        p.add_argument("directory", type=local_path)
        p.set_defaults(run=run)
        if run is not verify:
            p.add_argument("--tokenizer", type=expanded, dest="tokenizer_name",
                           help="for shards without a manifest")
        if run is peek:
            flag = flag_group(p, "which rows")
            flag("--rows", positive_int, "how many", 3)
            flag("--split", str, "train, val, or val_NAME", "train")
            flag("--seq-len", positive_int, "tokens in a row (default: 128; pairs have their own)")
    args = vars(parser.parse_args())
    del args["command"]
    args.pop("run")(**args)


def stop(number, frame):
    """Ends the process on Ctrl-C. Raising KeyboardInterrupt could leave a thread's lock held, and the process
    would hang.
    """
    os.write(2, b"\nstopped: finished shards are kept; run the same command again to resume\n")
    os._exit(130)


def command():
    """Runs the command."""
    # not if the shell started us in the background, where SIGINT is ignored
    if owns_python() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    main()
