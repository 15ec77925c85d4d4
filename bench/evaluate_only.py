"""`--eval-only` of the trainers: evaluates a run that is there."""

import contextlib
import json
from argparse import Namespace
from types import SimpleNamespace

import torch
from torch import nn

from data import Masker, UserError
from ddp_utils import StopVote, World, assert_tokenizer, evaluate, load_data
from model import MLM
from monitor import results


def evaluate_only(model: nn.Module, saved: dict, args: Namespace, world: World):
    """Evaluates the model of the checkpoint `saved` on the validation sets of --data, beside a training, too:
    takes no lock and writes nothing into the run. Prints the results as a line, and as JSON for a script.
    Every rank calls this. With the run's flags and number of processes the losses are those of its log, up to
    rounding if blocks were compiled.
    """
    dataset = load_data(type(model), args, world)
    assert_tokenizer(saved, dataset.tokenizer, "prepare the data with its tokenizer.json")
    if not dataset.val:
        raise UserError(f"{dataset.name} has no validation set: prepare it with --val-split hash:0.1.")
    run = saved["settings"]
    if args.precision == "auto":
        model.compute_dtype = getattr(torch, run["precision"])
    masker = None
    if isinstance(model, MLM):
        masker = Masker(dataset.tokenizer, args.seq_len, run.get("EVAL_RATE", 0.15), 0)
    state = SimpleNamespace(model=model, world=world, averaged_weights=contextlib.nullcontext)
    found = evaluate(state, dataset, StopVote(world), args.batch or run["batch"],
                     args.eval_batches * run["global_batch"], masker)
    if found is None:  # a signal has cut it short
        raise KeyboardInterrupt
    if world.is_rank0:
        print(" | ".join([f"step {saved['step']} from {saved['path']} on {dataset.name}", *results(found)]))
        print(json.dumps({"step": saved["step"], "data": dataset.name} | found), flush=True)
