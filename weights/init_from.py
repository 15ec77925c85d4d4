"""The weights that a run starts from (--init-from), and models beside the one in training (load_frozen)."""

import math
from contextlib import suppress
from dataclasses import asdict, fields

import torch
from torch import nn

from cli.errors import UserError, listed
from ddp_utils import (
    Run,
    apply_modes,
    assert_family,
    build_model,
    config_of,
    copy_weights,
    load_checkpoint,
    on_rank0,
    run_and_wait,
)
from model import VOCAB_TENSORS, ModelConfig
from prepare.tokenizer import GPT2_DIGEST, load_tokenizer
from prepare.vocabulary import tokenizer_id, tokenizer_in
from weights.huggingface import HF_FAMILIES, config_from_hf, from_hf


def assert_tokenizer(saved: dict, tokenizer, way_out: str):
    """Raises UserError if a checkpoint is of another tokenizer, whatever their names."""
    ours = tokenizer_id(tokenizer)
    if ours.split()[-1] != saved["tokenizer"].split()[-1]:
        raise UserError(f"{saved['path']} was trained with the tokenizer {saved['tokenizer']}, not with "
                        f"{ours}: {way_out}.")


def gentler(row: dict) -> dict:
    """Where a run that continues from trained weights departs from the row of its size."""
    batch = min(32, row["global_batch"])
    eval_batches = math.ceil(row["eval_batches"] * batch / row["global_batch"])
    return {"lr": 3e-5, "warmup": 0, "epochs": 3, "eval_every": 50, "save_every": 50, "global_batch": batch,
            "eval_batches": eval_batches, "schedule": "cosine", "ema": min(0.999, row.get("ema", 0.0))}


def weights_of(model_class: type, source: str, complete: bool = True) -> dict:
    """What is known of the weights of --init-from: `path`, `model_config` (what the model does not know of it
    is in `left_over`), tokenizer, `settings` of their run, and on rank 0, if `complete`, their tensors in
    `weights`. Raises UserError on all ranks.
    """
    weights = {}

    def read_hf() -> dict:
        theirs = next((base for base in model_class.__mro__ if base in HF_FAMILIES), model_class)
        config, files = config_from_hf(theirs, source[3:])
        if complete:
            weights.update(from_hf(theirs, source[3:]).state_dict())
        file = tokenizer_in(files[0].parent)
        known = ""
        with suppress(UserError):  # one that is refused matters only if it is used
            known = tokenizer_id(load_tokenizer(file)) if file else ""
            if known.endswith(GPT2_DIGEST):
                load_tokenizer("gpt2")  # if that can be had
                file = "gpt2"
        return {"path": source, "model_config": asdict(config), "settings": {}, "tokenizer": known,
                "tokenizer_file": file}

    if source.startswith("hf:"):
        checkpoint = on_rank0(read_hf)
    else:
        checkpoint = load_checkpoint(source, print, checked=complete, or_best=True)
        weights = checkpoint["tensors"]["model"] | checkpoint["tensors"]["ema"]
        if model_class in HF_FAMILIES:  # a model of one's own may start from any other
            assert_family(checkpoint, model_class)
            config_of(model_class.Config, checkpoint["model_config"], checkpoint["path"])
    ours = {field.name for field in fields(model_class.Config)}
    config = {name: value for name, value in checkpoint["model_config"].items() if name in ours}
    # a new run may have longer rows than that one, and always has its tokenizer
    return checkpoint | {"weights": weights, "model_config": config, "seq_len": config["seq_len"],
                         "tokenizer_flag": checkpoint["tokenizer_file"],
                         "left_over": sorted(checkpoint["model_config"].keys() - ours)}


def nearest_size(sizes: dict[str, dict], record: dict) -> str:
    """The size that the record of weights names, or the first of those that differ from it in the fewest
    fields.
    """
    config = record["model_config"]
    size = record["settings"].get("size")
    unlike = {name: sum(row.get(key, config[key]) != config[key] for key in config)
              for name, row in sizes.items()}
    return size if size in sizes else min(unlike, key=unlike.get)


def assert_context(model_class: type, weights: dict, seq_len: int):
    """Raises UserError if weights cannot read rows of seq_len tokens."""
    with torch.device("meta"):
        model = model_class(model_class.Config(**weights["model_config"]))
    known = model.config.seq_len
    if seq_len > known and "positions.weight" in model.state_dict():
        raise UserError(f"{weights['path']} has learned positions for {known} tokens: lower --seq-len.")


