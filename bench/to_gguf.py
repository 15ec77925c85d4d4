"""`--export gguf` of the trainers: a run as GGUF, for llama.cpp and what stands on it (Ollama, LM Studio).

It takes a GPT-2 or an HRM with a tokenizer of this project (gpt2, cl100k_base, bytes, bpe:N), and pairs
trained with --attention isolated. llama.cpp knows neither the attention `prefix`, --modern, --halt and
--inject-input nor masked language models. Needs `pip install gguf`.
"""

import json
import os
import re
from pathlib import Path

from gguf import GGUFWriter, TokenType

from data import EOT, PATTERNS, NotNow, Tokenizer, UserError
from model import CHAT_TEMPLATE, GPT2, HRM, refuse_export

# ours → theirs: the last part of a parameter's name; a matrix with several names is divided
NAMES = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output",
         "z_l_init": "hrm.z_l_init", "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "qkv": "attn_qkv",
         "attn_out": "attn_output", "up": "ffn_up", "down": "ffn_down",
         "gqkv": "attn_gate attn_q attn_k attn_v", "gate_up": "ffn_gate ffn_up"}
# the names that llama.cpp has for the patterns by which words are cut; without merges any will do
CUTS = {None: "gpt-2", PATTERNS["gpt2"]: "gpt-2", PATTERNS["cl100k_base"]: "dbrx"}
PARAMETER = re.compile(r"(?:(\w+)\.blocks\.(\d+)\.)?(\w+)(?:\.(weight|bias))?")


def add_shape(writer, model):
    c = model.config
    hrm = isinstance(model, HRM)
    writer.add_context_length(c.seq_len)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(c.ff if hrm else 4 * c.d_model)
    writer.add_head_count(c.n_head)
    writer.add_file_type(0)  # all float32
    if not hrm:
        writer.add_block_count(c.n_layer)
        writer.add_layer_norm_eps(c.norm_eps)
        return
    # one slot of the cache for each call
    writer.add_block_count(c.n_layer * c.used_cycles * (c.l_cycles + 1))
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_embedding_scale(c.embed_scale)
    writer.add_uint32("hrm_text.hrm.layers_per_stack", c.n_layer)  # gguf 0.19 has no names for these
    writer.add_uint32("hrm_text.hrm.h_cycles", c.used_cycles)
    writer.add_uint32("hrm_text.hrm.l_cycles", c.l_cycles)
    writer.add_bool("hrm_text.hrm.prefix_lm", False)


def add_tokenizer(writer, tokenizer: Tokenizer, c):
    """Tokens in the order of their ids; those that the table has beyond them are unused."""
    model = json.loads(tokenizer.to_json())["model"]
    tokens = [f"[PAD{i}]" for i in range(c.vocab_size)]
    types = [TokenType.UNUSED] * c.vocab_size
    for kind, named in ((TokenType.NORMAL, model["vocab"]), (TokenType.CONTROL, tokenizer.specials)):
        for token, i in named.items():
            if i < c.vocab_size:  # [MASK] can lie beyond
                tokens[i], types[i] = token, kind
    pairs = c.response >= 0
    first = c.start if pairs else tokenizer.eot
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(CUTS[tokenizer.pattern])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # llama.cpp wants a merge; this one never applies
    writer.add_token_merges([" ".join(parts) for parts in model["merges"]] or [f"{EOT} {EOT}"])
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(c.end if pairs and c.end >= 0 else first)
    writer.add_add_bos_token(True)
    if pairs:
        writer.add_chat_template(CHAT_TEMPLATE.replace("ANSWER", tokenizer.decode([c.response])))


def to_gguf(model, path: Path, tokenizer):
    """Writes a model and its tokenizer. Raises UserError for what llama.cpp cannot run."""
    if type(model) not in (GPT2, HRM):
        raise UserError(f"llama.cpp knows no {type(model).__name__}, only GPT2 and HRM.")
    refuse_export(model.config, *(("halt", "inject_input") if isinstance(model, HRM) else ("modern",)))
    if not isinstance(tokenizer, Tokenizer) or tokenizer.pattern not in CUTS:
        raise UserError(f"llama.cpp may cut words otherwise than {tokenizer.name}: use gpt2, cl100k_base, "
                        "bytes or bpe:N.")
    c = model.config
    if c.attention == "prefix":  # its hrm_text keeps the field, but attends causally (xllamacpp 2026.10)
        raise UserError("llama.cpp has no attention from a prompt to all of itself, so a model trained with "
                        "it would answer otherwise there: train with --attention isolated.")
    temporary = path.with_name(f".tmp-{path.name}")  # a kill leaves no half of a model
    writer = GGUFWriter(temporary, "hrm_text" if isinstance(model, HRM) else "gpt2")
    add_shape(writer, model)
    add_tokenizer(writer, tokenizer, c)
    for ours, tensor in model.state_dict().items():
        stack, number, part, kind = PARAMETER.fullmatch(ours).groups()
        block = f"blk.{int(number) + c.n_layer * (stack == 'H')}." if number else ""  # L's blocks come first
        if part in ("embed", "head"):
            tensor = tensor[:c.vocab_size]
        names = NAMES[part].split()
        for name, piece in zip(names, tensor.float().cpu().chunk(len(names))):
            writer.add_tensor(f"{block}{name}" + f".{kind}" * bool(kind), piece.contiguous().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(temporary, path)
    except OSError as error:
        raise NotNow(f"{path} cannot be written ({error.strerror}): free some space, or move away what is "
                     "there.")
