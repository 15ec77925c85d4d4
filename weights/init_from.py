"""Loads the weights that a run starts from (--init-from), and frozen models next to the trained one."""

import math
from contextlib import suppress
from dataclasses import asdict, fields

import torch
from torch import nn

from cli.errors import UserError, joined
from ddp_utils import Run, assert_family, config_of, load_checkpoint, on_rank0, run_and_wait
from model import VOCAB_TENSORS, ModelConfig
from training.strategies import build_model, copy_weights, set_modes
from vocab.tokenizer import GPT2_DIGEST, load_tokenizer
from vocab.vocabulary import tokenizer_id, tokenizer_in
from weights.huggingface import HF_FAMILIES, config_from_hf, from_hf


def assert_tokenizer(saved: dict, tokenizer, way_out: str):
    """Raises UserError if a checkpoint was trained with another tokenizer. Compares content, not names. The
    error ends with `way_out`.
    """
    ours = tokenizer_id(tokenizer)
    if ours.split()[-1] != saved["tokenizer"].split()[-1]:
        raise UserError(f"{saved['path']} was trained with the tokenizer {saved['tokenizer']}, not with "
                        f"{ours}: {way_out}.")


def finetuning_defaults(row: dict) -> dict:
    """The defaults that --init-from changes: a small learning rate and batch, and a few epochs. `row` has the
    defaults of the size.
    """
    batch = min(32, row["global_batch"])
    eval_batches = math.ceil(row["eval_batches"] * batch / row["global_batch"])
    return {"lr": 3e-5, "warmup": 0, "epochs": 3, "eval_every": 50, "save_every": 50, "global_batch": batch,
            "eval_batches": eval_batches, "schedule": "cosine", "ema": min(0.999, row.get("ema", 0.0))}


def weights_of(model_class: type, source: str, complete: bool = True) -> dict:
    """Reads the weights of --init-from. Returns a dict with their `path`, `model_config`, `left_over` (fields
    of their configuration that model_class does not have), `tokenizer`, the `settings` of their run, and on
    rank 0, if `complete`, the tensors in `weights`. Raises UserError on all ranks.
    """
    weights = {}

    def read_hf() -> dict:
        theirs = next((base for base in model_class.__mro__ if base in HF_FAMILIES), model_class)
        config, files = config_from_hf(theirs, source[3:])
        if complete:
            weights.update(from_hf(theirs, source[3:]).state_dict())
        file = tokenizer_in(files[0].parent)
        known = ""
        with suppress(UserError):  # a tokenizer that we cannot read matters only if it is used
            known = tokenizer_id(load_tokenizer(file)) if file else ""
            if known.endswith(GPT2_DIGEST):
                load_tokenizer("gpt2")  # raises if tiktoken cannot get it
                file = "gpt2"
        return {"path": source, "model_config": asdict(config), "settings": {}, "tokenizer": known,
                "tokenizer_file": file}

    if source.startswith("hf:"):
        checkpoint = on_rank0(read_hf)
    else:
        checkpoint = load_checkpoint(source, print, checked=complete, or_best=True)
        weights = checkpoint["tensors"]["model"] | checkpoint["tensors"]["ema"]
        if model_class in HF_FAMILIES:  # any other class, such as a user's, may start from any model
            assert_family(checkpoint, model_class)
            config_of(model_class.Config, checkpoint["model_config"], checkpoint["path"])
    ours = {field.name for field in fields(model_class.Config)}
    config = {name: value for name, value in checkpoint["model_config"].items() if name in ours}
    # the defaults of a new run: it may override the row length; its tokenizer is the one of the weights
    return checkpoint | {"weights": weights, "model_config": config, "seq_len": config["seq_len"],
                         "tokenizer_flag": checkpoint["tokenizer_file"],
                         "left_over": sorted(checkpoint["model_config"].keys() - ours)}


def nearest_size(sizes: dict[str, dict], record: dict) -> str:
    """The size that weights were trained with, according to their record (see weights_of). If the record
    doesn't say, the size that differs from their configuration in the fewest fields.
    """
    config = record["model_config"]
    size = record["settings"].get("size")
    unlike = {name: sum(row.get(key, config[key]) != config[key] for key in config)
              for name, row in sizes.items()}
    return size if size in sizes else min(unlike, key=unlike.get)