def assert_ids(checkpoint: dict, run: Run, vocab_size: int):
    """Raises UserError if an id that the weights know is that of another token in the data. Warns if nobody
    knows what the ids of the weights mean.
    """
    source, most = checkpoint["path"], checkpoint["model_config"]["vocab_size"]
    tokenizer = run.dataset.tokenizer
    if not (checkpoint["tokenizer"] and checkpoint["tokenizer_file"]):
        run.say(f"WARNING: {source} knows {most} ids, {tokenizer.name} {vocab_size}: its weights are of use "
                "only if these ids mean the same, which is not known here: use the tokenizer of that model")
    elif not on_rank0(has_same_ids, checkpoint, tokenizer):
        raise UserError(f"{source} was trained with the tokenizer {checkpoint['tokenizer']}, the data have "
                        f"{tokenizer_id(tokenizer)}: prepare them with its tokenizer.json.")


def has_same_ids(checkpoint: dict, tokenizer) -> bool:
    """Whether each id that the weights know is that of the same token in the data."""
    known_by = load_tokenizer(checkpoint["tokenizer_file"])
    assert_tokenizer(checkpoint, known_by, "it lies beside another tokenizer.json, so put its own there")
    most, theirs = checkpoint["model_config"]["vocab_size"], known_by.vocab
    return all(theirs.get(token) == i for token, i in tokenizer.vocab.items() if i < most)


def attention_from(checkpoint: dict, run: Run, usual: str | None) -> dict:
    """The attention to train with, as a field of the configuration, if the weights have one: what is given,
    else that of the weights, if they say it and it suits the data (only prompts have a prefix), else the
    `usual` one. Warns if the weights had another.
    """
    theirs = checkpoint["model_config"].get("attention")
    if not theirs:
        return {}
    says = theirs == "prefix" or not run.args.init_from.startswith("hf:")  # an export cannot say more
    fits = theirs != "prefix" or run.dataset.loss == "response"
    ours = theirs if says and fits and not vars(run.args).get("attention") else usual
    if theirs != ours and "prefix" in (theirs, ours):
        run.say(f"WARNING: {checkpoint['path']} was trained with {theirs if says else 'causal or isolated'} "
                f"attention, and this run has --attention {ours}")
    return {"attention": ours}


def enlarged(checkpoint: dict, run: Run, config: dict) -> tuple[dict, dict]:
    """The fields of the configuration and the tensors, with room for the rows of the run and, as in the
    `config` of a new model, for the ids of the data. The embeddings of new ids start as the mean of the
    existing ones. Raises UserError if there are new ones without pairs, which add some to any tokenizer.
    """
    known, weights = checkpoint["model_config"], checkpoint["weights"]
    most, vocab_size = known["vocab_size"], config["vocab_size"]
    context = {"seq_len": max(run.args.seq_len, known["seq_len"])}
    if most >= vocab_size:
        return context, weights
    ids = f"{checkpoint['path']} knows {most} of {vocab_size} ids"
    if config.get("response", -1) < 0:
        raise UserError(f"{ids}: prepare the data with the tokenizer of that model.")
    run.say(f"{ids}: embeddings of new ids start as the mean of the existing ones")
    rows = max(config["padded_vocab"], known["padded_vocab"])
    longer = {}
    for name in VOCAB_TENSORS & weights.keys():
        mean = weights[name][:most].mean(0, keepdim=True)
        longer[name] = torch.cat((weights[name][:most], mean.expand(rows - most, *mean.shape[1:])))
    return context | {"vocab_size": vocab_size, "padded_vocab": rows}, weights | longer


def new_tensors(model_class: type, model: nn.Module, weights: dict, source: str, seed: int) -> dict:
    """What the weights lack, as in a new model. Raises UserError if what they have does not fit into it."""
    tensors = model.state_dict()
    for name in tensors.keys() & weights.keys():
        if weights[name].shape != tensors[name].shape:
            raise UserError(f"{name} has the shape {[*weights[name].shape]} in {source}, but "
                            f"{[*tensors[name].shape]} in {model_class.__name__}: give it another name "
                            "there.")
        if not weights[name].isfinite().all():
            raise UserError(f"{name} of {source} is not finite, so nothing can be learned from it: take "
                            "an earlier checkpoint, or other weights.")
    lacking = tensors.keys() - weights.keys()
    torch.manual_seed(seed)
    fresh = model_class(model.config).state_dict() if lacking else {}
    return {name: fresh[name] for name in lacking}


