"""Evaluates a run that is there, on the validation sets of its data or of others. Writes nothing and takes no
lock.

    python bench/evaluate.py runs/hrm-tiny-stdlib-bpe4096                  # the loss of its newest checkpoint
    python bench/evaluate.py runs/x/checkpoints/best.pt --data shards/other,shards/third --eval-cycles 8
    torchrun --nproc_per_node=8 bench/evaluate.py runs/x --strategy zero3  # too large for one process

Prints the results as a line, and as JSON for a script. With the run's own data, batches and number of
processes the losses are those of its log (up to rounding if blocks were compiled), beside training too. All
nodes need the same flags.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import (ArgumentParser, Dataset, Masker, UserError, directory_of, read_manifest,  # noqa: E402
                  sources_of)
from ddp_utils import (STRATEGIES, StopVote, evaluate, init, launch, load_checkpoint,  # noqa: E402
                       load_model, nonnegative_int, positive_int, tokenizer_id)
from monitor import EVALUATION, format_known, named_sets  # noqa: E402

TRAINERS = {"HRM": "train_hrm", "GPT2": "train_gpt2", "MLM": "train_mlm"}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    flag = parser.add_argument
    flag("run", help="the directory of a run, or a checkpoint")
    flag("--data", help="prepared directories, with commas between (default: the data of the run)")
    flag("--eval-cycles", type=positive_int, help="cycles of an HRM (default: as in its evaluations)")
    flag("--eval-batches", type=nonnegative_int, help="batches of each set; 0: all (default: as in the run)")
    flag("--batch", type=positive_int, help="sequences at a time (default: as in the run)")
    flag("--strategy", choices=STRATEGIES, default="ddp", help="zero3 shards the model (ddp)")
    flag("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(auto: a GPU if there is one)")
    flag("--timeout", type=positive_int, default=600, help="seconds to wait for a lost process (600)")
    args = parser.parse_args()
    world = init("auto", args.device, args.timeout)
    saved = load_checkpoint(args.run, world, print)
    run = saved["settings"]
    if saved["family"] not in TRAINERS:
        raise UserError(f"{args.run} holds a model of the family {saved['family']}: add its trainer to "
                        f"TRAINERS in {__file__}.")
    trainer = importlib.import_module(TRAINERS[saved["family"]])
    model_class = getattr(trainer, saved["family"])
    cycles = {"eval_cycles": args.eval_cycles} if args.eval_cycles else {}
    model, _ = load_model(model_class, args.run, world, print, strategy=args.strategy, saved=saved, **cycles)
    model.compute_dtype = getattr(torch, run["precision"])

    directories = [directory_of(source, run["tokenizer"]) for source in sources_of(args.data or run["data"])]
    # shards of other programs come without a tokenizer
    foreign = None if any(map(read_manifest, directories)) else saved["tokenizer_file"]
    dataset = Dataset(directories, saved["seq_len"], foreign, saved["loss_on"])
    if tokenizer_id(dataset.tokenizer).split()[-1] != saved["tokenizer"].split()[-1]:  # only the digests
        raise UserError(f"{args.run} was trained with the tokenizer {saved['tokenizer']}, the data have "
                        f"{tokenizer_id(dataset.tokenizer)}: prepare them with its tokenizer.json.")
    if not dataset.val:
        raise UserError(f"{dataset.name} has no validation set: prepare it with --val-split hash:0.1.")
    masker = None
    if saved["family"] == "MLM":
        masker = Masker(dataset.tokenizer, saved["seq_len"], trainer.EVAL_RATE, 0)
    batches = run["eval_batches"] if args.eval_batches is None else args.eval_batches
    state = SimpleNamespace(model=model, world=world, averaged_weights=contextlib.nullcontext)
    limit = batches * run["global_batch"]
    found = evaluate(state, dataset, StopVote(world), args.batch or run["batch"], limit, masker)
    if found is None:  # a signal has ended it
        raise KeyboardInterrupt
    if not world.is_rank0:
        return
    parts = [f"step {saved['step']} on {dataset.name}", *format_known(found, EVALUATION), *named_sets(found)]
    print(" | ".join(parts))
    record = {"run": str(args.run), "step": saved["step"], "data": dataset.name} | found
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    launch(main)
