"""Reads and writes models of Hugging Face: config.json, model.safetensors and tokenizer.json."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cli.errors import UserError, first_line, joined, names_in, needed, oserror_as_retryable, say
from cli.files import read_json
from model import (
    GPT2,
    HRM,
    MLM,
    MODERN_THETA,
    VOCAB_TENSORS,
    GPT2Config,
    HRMConfig,
    MLMConfig,
    ModelConfig,
    pad_vocab,
)


@dataclass(frozen=True)
class HFFamily:
    """How a model here ("ours") maps to its counterpart in transformers ("theirs")."""

    model_type: str
    architecture: str
    parameters: str  # a pattern of our parameter names that have a counterpart in transformers and llama.cpp
    # ours → theirs: parts of parameter names, between dots; a matrix with several names is split into these
    names: dict[str, str]
    fields: dict[str, str]  # ours → theirs: fields of the configuration that have the same value
    covered: str  # other fields of ours: those that `to_hf` translates, and those only training uses
    to_hf: Callable[[Any], dict]  # our configuration → their other fields
    from_hf: Callable[[dict], dict]  # their configuration → our other fields; may raise UserError
    transposed: tuple[str, ...] = ()  # endings of our names of matrices that they store transposed


def refuse_export(model: nn.Module):
    """Raises UserError if an export would lose a field or a parameter. Both kinds of exports call this."""
    c = model.config
    family = hf_family(type(model), c)
    known = {*family.fields, *family.covered.split(), "padded_vocab", "start", "response", "end"}
    for f in fields(c):
        if f.name not in known and getattr(c, f.name) != f.default:
            raise UserError(f"a model with --{f.name.replace('_', '-')} has no counterpart in transformers "
                            "or llama.cpp, so it cannot be exported: train one without that flag.")
    for name in model.state_dict():
        if not re.fullmatch(family.parameters, name):
            raise UserError(f"the parameter {name} of {type(model).__name__} has no counterpart in "
                            "transformers or llama.cpp, so the model cannot be exported: train one without "
                            "it, or use this one with --prompt or load_run.")


def refuse_import(config: dict, odd: dict[str, bool], trainer: str, **required):
    """Raises UserError if a key of config.json is `odd`, or differs from its required value or default."""
    odd = odd | {key: config.get(key, value) != value for key, value in required.items()}
    for key in odd:
        if odd[key]:
            raise UserError(f"this model sets {key} to {config.get(key)}, which {trainer} does not support.")


def hrm_to_hf(c: HRMConfig) -> dict:
    return {"head_dim": c.head_dim, "num_layers_per_stack": c.n_layer,
            # transformers sizes its cache by this, and needs a slot for each attention call
            "num_hidden_layers": c.n_layer * c.max_eval_cycles * (c.l_cycles + 1),
            "H_cycles": c.max_eval_cycles,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "initializer_range": c.d_model ** -0.5, "embedding_scale": c.embed_scale,
            "tie_word_embeddings": False, "prefix_lm": c.attention == "prefix"}


def hrm_from_hf(config: dict) -> dict:
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    odd = {"rope_parameters": rope.get("rope_type", "default") != "default",
           "head_dim": config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]}
    refuse_import(config, odd, "train_hrm.py", hidden_act="silu", attention_bias=False, mlp_bias=False,
                  tie_word_embeddings=False)
    return {"n_layer": config.get("num_layers_per_stack") or config["num_hidden_layers"],
            "rope_theta": rope["rope_theta"], "attention": "prefix" if config.get("prefix_lm") else "causal",
            "embed_scale": config.get("embedding_scale") or 1.0 / config["initializer_range"]}


def gpt2_to_hf(c: GPT2Config) -> dict:
    return {"activation_function": "gelu_new", "tie_word_embeddings": True, "resid_pdrop": c.dropout,
            "n_ctx": c.seq_len, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout}


def gpt2_from_hf(config: dict) -> dict:
    if config.get("activation_function") == "gelu_pytorch_tanh":  # another name of the same function
        config = config | {"activation_function": "gelu_new"}
    odd = {"n_inner": config.get("n_inner") not in (None, 4 * config["n_embd"])}
    refuse_import(config, odd, "train_gpt2.py", activation_function="gelu_new", scale_attn_weights=True,
                  scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False,
                  add_cross_attention=False, tie_word_embeddings=True)
    return {"dropout": config.get("resid_pdrop", 0.1)}


def modern_to_hf(c: GPT2Config) -> dict:
    rope = {"rope_type": "default", "rope_theta": MODERN_THETA, "partial_rotary_factor": 1.0}
    return {"intermediate_size": c.ff, "num_key_value_heads": c.n_head, "head_dim": c.head_dim,
            "layer_types": ["full_attention"] * c.n_layer, "hidden_act": "silu", "attention_bias": False,
            "rope_parameters": rope, "tie_word_embeddings": False}


def modern_from_hf(config: dict) -> dict:
    ours = GPT2Config(n_layer=config["num_hidden_layers"], n_head=config["num_attention_heads"],
                      d_model=config["hidden_size"], modern=True)
    wanted = modern_to_hf(ours)
    rope = wanted["rope_parameters"].items() - config["rope_parameters"].items()
    odd = {key: config[key] != value for key, value in wanted.items()} | {"rope_parameters": bool(rope)}
    refuse_import(config, odd, "train_gpt2.py", attn_output_gate=True)
    return {"modern": True}


def query_and_gate(query: Tensor, gate: Tensor, c: GPT2Config) -> Tensor:
    """Joins the query and gate matrices (C, C) into Qwen3.5's q_proj (2 C, C). For each head, it has the
    query's rows and then the gate's.
    """
    parts = [matrix.view(c.n_head, c.head_dim, c.d_model) for matrix in (query, gate)]
    return torch.cat(parts, dim=1).view(2 * c.d_model, c.d_model)


def join_modern(tensors: dict, c: GPT2Config):
    """Changes tensors, which already have Qwen3.5's names, in place into Qwen3.5's form: scales the
    embeddings, adds norms without effect, and joins query and gate.
    """
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * c.d_model ** 0.5
    tensors["model.norm.weight"] = torch.zeros(c.d_model)  # their norms multiply by 1 + weight
    norms = {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim, "input_layernorm": c.d_model,
             "post_attention_layernorm": c.d_model}
    for i in range(c.n_layer):
        layer = f"model.layers.{i}."
        query, gate = (tensors.pop(f"{layer}self_attn.{name}.weight") for name in ("query", "gate"))
        tensors[f"{layer}self_attn.q_proj.weight"] = query_and_gate(query, gate, c)
        tensors |= {f"{layer}{norm}.weight": torch.zeros(size) for norm, size in norms.items()}


def divide_modern(tensors: dict, c: GPT2Config):
    """Undoes join_modern. Raises UserError if a norm has weights."""
    for name in tensors:
        if "norm" in name and tensors[name].count_nonzero():
            raise UserError(f"this model has weights in {name}, which train_gpt2.py does not support.")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] / c.d_model ** 0.5
    for i in range(c.n_layer):
        layer = f"model.layers.{i}.self_attn."
        joined = tensors.pop(f"{layer}q_proj.weight").view(c.n_head, 2, c.head_dim, c.d_model)
        for name, matrix in zip(("query", "gate"), joined.unbind(1)):
            tensors[f"{layer}{name}.weight"] = matrix.reshape(c.d_model, c.d_model)


def mlm_layer_types(n_layer: int, global_every: int) -> list[str]:
    return ["sliding_attention" if i % global_every else "full_attention" for i in range(n_layer)]


def mlm_to_hf(c: MLMConfig) -> dict:
    return {"layer_types": mlm_layer_types(c.n_layer, c.global_every),
            "global_attn_every_n_layers": c.global_every, "global_rope_theta": c.global_theta,
            "local_rope_theta": c.local_theta,  # transformers 4 reads these, later ones rope_parameters
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": c.global_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": c.local_theta}},
            "attention_dropout": c.dropout, "embedding_dropout": c.dropout, "mlp_dropout": c.dropout,
            "cls_token_id": c.eot, "sep_token_id": c.eot, "tie_word_embeddings": True}


def mlm_from_hf(config: dict) -> dict:
    n_layer = config["num_hidden_layers"]
    every = config.get("global_attn_every_n_layers", 3)
    types = config.get("layer_types") or mlm_layer_types(n_layer, every)
    fitting = [n for n in (every, *range(1, n_layer + 1)) if mlm_layer_types(n_layer, n) == types]
    ropes = config.get("rope_parameters") or {  # older files lack it
        "full_attention": {"rope_theta": config.get("global_rope_theta", 160000.0)},
        "sliding_attention": {"rope_theta": config.get("local_rope_theta", 10000.0)}}
    odd = {"layer_types": not fitting, "eos_token_id": not isinstance(config["eos_token_id"], int),
           "rope_parameters": any(rope.get("rope_type", "default") != "default" for rope in ropes.values())}
    refuse_import(config, odd, "train_mlm.py", hidden_activation="gelu", classifier_activation="gelu",
                  attention_bias=False, mlp_bias=False, norm_bias=False, classifier_bias=False,
                  decoder_bias=True, tie_word_embeddings=True)
    return {"global_every": fitting[0], "global_theta": ropes["full_attention"]["rope_theta"],
            "local_theta": ropes["sliding_attention"]["rope_theta"],
            "dropout": config.get("mlp_dropout", 0.0), "eot": config["eos_token_id"]}


USUAL_FIELDS = {"vocab_size": "vocab_size", "seq_len": "max_position_embeddings",
                "n_head": "num_attention_heads", "d_model": "hidden_size"}
HF_FAMILIES = {
    HRM: HFFamily(
        "hrm_text", "HrmTextForCausalLM",
        r"(embed|head|[HL]\.blocks\.\d+\.(gqkv|attn_out|gate_up|down))\.weight|z_l_init",
        {"embed": "model.embed_tokens", "z_l_init": "model.z_L_init", "head": "lm_head",
         "H": "model.H_module", "L": "model.L_module", "blocks": "layers", "gqkv": "attn.gqkv_proj",
         "attn_out": "attn.o_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"},
        USUAL_FIELDS | {"ff": "intermediate_size", "h_cycles": "H_cycles", "l_cycles": "L_cycles",
                        "norm_eps": "rms_norm_eps"},
        "n_layer attention dropout init rope_theta embed_scale bp_cycles eval_cycles least_cycles max_cycles",
        hrm_to_hf, hrm_from_hf),
    GPT2: HFFamily(
        "gpt2", "GPT2LMHeadModel",
        r"(embed|positions)\.weight|"
        r"(norm|transformer\.blocks\.\d+\.(attn_norm|qkv|attn_out|mlp_norm|up|down))\.(weight|bias)",
        {"embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f",
         "blocks": "h", "attn_norm": "ln_1", "qkv": "attn.c_attn", "attn_out": "attn.c_proj",
         "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        {"vocab_size": "vocab_size", "seq_len": "n_positions", "n_layer": "n_layer", "n_head": "n_head",
         "d_model": "n_embd", "norm_eps": "layer_norm_epsilon"},
        "attention dropout", gpt2_to_hf, gpt2_from_hf,
        transposed=("qkv.weight", "attn_out.weight", "up.weight", "down.weight")),
    MLM: HFFamily(
        "modernbert", "ModernBertForMaskedLM",
        r"(embed|embed_norm|norm|head_dense|head_norm)\.weight|head_bias|"
        r"transformer\.blocks\.\d+\.(attn_norm|qkv|attn_out|mlp_norm|gate_up|down)\.weight",
        {"embed": "model.embeddings.tok_embeddings", "embed_norm": "model.embeddings.norm",
         "norm": "model.final_norm", "head_dense": "head.dense", "head_norm": "head.norm",
         "head_bias": "decoder.bias", "transformer": "model", "blocks": "layers", "qkv": "attn.Wqkv",
         "attn_out": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"},
        USUAL_FIELDS | {"n_layer": "num_hidden_layers", "ff": "intermediate_size",
                        "window": "local_attention", "norm_eps": "norm_eps"},
        "dropout eot global_every global_theta local_theta", mlm_to_hf, mlm_from_hf)}
MODERN = HFFamily(  # --modern is Qwen3.5 with full attention in all layers
    "qwen3_5_text", "Qwen3_5ForCausalLM",
    r"(embed|head|transformer\.blocks\.\d+\.(gqkv|attn_out|gate_up|down))\.weight",
    {"embed": "model.embed_tokens", "head": "lm_head", "transformer": "model", "blocks": "layers",
     "gqkv": "self_attn.gate self_attn.query self_attn.k_proj self_attn.v_proj",
     "attn_out": "self_attn.o_proj", "gate_up": "mlp.gate_proj mlp.up_proj", "down": "mlp.down_proj"},
    USUAL_FIELDS | {"n_layer": "num_hidden_layers", "norm_eps": "rms_norm_eps"},
    "attention dropout modern", modern_to_hf, modern_from_hf)
# Like Conversation.pairs: everything said before the last answer is its question, one message per line.
CHAT_TEMPLATE = r"""
{%- set said = namespace(system='', lines=[], answer=none) %}
{%- for m in messages %}
    {%- set parts = m['content'] or [] %}
    {%- set text = parts if parts is string else parts | map(attribute='text') | join %}
    {%- if m['role'] in ['system', 'developer'] and not (said.system or said.lines) %}
        {%- set said.system = text %}
    {%- elif m['role'] == 'assistant' and loop.last and not add_generation_prompt %}
        {%- set said.answer = text %}
    {%- elif text %}
        {%- set said.lines = said.lines + [text] %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{ said.system }}{{ said.lines | join('\n') }}
{%- if said.answer is not none %}ANSWER{% generation %}{{ said.answer + eos_token }}{% endgeneration %}
{%- elif add_generation_prompt %}ANSWER{% endif %}"""


def _safetensors():
    with needed("safetensors", "a model of Hugging Face"):
        import safetensors.torch
    return safetensors


def as_theirs(model: nn.Module) -> dict[str, Tensor]:
    """Our tensors by Hugging Face's names, as views with Hugging Face's shapes, without padding rows."""
    family, tensors = hf_family(type(model), model.config), {}
    for ours, tensor in model.state_dict().items():
        tensor = tensor[:model.config.vocab_size] if ours in VOCAB_TENSORS else tensor
        tensor = tensor.T if ours.endswith(family.transposed) else tensor
        parts = [family.names.get(part, part).split() for part in ours.split(".")]
        several = max(map(len, parts))
        for i, piece in enumerate(tensor.chunk(several)):
            tensors[".".join(names[i % len(names)] for names in parts)] = piece
    return tensors


def hf_family(model_class: type, config) -> HFFamily:
    if model_class not in HF_FAMILIES:
        raise UserError(f"{model_class.__name__} cannot be exported or read from hf:, because HF_FAMILIES in "
                        "weights/huggingface.py does not say what its parts are called in transformers: add "
                        "an entry.")
    return MODERN if vars(config).get("modern") else HF_FAMILIES[model_class]


def ends_of(c: ModelConfig, tokenizer) -> tuple[int, int, str | None]:
    """The ids that start and end a text, and the chat template if the model was trained on pairs."""
    if vars(c).get("response", -1) < 0:
        return tokenizer.eot, tokenizer.eot, None
    template = CHAT_TEMPLATE.replace("ANSWER", tokenizer.decode([c.response]))
    return c.start, c.end if c.end >= 0 else c.start, template


def to_hf(model: nn.Module, directory: str | Path, tokenizer):
    """Writes a directory that `from_pretrained` of transformers loads, without the rows that pad the
    vocabulary. Raises UserError if transformers has no counterpart of the model.
    """
    c, masked = model.config, isinstance(model, MLM)
    family = hf_family(type(model), c)
    refuse_export(model)
    prefix = isinstance(model, HRM) and c.attention == "prefix"
    first, last, template = ends_of(c, tokenizer)
    ends = {"bos_token_id": first, "eos_token_id": last}
    config = {"model_type": family.model_type, "architectures": [family.architecture], "dtype": "float32"}
    config |= {theirs: getattr(c, ours) for ours, theirs in family.fields.items()}
    # Data collators ignore labels that are the pad, and the end of an answer must not be ignored. So a causal
    # model pads with [MASK], if its table has that.
    pad = tokenizer.mask if not masked and tokenizer.mask < c.vocab_size else last
    config |= family.to_hf(c) | ends | {"pad_token_id": pad}

    bos, eos = tokenizer.decode([first]), tokenizer.decode([last])
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": c.seq_len, "bos_token": bos,
               "eos_token": eos, "pad_token": tokenizer.decode([pad]), "unk_token": eos,
               "clean_up_tokenization_spaces": False,
               "padding_side": "right" if masked else "left",  # generate appends on the right
               # only with a prefix: transformers 4 would add the types to the embeddings of GPT-2
               "model_input_names": ["input_ids", *(["token_type_ids"] if prefix else []), "attention_mask"]}
    around = {bos: first}
    if template:
        around |= {tokenizer.decode([c.response]): c.response, eos: last}
        special["chat_template"] = template  # sets no types; with a prefix, users pass token_type_ids of ones
    words = json.loads(tokenizer.to_json())
    contents = {"config.json": config, "tokenizer_config.json": special, "tokenizer.json": words}
    if masked:
        special["mask_token"] = {"__type": "AddedToken", "content": tokenizer.mask_token,
                                 "lstrip": tokenizer.takes_blank, "rstrip": False, "normalized": False,
                                 "single_word": False, "special": True}
    else:
        contents["generation_config.json"] = ends | {"do_sample": True}
        # [MASK] may be beyond the embedding table; no other id is
        words["added_tokens"] = [token for token in words["added_tokens"] if token["id"] < c.vocab_size]
    for token in words["added_tokens"]:
        if token["id"] == tokenizer.mask:
            token["lstrip"] = tokenizer.takes_blank
    stage = words["pre_tokenizer"] or {}
    for part in (stage, *stage.get("pretokenizers", [])):
        if template and part.get("prepend_scheme") == "first":  # we encode prompt and response one by one; a
            part["prepend_scheme"] = "always"  # chat encodes both in one text
    words["post_processor"] = _post_processor(around, prefix)

    directory, safetensors = Path(directory), _safetensors()
    tensors = {name: t.float().cpu() for name, t in as_theirs(model).items()}
    if family is MODERN:
        join_modern(tensors, c)
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    file = directory / "model.safetensors"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # such as a full disk
        raise OSError(None, str(error))
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    with suppress(OSError):  # a mounted bucket cannot change modes; the mount sets them
        shutil.copymode(directory / "config.json", file)  # safetensors lets only the owner read the file


def logits_of_hf(directory: Path, row: Tensor) -> Tensor:
    """The logits (T, V) that transformers has for a row (1, T). Raises ImportError if it lacks the model."""
    name = read_json(directory / "config.json")["architectures"][0]
    try:
        import transformers
        theirs = getattr(transformers, name)
    except Exception as error:  # it is missing, lacks the class, or lacks a package
        raise ImportError(f"transformers has no {name} ({first_line(error)})")
    transformers.utils.logging.disable_progress_bar()
    return theirs.from_pretrained(directory).eval()(row).logits[0]


def _post_processor(around: dict[str, int], prefix: bool) -> dict:
    """A post-processor for tokenizer.json that puts tokens around a text, as --prompt and --fill do: the
    first token of `around` before it and the second, <|response|>, if there is one, after it. If there is, a
    pair of texts is a question with its answer, and ends with the third token. With `prefix`, questions have
    type 1, which lets each of their tokens see the whole question, and answers type 0. data.py ignores
    post-processors.
    """
    def part(name: str, kind: int = int(prefix)) -> dict:  # A and B stand for the two texts
        return {"SpecialToken" if name in around else "Sequence": {"id": name, "type_id": kind}}

    start, *answers = around
    question = [part(start), part("A"), *map(part, answers[:1])]
    pair = [*question, part(start), part("B")]
    if answers:
        pair = [*question, part("B", 0), part(answers[-1] if len(answers) > 1 else start, 0)]
    known = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in around.items()}
    return {"type": "TemplateProcessing", "single": question, "pair": pair, "special_tokens": known}


def config_from_hf(model_class: type, source: str):
    """Returns our configuration for a Hugging Face directory or repository, and its weight files. Raises
    UserError if it has no such files or another architecture.
    """
    _safetensors()  # raises early if the package is missing; the weights are read much later
    family, directory = hf_family(model_class, model_class.Config()), Path(os.path.expanduser(source))
    if directory.is_file():
        raise UserError(f"hf:{source} is a file: give its directory, hf:{directory.parent}.")
    if not directory.is_dir():
        try:
            from huggingface_hub import snapshot_download  # comes with datasets
            directory = Path(snapshot_download(source, allow_patterns=[
                "*config.json", "*.safetensors*", "tokenizer.json"]))
        except Exception as error:  # huggingface_hub and httpx raise many kinds
            raise UserError(f"hf:{source} is neither a directory nor a repository that can be read now: "
                            f"{first_line(error)}")
    files = [directory / name for name in names_in(directory) if name == "model.safetensors"]
    index = directory / "model.safetensors.index.json"
    try:
        config = read_json(directory / "config.json")
        if not files and index.exists():  # like transformers; other files may be left over
            names = read_json(index)["weight_map"].values()
            files = [directory / Path(name).name for name in sorted({*names})]  # .name: only in the directory
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        config = None
    if not isinstance(config, dict) or not files:
        raise UserError(f"{source} has no readable config.json with model.safetensors: to convert a "
                        "pytorch_model.bin, load it with transformers' from_pretrained and write it with "
                        "save_pretrained; merge an adapter of peft first (merge_and_unload).")
    if model_class is GPT2 and config.get("model_type") == MODERN.model_type:
        family = MODERN
    if config.get("model_type") != family.model_type:
        raise UserError(f"{source} holds a model of type {config.get('model_type')!r}; "
                        f"{model_class.__name__} reads {family.model_type!r}.")
    if config.get("quantization_config"):
        raise UserError(f"the config.json of {source} says that its weights are quantized: use the original "
                        "model.")
    try:
        same = {ours: config[theirs] for ours, theirs in family.fields.items()}
        config = model_class.Config(padded_vocab=pad_vocab(same["vocab_size"]), **same,
                                    **family.from_hf(config))
        with torch.device("meta"):
            model_class(config)
    except KeyError as error:
        raise UserError(f"the config.json of {source} lacks {error}.")
    except (ArithmeticError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the config.json of {source} makes no model: "
                        f"{str(error).splitlines()[0].rstrip('.')}.")
    return config, files


def from_hf(model_class: type, source: str) -> nn.Module:
    """Loads a model of this class from a Hugging Face directory or a repository on the hub. Prints which of
    its tensors the model does not use. Raises UserError if it has another architecture, other shapes than
    its config.json says, quantized weights, or an untied head for a model with a tied one.
    """
    config, files = config_from_hf(model_class, source)
    model = model_class(config)
    safetensors, tensors = _safetensors(), {}
    for file in files:
        try:
            # open it first: for a file without permission, safetensors would say that it doesn't exist
            with oserror_as_retryable(file), open(file, "rb") as content:
                try:
                    tensors |= safetensors.torch.load_file(file)
                except OSError:  # the file system cannot map files
                    tensors |= safetensors.torch.load(content.read())
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{file} cannot be read as safetensors: {str(error).splitlines()[0]}.")
    family, wanted, found = hf_family(model_class, config), as_theirs(model), {}
    if family is MODERN:
        join_modern(wanted, config)
    for name, tensor in wanted.items():
        # the files of OpenAI's GPT-2 models lack the prefix
        there = name if name in tensors else name.removeprefix("transformer.")
        weight = found[name] = tensors.pop(there, None)
        if weight is None or weight.shape != tensor.shape:
            raise UserError(f"{source} has no tensor {name} of shape {tuple(tensor.shape)}.")
        if not weight.is_floating_point() or weight.itemsize < 2:  # quantized; the scales are elsewhere
            raise UserError(f"{name} of {source} is stored as {weight.dtype}, not as floats with 16 bits or "
                            "more: use the model that it was quantized from.")
    table = found[f"{family.names['embed']}.weight"]
    for name in ("lm_head.weight", "decoder.weight"):  # a tied head may be stored again
        head = tensors.pop(name, table)
        if not torch.equal(head, table.to(head.dtype)):  # it may be stored with fewer bits
            raise UserError(f"{source} has a head, {name}, that differs from its embeddings although its "
                            f"config.json says tied, and {model_class.__name__} has one matrix for both: if "
                            f"they should be tied, delete {name} from the file, otherwise use transformers.")
    if left_over := sorted(name for name in tensors if not name.endswith(
            (".attn.bias", ".attn.masked_bias", "position_ids", "inv_freq"))):  # constant buffers
        say(f"{source} has {joined(left_over)}, which this model does not use")
    if family is MODERN:
        divide_modern(found, config)
    with torch.no_grad():
        for name, tensor in as_theirs(model).items():
            tensor.copy_(found[name])
    return model