def assert_context(model_class: type, weights: dict, seq_len: int):
    """Raises UserError if a model with these weights cannot read rows of seq_len tokens."""
    with torch.device("meta"):
        model = model_class(model_class.Config(**weights["model_config"]))
    known = model.config.seq_len
    if seq_len > known and "positions.weight" in model.state_dict():
        raise UserError(f"{weights['path']} has learned positions for {known} tokens: lower --seq-len.")


def assert_ids(checkpoint: dict, run: Run, vocab_size: int):
    """Raises UserError if an id means another token in the data than it does for the weights. Warns if the
    tokenizer of the weights is unknown.
    """
    source, most = checkpoint["path"], checkpoint["model_config"]["vocab_size"]
    tokenizer = run.dataset.tokenizer
    if not (checkpoint["tokenizer"] and checkpoint["tokenizer_file"]):
        run.say(f"WARNING: {source} has no tokenizer to compare ({most} ids, {tokenizer.name} {vocab_size}); "
                "its weights are useful only if the ids mean the same, so use the tokenizer of that model")
    elif not on_rank0(has_same_ids, checkpoint, tokenizer):
        raise UserError(f"{source} was trained with the tokenizer {checkpoint['tokenizer']}, the data has "
                        f"{tokenizer_id(tokenizer)}: prepare the data with that model's tokenizer.json.")


def has_same_ids(checkpoint: dict, tokenizer) -> bool:
    """Whether each id that the weights know stands for the same token in the data."""
    known_by = load_tokenizer(checkpoint["tokenizer_file"])
    assert_tokenizer(checkpoint, known_by, "replace the tokenizer.json next to it with its own")
    most, theirs = checkpoint["model_config"]["vocab_size"], known_by.vocab
    return all(theirs.get(token) == i for token, i in tokenizer.vocab.items() if i < most)


def attention_from(checkpoint: dict, run: Run, usual: str | None) -> dict:
    """The attention to train with, as {"attention": …}, or {} if the model has no such field: --attention if
    it is given, else the attention of the weights if it is known and suits the data, else the `usual` one.
    Warns if the weights were trained with another.
    """
    theirs = checkpoint["model_config"].get("attention")
    if not theirs:
        return {}
    says = theirs == "prefix" or not run.args.init_from.startswith("hf:")  # hf: records only prefix
    fits = theirs != "prefix" or run.dataset.loss == "response"  # only prompts have a prefix
    ours = theirs if says and fits and not vars(run.args).get("attention") else usual
    if theirs != ours and "prefix" in (theirs, ours):
        run.say(f"WARNING: {checkpoint['path']} was trained with {theirs if says else 'causal or isolated'} "
                f"attention, and this run uses --attention {ours}")
    return {"attention": ours}


def enlarged(checkpoint: dict, run: Run, config: dict) -> tuple[dict, dict]:
    """Makes room for the run's row length and for the data's ids. `config` is the configuration of a new
    model, which has that room. Returns the changed fields of the configuration, and all tensors. The
    embeddings of new ids start as the mean of the existing ones. Raises UserError if there are new ids,
    unless the data has pairs, which add some to any tokenizer.
    """
    known, weights = checkpoint["model_config"], checkpoint["weights"]
    most, vocab_size = known["vocab_size"], config["vocab_size"]
    context = {"seq_len": max(run.args.seq_len, known["seq_len"])}
    if most >= vocab_size:
        return context, weights
    ids = f"{checkpoint['path']} knows {most} of {vocab_size} ids"
    if config.get("response", -1) < 0:
        raise UserError(f"{ids}: prepare the data with that model's tokenizer.")
    run.say(f"{ids}: embeddings of new ids start as the mean of the existing ones")
    rows = max(config["padded_vocab"], known["padded_vocab"])
    longer = {}
    for name in VOCAB_TENSORS & weights.keys():
        mean = weights[name][:most].mean(0, keepdim=True)
        longer[name] = torch.cat((weights[name][:most], mean.expand(rows - most, *mean.shape[1:])))
    return context | {"vocab_size": vocab_size, "padded_vocab": rows}, weights | longer