def trained_model(run: Run, config: dict, changes: dict) -> nn.Module:
    """The model of --init-from: its configuration with `changes`, and `config` for fields that it lacks. What
    the weights lack begins anew. The context is extended to --seq-len, if the positional encoding allows
    that, and for pairs the vocabulary; the embeddings of new ids start as the mean of the existing ones.
    Raises UserError if the weights have a tokenizer other than that of the data, or other shapes.
    """
    model_class, args, world, say = run.model_class, run.args, run.world, run.say
    checkpoint = weights_of(model_class, args.init_from)
    source, known = checkpoint["path"], checkpoint["model_config"]
    say(f"starting from {source}")
    assert_ids(checkpoint, run, config["vocab_size"])
    changes |= attention_from(checkpoint, run, changes.get("attention"))
    larger, weights = enlarged(checkpoint, run, config)
    whole = model_class.Config(**config | known | changes | larger)
    model = build_model(model_class, whole, world, args.strategy, args.comm)

    # the weights are on rank 0
    new = run_and_wait(
        lambda: new_tensors(model_class, model, weights, source, args.seed) if world.is_rank0 else {})
    lacking = sorted(config.keys() - known.keys()) + sorted(new)
    if lacking:
        say(f"{source} lacks {listed(lacking)}: as in a new model")
    left_over = checkpoint["left_over"] + sorted(weights.keys() - model.state_dict().keys())
    if left_over:
        say(f"{source} has {listed(left_over)}, which this model does not use")
    copy_weights(model, weights | new, world)
    return model


def load_frozen(model: nn.Module, run: Run, model_class: type, source: str) -> nn.Module:
    """A model beside `model`, the one in training, such as a teacher or a reference, from hf:DIR_OR_ID, a
    checkpoint or a run directory: with averaged weights if there are any, frozen, in the modes and shards of
    the run. The weights of --init-from get the attention of the model in training; others keep theirs, and a
    warning says if that is another. Its `loaded_from`, {path: step}, belongs into metadata(…,
    frozen=teacher.loaded_from): then config.json names it, and a resume says if it has changed. Every rank
    calls this. Raises UserError on all ranks.
    """
    checkpoint = weights_of(model_class, source)
    known = checkpoint["model_config"]
    trained = model.config
    more = known["vocab_size"] < trained.vocab_size and run.dataset.marker_ids["response"] >= 0
    way_out = "pairs add ids to that, so train it on them first" if more else (
        "prepare the data with its tokenizer.json")
    if checkpoint["tokenizer"]:
        assert_tokenizer(checkpoint, run.dataset.tokenizer, way_out)
    assert_context(model_class, checkpoint, run.args.seq_len)
    ours = {name: value for name, value in reading_of(trained).items() if name in known}
    if source == run.args.init_from:
        known |= ours
    elif known.get("attention") != ours.get("attention"):
        run.say(f"WARNING: {checkpoint['path']} has {known['attention']} attention, the model in training "
                f"{ours['attention']}")
    config = model_class.Config(**known | {"seq_len": max(run.args.seq_len, checkpoint["seq_len"])})
    frozen = build_model(model_class, config, run.world, run.args.strategy, run.args.comm)
    odd = checkpoint["left_over"] + on_rank0(
        lambda: sorted(frozen.state_dict().keys() ^ checkpoint["weights"].keys()))
    if odd:
        raise UserError(f"{checkpoint['path']} is of another model than {model_class.__name__} (only one of "
                        f"them has {odd[0]}): load it with its own class.")
    copy_weights(frozen, checkpoint["weights"], run.world)
    apply_modes(frozen, run.args, run.world)
    frozen.loaded_from = {source: checkpoint.get("step")}
    return frozen.requires_grad_(False).eval()


def reading_of(config: ModelConfig) -> dict:
    """The fields of a configuration that say which tokens see which."""
    return {name: vars(config)[name] for name in ("attention", "eot", "start", "response", "end")
            if name in vars(config)}
