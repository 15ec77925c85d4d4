"""Writes a run as GGUF, for llama.cpp and what stands on it (Ollama, LM Studio). Needs `pip install gguf`.

    python bench/to_gguf.py runs/gpt2-tiny-stdlib-bpe4096            # writes runs/…/model.gguf, in float32
    llama-cli -m runs/gpt2-tiny-stdlib-bpe4096/model.gguf -p "def main(" --temp 0

It takes a GPT-2 or an HRM of train_gpt2.py or train_hrm.py with a tokenizer of this project (gpt2,
cl100k_base, bytes, bpe:N), and pairs trained with --attention isolated. llama.cpp knows neither the attention
`prefix`, --modern, --halt and --inject-input nor masked language models.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import EOT, PATTERNS, ArgumentParser, Tokenizer, UserError  # noqa: E402
from ddp_utils import RunError, list_checkpoints, load_run, read_checkpoint  # noqa: E402
from model import CHAT_TEMPLATE, GPT2, HRM, refuse_export  # noqa: E402

# ours → theirs: the last part of a parameter's name; a matrix with several names is divided
NAMES = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output",
         "z_l_init": "hrm.z_l_init", "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "qkv": "attn_qkv",
         "attn_out": "attn_output", "up": "ffn_up", "down": "ffn_down",
         "gqkv": "attn_gate attn_q attn_k attn_v", "gate_up": "ffn_gate ffn_up"}
# the names that llama.cpp has for the patterns by which words are cut; without merges any will do
CUTS = {None: "gpt-2", PATTERNS["gpt2"]: "gpt-2", PATTERNS["cl100k_base"]: "dbrx"}
PARAMETER = re.compile(r"(?:(\w+)\.blocks\.(\d+)\.)?(\w+)(?:\.(weight|bias))?")


def add_shape(writer, model) -> None:
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


def add_tokenizer(writer, tokenizer: Tokenizer, c) -> None:
    """Tokens in the order of their ids; those that the table has beyond them are unused."""
    from gguf import TokenType
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


def to_gguf(model, path: Path, tokenizer) -> None:
    """Writes a model and its tokenizer. Raises UserError for what llama.cpp cannot run."""
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise UserError("GGUF needs the package gguf: pip install gguf.") from None
    refuse_export(model.config, *(("halt", "inject_input") if isinstance(model, HRM) else ("modern",)))
    if not isinstance(tokenizer, Tokenizer) or tokenizer.pattern not in CUTS:
        raise UserError(f"llama.cpp may cut words otherwise than {tokenizer.name}: use gpt2, cl100k_base, "
                        "bytes or bpe:N.")
    c = model.config
    if c.attention == "prefix":  # its hrm_text keeps the field, but attends causally (xllamacpp 2026.10)
        raise UserError("llama.cpp has no attention from a prompt to all of itself, so a model trained with "
                        "it would answer otherwise there: train with --attention isolated.")
    writer = GGUFWriter(path, "hrm_text" if isinstance(model, HRM) else "gpt2")
    add_shape(writer, model)
    add_tokenizer(writer, tokenizer, c)
    for ours, tensor in model.state_dict().items():
        stack, number, part, kind = PARAMETER.fullmatch(ours).groups()
        block = f"blk.{int(number) + c.n_layer * (stack == 'H')}." if number else ""  # L's blocks come first
        if part in ("embed", "head"):
            tensor = tensor[:c.vocab_size]
        names = NAMES[part].split()
        for name, piece in zip(names, tensor.float().chunk(len(names))):
            writer.add_tensor(f"{block}{name}" + f".{kind}" * bool(kind), piece.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a run, or a checkpoint in it")
    parser.add_argument("--out", type=Path, help="(default: model.gguf in the directory of the run)")
    args = parser.parse_args()
    newest = next(iter(list_checkpoints(args.run)), args.run)
    family = read_checkpoint(newest, checked=False)["family"]
    families = {"GPT2": GPT2, "HRM": HRM}
    if family not in families:
        raise UserError(f"{args.run} holds a model of the family {family}, and llama.cpp runs only "
                        "GPT2 and HRM.")
    model, tokenizer = load_run(families[family], args.run)
    out = args.out or newest.parent.parent / "model.gguf"
    to_gguf(model, out, tokenizer)
    print(f"{out} is ready: llama-cli -m {out} -p TEXT --temp 0")


if __name__ == "__main__":
    try:
        main()
    except (UserError, RunError) as error:
        raise SystemExit(f"error: {error}")