def new_tensors(model_class: type, model: nn.Module, weights: dict, source: str, seed: int) -> dict:
    """Initial values for the tensors that the weights lack. Raises UserError if a tensor of the weights has
    another shape than the model's, or is not finite.
    """
    tensors = model.state_dict()
    for name in tensors.keys() & weights.keys():
        if weights[name].shape != tensors[name].shape:
            raise UserError(f"{name} has the shape {[*weights[name].shape]} in {source}, but "
                            f"{[*tensors[name].shape]} in {model_class.__name__}: give it another name in "
                            f"{model_class.__name__}.")
        if not weights[name].isfinite().all():
            raise UserError(f"{name} of {source} is not finite, so training cannot start from it: use an "
                            "earlier checkpoint, or other weights.")
    lacking = tensors.keys() - weights.keys()
    torch.manual_seed(seed)
    fresh = model_class(model.config).state_dict() if lacking else {}
    return {name: fresh[name] for name in lacking}


def trained_model(run: Run, config: dict, changes: dict) -> nn.Module:
    """The model of --init-from, sharded as the run's strategy says. It has the configuration of the weights
    with `changes`, and takes fields that are missing there from `config`. Tensors that the weights lack are
    initialized as in a new model. The context is extended to --seq-len if the positional encoding allows
    that. Pairs may extend the vocabulary: the embeddings of new ids start as the mean of the existing ones.
    Raises UserError if the data has another tokenizer, or the model other shapes.
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

    # only rank 0 has the weights
    new = run_and_wait(
        lambda: new_tensors(model_class, model, weights, source, args.seed) if world.is_rank0 else {})
    lacking = sorted(config.keys() - known.keys()) + sorted(new)
    if lacking:
        say(f"{source} lacks {joined(lacking)}: as in a new model")
    left_over = checkpoint["left_over"] + sorted(weights.keys() - model.state_dict().keys())
    if left_over:
        say(f"{source} has {joined(left_over)}, which this model does not use")
    copy_weights(model, weights | new, world)
    return model


def load_frozen(model: nn.Module, run: Run, model_class: type, source: str) -> nn.Module:
    """Loads a frozen model, such as a teacher or a reference, to use next to `model`, the one in training.
    `source` is hf:DIR_OR_ID, a checkpoint or a run directory; averaged weights are used if there are any. The
    frozen model computes in the run's precision and is sharded like the trained one.

    If `source` is also the --init-from of the run, the frozen model gets the attention of the model in
    training. Otherwise it keeps its own, with a warning if that is another. Pass its `loaded_from`, {path:
    step}, to start_run(…, frozen=teacher.loaded_from): config.json then records it, and a resume says if it
    has changed. Every rank must call this. Raises UserError on all ranks.
    """
    checkpoint = weights_of(model_class, source)
    known = checkpoint["model_config"]
    trained = model.config
    more = known["vocab_size"] < trained.vocab_size and run.dataset.marker_ids["response"] >= 0
    way_out = "pairs add ids to it, so train that model on pairs first" if more else (
        "prepare the data with its tokenizer.json")
    if checkpoint["tokenizer"]:
        assert_tokenizer(checkpoint, run.dataset.tokenizer, way_out)
    assert_context(model_class, checkpoint, run.args.seq_len)
    ours = {name: value for name, value in attention_fields(trained).items() if name in known}
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
        raise UserError(f"{checkpoint['path']} is not a {model_class.__name__} (only one of them has "
                        f"{odd[0]}): load it with its own class.")
    copy_weights(frozen, checkpoint["weights"], run.world)
    set_modes(frozen, run.args, run.world)
    frozen.loaded_from = {source: checkpoint.get("step")}
    return frozen.requires_grad_(False).eval()


def attention_fields(config: ModelConfig) -> dict:
    """The fields of a configuration that decide which tokens see which."""
    return {name: vars(config)[name] for name in ("attention", "eot", "start", "response", "end")
            if name in vars(config)}
