"""The models of HF_FAMILIES in transformers, in both directions, with their tokenizers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from tiny_models import (
    BUILDS,
    export,
    largest_error,
    tiny,
    tokens,
    transformers,  # noqa: F401 (a fixture)
)

from cli.errors import UserError
from model import GPT2, HRM, MLM
from vocab import bpe
from vocab.tokenizer import load_tokenizer
from weights.huggingface import from_hf
from weights.sampling import samples_of

BYTES = load_tokenizer("bytes")  # 257 ids and [MASK], in a table of 320 rows
TEXT = "the cat sat on the mat, and the cat — über alles — sat on 12 mats.\n"
FAMILIES = {
    "hrm": (HRM, {}, "HrmTextForCausalLM"), "gpt2": (GPT2, {}, "GPT2LMHeadModel"),
    "modern": (GPT2, {"modern": True}, "Qwen3_5ForCausalLM"), "mlm": (MLM, {}, "ModernBertForMaskedLM")}
each_family = pytest.mark.parametrize("name", FAMILIES)


def made(name: str, seed: int = 0, **changes):
    family, config, _ = FAMILIES[name]
    return tiny(family, seed, **config | changes)


TOKENIZERS = {"bytes": lambda: BYTES, "bpe": lambda: bpe.train_bpe([TEXT] * 20, 290)}



def changed(directory, change: dict) -> str:
    """A directory whose config.json has other fields. With ..., it lacks a field."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value != ...}))
    return str(directory)


# -----------------------------------------------------------------------------------------------------------
# The same logits


@torch.no_grad()
@pytest.mark.parametrize("name, seed, changes", [
    *(pytest.param(name, seed, {}, marks=[pytest.mark.long] * (seed > 1)) for name in FAMILIES
      for seed in range(8)),
    # another tensor is as tall as the padded vocabulary, and must not be cut
    ("hrm", 2, {"d_model": 80, "n_head": 5, "attention": "prefix"}),
    ("gpt2", 2, {"d_model": 80, "n_head": 2}), ("mlm", 2, {"ff": 160})], ids=str)
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(name, seed, changes, transformers,
                                                                     tmp_path):
    """Each tensor counts: with one wrong, the logits are others."""
    ours = made(name, seed, **changes)
    export(ours, BYTES, tmp_path)
    c, auto = ours.config, "AutoModelForMaskedLM" if name == "mlm" else "AutoModelForCausalLM"
    theirs = getattr(transformers, auto).from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == FAMILIES[name][2] and theirs.dtype == torch.float32
    idx = torch.randint(256, (2, c.seq_len))  # without 256, the EOT: transformers knows no documents
    logits = theirs(idx).logits
    assert logits.size(-1) == c.vocab_size  # the rows that pad the table stay here
    assert largest_error(ours(idx), logits) <= 1e-5
    theirs.save_pretrained(tmp_path / "again")
    for directory in (tmp_path, tmp_path / "again"):
        back = from_hf(type(ours), directory).eval()
        # only training has dropout, and Qwen3.5 has no field for it
        assert back.config == (replace(c, dropout=0.0) if name == "modern" else c)
        assert largest_error(back(idx), ours(idx)) <= 1e-6 * (name == "modern")  # times and by √C
        assert all(p.isfinite().all() for p in back.parameters())
    for key, tensor in ours.state_dict().items():
        kept = tensor.clone()
        tensor.copy_(tensor.roll(1, 0))
        assert seed or largest_error(ours(idx), logits) > 1e-4, key
        tensor.copy_(kept)


def test_the_old_form_of_their_files_is_read(tmp_path):
    """gpt2 on the hub: no prefix, and buffers. ModernBERT on the hub: another spelling of the layers."""
    ours = made("gpt2")
    file = export(ours, BYTES, tmp_path / "gpt2") / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}, file)
    assert torch.equal(from_hf(GPT2, tmp_path / "gpt2").eval()(tokens()), ours(tokens()))

    ours = made("mlm", n_layer=5, global_every=2)
    c = ours.config
    directory = changed(export(ours, BYTES, tmp_path / "mlm"), {
        "layer_types": ..., "rope_parameters": ..., "global_rope_theta": c.global_theta,
        "local_rope_theta": c.local_theta})
    assert from_hf(MLM, directory).config == c


# -----------------------------------------------------------------------------------------------------------
# The same text


@torch.no_grad()
@pytest.mark.parametrize("name, kind", [("hrm", "bpe"), ("gpt2", "bpe"), ("modern", "bytes")])
def test_transformers_writes_the_same_text(name, kind, transformers, tmp_path):
    """By what README shows, that of --prompt --temperature 0. And a batch is padded on the left, so that each
    text continues as it does alone.
    """
    tokenizer = TOKENIZERS[kind]()
    ours = BUILDS[name](vocab_size=tokenizer.vocab_size, padded_vocab=320, seq_len=128).eval()
    ours.head_weight[tokenizer.eot] = 0.0  # else chance, not the same in each torch, ends the text early
    spec = tokenizer.to_json()
    export(ours, tokenizer, tmp_path)
    # so its digest is that of a run and its data
    assert tokenizer.to_json() == load_tokenizer(str(tmp_path)).to_json() == spec
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert words(TEXT)["input_ids"] == [tokenizer.eot, *tokenizer.encode(TEXT).tolist()]
    assert words.eos_token_id == tokenizer.eot and words.mask_token is None
    flags = SimpleNamespace(max_new_tokens=40, temperature=0, top_k=None, seed=0)
    text = TEXT[:20]
    wanted = text + "".join(samples_of(ours, tokenizer, "cpu", text, flags, stop=tokenizer.eot)[0])

    def written(texts, count: int, **begin):
        given = words(texts, return_tensors="pt", padding=True, **begin)
        found = theirs.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return [words.decode(row, skip_special_tokens=True) for row in found]

    assert written(text, 40) == [wanted] != written(text, 40, add_special_tokens=False)  # without a beginning
    pair = [i for part in "ab" for i in (tokenizer.eot, *tokenizer.encode(part))]
    assert words("a", "b")["input_ids"] == pair
    assert theirs.config.pad_token_id == words.pad_token_id is not None
    texts = ["a", "some more", "the cat sat"]
    alone = [written(each, 4)[0] for each in texts]
    assert written(texts, 4) == alone
    words.padding_side = "right"
    assert written(texts, 4) != alone


