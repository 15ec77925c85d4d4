"""Writes GGUF, the file format of llama.cpp and of programs that use it."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cli.errors import UserError
from model import GPT2, HRM, MODERN_THETA
from vocab.tokenizer import PATTERNS
from vocab.vocabulary import EOT
from weights.huggingface import ends_of, query_and_gate, refuse_export

# ours → theirs: the last part of a parameter's name; a matrix with several names is split into these
GGUF_NAMES = {
    "embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output",
    "z_l_init": "hrm.z_l_init", "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "qkv": "attn_qkv",
    "attn_out": "attn_output", "up": "ffn_up", "down": "ffn_down",
    "gqkv": "attn_gate attn_q attn_k attn_v", "gate_up": "ffn_gate ffn_up"}
GGUF_STATE, GGUF_CONV = 16, 4  # sizes of the recurrent layers that _gguf_identity writes
GGUF_PARAMETER = re.compile(r"(?:(\w+)\.blocks\.(\d+)\.)?(\w+)(?:\.(weight|bias))?")


def _gguf_shape(writer, c, architecture: str):
    """Writes the fields that describe the shape of a model with the configuration c."""
    writer.add_context_length(c.seq_len)
    writer.add_embedding_length(c.d_model)
    writer.add_head_count(c.n_head)
    writer.add_file_type(0)  # all float32
    writer.add_feed_forward_length(c.ff)
    if architecture == "gpt2":
        writer.add_block_count(c.n_layer)
        writer.add_layer_norm_eps(c.norm_eps)
        return
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(MODERN_THETA if architecture == "qwen35" else c.rope_theta)
    if architecture == "qwen35":
        writer.add_block_count(2 * c.n_layer)
        writer.add_head_count_kv(c.n_head)
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
        # channels for each of an image's three positions (time, row, column); in a text these are equal
        pairs = c.head_dim // 2
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
        writer.add_uint32("qwen35.full_attention_interval", 2)
        writer.add_ssm_conv_kernel(GGUF_CONV)
        writer.add_ssm_state_size(GGUF_STATE)
        writer.add_ssm_inner_size(GGUF_STATE)
        writer.add_ssm_group_count(1)
        writer.add_ssm_time_step_rank(1)
        return
    # llama.cpp sizes its cache by this, and needs a slot for each attention call
    writer.add_block_count(c.n_layer * c.max_eval_cycles * (c.l_cycles + 1))
    writer.add_embedding_scale(c.embed_scale)
    writer.add_uint32("hrm_text.hrm.layers_per_stack", c.n_layer)  # gguf 0.19 has no names for these
    writer.add_uint32("hrm_text.hrm.h_cycles", c.max_eval_cycles)
    writer.add_uint32("hrm_text.hrm.l_cycles", c.l_cycles)
    writer.add_bool("hrm_text.hrm.prefix_lm", False)


def _gguf_cut(tokenizer) -> str | None:
    """llama.cpp's name for the pattern that the tokenizer cuts words with; None if it has no such pattern."""
    # a tokenizer without merges works with any name
    names = {None: "gpt-2", PATTERNS["gpt2"]: "gpt-2", PATTERNS["cl100k_base"]: "dbrx"}
    return names.get(vars(tokenizer).get("pattern", ""))