# -----------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("option", ["halt", "inject_input", "qk_norm"])
def test_models_without_a_counterpart_are_not_exported(option, tmp_path):
    with pytest.raises(UserError, match="--" + option.replace("_", "-")):
        export(made("hrm", **{option: True}), BYTES, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


YARN = {"rope_type": "yarn", "rope_theta": 1e4}
REFUSED = {  # each of these fields of config.json, one at a time
    "hrm": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 99, "hidden_act": "gelu",
            "rope_parameters": YARN},
    "gpt2": {"activation_function": "relu", "n_inner": 100, "scale_attn_weights": False,
             "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
             "add_cross_attention": True, "tie_word_embeddings": False, "n_embd": ..., "vocab_size": ...,
             "layer_norm_epsilon": ...},
    "modern": {"num_key_value_heads": 9, "layer_types": ["linear_attention"], "attn_output_gate": False,
               "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
               "tie_word_embeddings": True, "intermediate_size": 99, "attention_bias": True},
    "mlm": {"hidden_activation": "relu", "classifier_activation": "relu", "attention_bias": True,
            "mlp_bias": True, "norm_bias": True, "decoder_bias": False, "classifier_bias": True,
            "tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 9, "eos_token_id": None,
            "rope_parameters": {"full_attention": YARN}, "hidden_size": ..., "local_attention": ...}}
OTHERWISE = {  # and what the message names instead of the field
    "hrm": [("model_type", "gpt2", "gpt2"), ("intermediate_size", 64, r"gate_up_proj.weight.*\(128, "),
            ("vocab_size", 300, r"embed_tokens.weight.*\(300, "),
            ("num_layers_per_stack", 4, "H_module.layers.[123]"),
            ("quantization_config", {"quant_method": "x"}, "config.json")],
    "gpt2": [("n_layer", 9, r"transformer.h.\d.ln_1.weight"), ("n_positions", 99, "transformer.wpe.weight")],
    "modern": [("layer_types", None, "layer_types"), ("model_type", "modernbert", "modernbert")],
    "mlm": [("global_attn_every_n_layers", 0, "config.json"), ("eos_token_id", ..., "eos_token_id"),
            ("vocab_size", 300, r"decoder.bias.*\(300,")]}


@each_family
def test_another_model_is_refused(name, tmp_path):
    family, path = FAMILIES[name][0], export(made(name), BYTES, tmp_path) / "config.json"
    text = path.read_text()
    assert from_hf(family, str(tmp_path)).config
    for field, value, *named in (*REFUSED[name].items(), *OTHERWISE[name]):
        changed(tmp_path, {field: value})
        with pytest.raises(UserError, match=named[0] if named else field) as error:
            from_hf(family, str(tmp_path))
        assert "\n" not in str(error.value)
        path.write_text(text)


@pytest.mark.parametrize("name, table, head", [
    ("gpt2", "transformer.wte.weight", "lm_head.weight"),
    ("mlm", "model.embeddings.tok_embeddings.weight", "decoder.weight")])
def test_tensors_of_other_kinds(name, table, head, tmp_path, capsys):
    """Quantized weights and a head of its own are refused. What is not used is named."""
    family, file = FAMILIES[name][0], export(made(name), BYTES, tmp_path) / "model.safetensors"
    whole = safetensors.torch.load_file(file)

    def read(**tensors):
        safetensors.torch.save_file(whole | tensors, file)
        return from_hf(family, str(tmp_path))

    for dtype in (torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool):
        with pytest.raises(UserError, match=f"{table}.*{dtype}"):
            read(**{table: whole[table].to(dtype)})
    for dtype in (torch.float16, torch.bfloat16, torch.float64):  # the control
        read(**{table: whole[table].to(dtype)})
    with pytest.raises(UserError, match=head):
        read(**{head: whole[table] + 0.01})
    buffers = ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "position_ids", "a.inv_freq")
    read(**{head: whole[table].clone()}, **{buffer: torch.ones(2) for buffer in buffers})
    assert not capsys.readouterr().out
    read(**{"model.layers.7.Wo": torch.ones(2), "z": torch.ones(2)})
    assert "model.layers.7.Wo, z" in capsys.readouterr().out


@pytest.mark.parametrize("norm", ["norm", "layers.0.self_attn.q_norm", "layers.0.input_layernorm"])
def test_a_qwen_with_weights_in_its_norms_is_refused(norm, tmp_path):
    file, name = export(made("modern"), BYTES, tmp_path) / "model.safetensors", f"model.{norm}.weight"
    tensors = safetensors.torch.load_file(file)
    tensors[name][0] = 0.1
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(UserError, match=name):
        from_hf(GPT2, tmp_path)


@pytest.mark.parametrize("file, content", [
    ("config.json", None), ("model.safetensors", None), ("model.safetensors", b""),
    ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), ("model.safetensors", ...)])
def test_a_missing_or_damaged_file_is_refused(file, content, tmp_path):
    path = export(made("hrm"), BYTES, tmp_path) / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if content is ... else content)
    with pytest.raises(UserError, match=file):
        from_hf(HRM, str(tmp_path))