def _gguf_tokenizer(writer, tokenizer, c, TokenType):
    """Writes the tokens in the order of their ids. Rows of the table without a token are marked as unused."""
    model = json.loads(tokenizer.to_json())["model"]
    tokens = [f"[PAD{i}]" for i in range(c.vocab_size)]
    types = [TokenType.UNUSED] * c.vocab_size
    for kind, named in ((TokenType.NORMAL, model["vocab"]), (TokenType.CONTROL, tokenizer.specials)):
        for token, i in named.items():
            if i < c.vocab_size:  # [MASK] can be beyond the table
                tokens[i], types[i] = token, kind
    first, last, template = ends_of(c, tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_gguf_cut(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # llama.cpp requires at least one merge; this one never applies
    writer.add_token_merges([" ".join(parts) for parts in model["merges"]] or [f"{EOT} {EOT}"])
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(last)
    writer.add_add_bos_token(True)
    if template:
        # remove the marks of what to learn, which are TRL's and not plain Jinja
        writer.add_chat_template(re.sub("{% (end)?generation %}", "", template))


def _gguf_identity(writer, c, block: str, Types):
    """Writes a recurrent layer of Qwen3.5 that adds nothing to the residual stream. llama.cpp requires some
    of these, each with an MLP as wide as the others. Their weights are zero, so they are stored in few bits.
    """
    state, width = GGUF_STATE, c.d_model
    for name, shape in {"attn_qkv.weight": (3 * state, width), "attn_gate.weight": (state, width),
                        "ssm_conv1d.weight": (3 * state, GGUF_CONV), "ssm_dt.bias": (1,), "ssm_a": (1,),
                        "ssm_beta.weight": (1, width), "ssm_alpha.weight": (1, width),
                        "ssm_norm.weight": (state,), "ssm_out.weight": (width, state)}.items():
        writer.add_tensor(block + name, np.full(shape, -1.0 if name == "ssm_a" else 0.0, np.float32))
    for name, rows, columns in ("gate", c.ff, width), ("up", c.ff, width), ("down", width, c.ff):
        kind, zeros = None, np.zeros((rows, columns), np.float32)
        if columns % 32 == 0:  # blocks of 32 numbers in 18 bytes
            kind, zeros = Types.Q4_0, np.zeros((rows, columns // 32 * 18), np.uint8)
        writer.add_tensor(f"{block}ffn_{name}.weight", zeros, raw_dtype=kind)


def to_gguf(model, path: Path, tokenizer):
    """Writes a GPT-2 or an HRM and its tokenizer as GGUF, for llama.cpp and programs that use it (Ollama, LM
    Studio). Needs the package gguf. Raises UserError if llama.cpp cannot run the model.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType
    if type(model) not in (GPT2, HRM):
        raise UserError(f"llama.cpp cannot run {type(model).__name__}, only GPT2 and HRM.")
    refuse_export(model)
    if not _gguf_cut(tokenizer):
        raise UserError(f"llama.cpp may cut words differently than {tokenizer.name}: train with gpt2, "
                        "cl100k_base, bytes or bpe:N.")
    c = model.config
    if c.attention == "prefix":  # its hrm_text keeps the field, but attends causally (xllamacpp 2026.10)
        raise UserError("llama.cpp has no prefix attention, so this model would give other answers there: "
                        "train one with --attention isolated.")
    modern = vars(c).get("modern", False)
    architecture = "hrm_text" if isinstance(model, HRM) else "qwen35" if modern else "gpt2"
    writer = GGUFWriter(path, architecture)
    _gguf_shape(writer, c, architecture)
    _gguf_tokenizer(writer, tokenizer, c, TokenType)
    for ours, tensor in model.state_dict().items():
        stack, number, part, kind = GGUF_PARAMETER.fullmatch(ours).groups()
        at = int(number or 0) + (c.n_layer if stack == "H" else 0)  # L's blocks come first
        block = f"blk.{2 * at + 1 if modern else at}." if number else ""
        tensor = tensor.float().cpu()
        if part in ("embed", "head"):
            tensor = tensor[:c.vocab_size]
        if part == "embed" and modern:
            tensor = tensor * c.d_model ** 0.5
        names = GGUF_NAMES[part].split()
        pieces = dict(zip(names, tensor.chunk(len(names))))
        if part == "gqkv" and modern:
            pieces["attn_q"] = query_and_gate(pieces["attn_q"], pieces.pop("attn_gate"), c)
        for name, piece in pieces.items():
            theirs = f"{block}{name}.{kind}" if kind else f"{block}{name}"
            writer.add_tensor(theirs, piece.contiguous().numpy())
    if modern:
        ones = {"output_norm": c.d_model}  # our norms have no parameters, so theirs are 1
        for i in range(c.n_layer):
            _gguf_identity(writer, c, f"blk.{2 * i}.", GGMLQuantizationType)
            ones |= {f"blk.{at}.{norm}": c.d_model for at in (2 * i, 2 * i + 1)
                     for norm in ("attn_norm", "post_attention_norm")}
            ones |= {f"blk.{2 * i + 1}.{norm}": c.head_dim for norm in ("attn_q_norm", "attn_k_norm")}
        for name, size in ones.items():
            writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


ASK = """
import json, sys
import xllamacpp
path, row = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx = len(row) + 1
params.n_parallel = 1
params.n_gpu_layers = 0
params.warmup = False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # by default half precision,
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # as are its sums
print("LOADING", flush=True)
server = xllamacpp.Server(params)
for end in range(max(1, len(row) - 7), len(row) + 1):
    answer = server.handle_completions({  # of a token that ends within a character it would say nothing
        "prompt": row[:end], "max_tokens": 1, "temperature": 0, "logprobs": 2**30,
        "logit_bias": [[row[0], 1e6]]})
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    each = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    print("FOUND", json.dumps([token["logprob"] for token in sorted(each, key=lambda token: token["id"])]))
"""


def logits_of_gguf(path: Path, row: Tensor) -> Tensor:
    """llama.cpp's log-probabilities (8, V) for the token after each of the last 8 ids of a row (1, T). Runs
    in another process, because llama.cpp may crash it. Raises ImportError if llama.cpp lacks the model, and
    RuntimeError if it fails.
    """
    command = [sys.executable, "-P", "-c", ASK, path, json.dumps(row[0].tolist())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return torch.tensor([json.loads(line) for line in done.stdout.split("FOUND")[1:]])
    known = "LOADING" in done.stdout and "unknown model architecture" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "rror" in line]
    raise (RuntimeError if known else ImportError)(lines[0] if lines else done.returncode)
