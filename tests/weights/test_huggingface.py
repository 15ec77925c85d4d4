"""weights/huggingface.py: tiny models have the logits of transformers, both ways, and the rest is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TALL, TEXT, WORDS, largest_error, made
from torch import nn

from cli.errors import UserError
from model import GPT2, HRM, MLM, VOCAB_TENSORS, blocks_of
from vocab import bpe
from vocab.tokenizer import load_tokenizer, prompt_ids, with_markers
from weights.huggingface import config_from_hf, from_hf, to_hf
from weights.sampling import generate

transformers = pytest.importorskip("transformers", minversion="5.23")

KINDS = {"gpt2": GPT2, "modern": GPT2, "hrm": HRM, "mlm": MLM}
each_kind = pytest.mark.parametrize("name", KINDS)


def opened(directory):
    config = json.loads((directory / "config.json").read_text())
    return getattr(transformers, config["architectures"][0]).from_pretrained(directory).eval()


@torch.no_grad()
def error(ours, theirs) -> float:
    """The largest difference of logits, relative to the largest logit."""
    idx = torch.randint(256, (2, ours.config.seq_len), generator=torch.Generator().manual_seed(1))
    logits = theirs(idx).logits  # of as many ids: the rows that pad the table stay here
    return largest_error(ours(idx), logits) / logits.abs().max()


@pytest.mark.parametrize("seed", [0, TALL, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
@each_kind
@torch.no_grad()
def test_logits_are_those_of_transformers_both_ways(name, seed, tmp_path):
    ours = made(name, seed)
    to_hf(ours, tmp_path, WORDS)
    theirs = opened(tmp_path)
    assert theirs.dtype == torch.float32 and error(ours, theirs) < 1e-5
    back = from_hf(KINDS[name], tmp_path)
    assert back.config == ours.config
    for key, tensor in back.state_dict().items():
        rows = ours.config.vocab_size if key in VOCAB_TENSORS else None
        bound = 1e-6 if (name, key) == ("modern", "embed.weight") else 0.0  # times and by √C
        assert (ours.state_dict()[key][:rows] - tensor[:rows]).abs().max() <= bound, key
        assert tensor.isfinite().all()
    for key, p in theirs.named_parameters():
        if "norm" not in key:  # as those of a modern GPT-2 have none
            nn.init.normal_(p, std=p.size(-1) ** -0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = from_hf(KINDS[name], tmp_path / "theirs").eval()
    assert again.config == ours.config and error(again, theirs) < 1e-5 < error(ours, theirs)
    theirs = opened(tmp_path)
    for key, tensor in ours.state_dict().items() if seed == 0 else ():  # control: each of them counts
        before = tensor.clone()
        tensor.copy_(before.roll(1, 0))
        assert error(ours, theirs) > 1e-4, key
        tensor.copy_(before)


# ------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("name, kind", [
    ("gpt2", "bytes"), ("hrm", "bpe"), pytest.param("modern", "bytes", marks=pytest.mark.full)])
def test_transformers_writes_the_same_ids(name, kind, tmp_path):
    """Of a batch: each text begins with EOT and is padded on the left. Our tokenizer stays the same."""
    words = WORDS if kind == "bytes" else bpe.train_bpe([TEXT] * 20, 290)
    before = words.to_json()
    ours = made(name, vocab_size=words.vocab_size, seq_len=64)
    to_hf(ours, tmp_path, words)
    assert words.to_json() == load_tokenizer(str(tmp_path)).to_json() == before
    theirs, tokens = opened(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokens(TEXT)["input_ids"] == [words.eot, *words.encode(TEXT)]
    assert tokens("a", "b")["input_ids"] == [words.eot, *words.encode("a"), words.eot, *words.encode("b")]
    assert theirs.generation_config.do_sample and tokens.pad_token_id == theirs.config.pad_token_id
    prompts = [TEXT[:1], TEXT[:20], TEXT[:9]]

    def written(**given):
        batch = tokens(prompts, return_tensors="pt", padding=True, **given)
        return theirs.generate(**batch, max_new_tokens=8, min_new_tokens=8, do_sample=False)[:, -8:]

    ids = [torch.tensor([[words.eot, *words.encode(prompt).tolist()]]) for prompt in prompts]
    wanted = torch.stack([torch.cat([*generate(ours, row, 8, temperature=0)]) for row in ids])
    assert torch.equal(written(), wanted)
    for wrong in {"add_special_tokens": False}, {"padding_side": "right"}:  # the controls
        assert not torch.equal(written(**wrong), wanted)


@torch.no_grad()
def test_transformers_fills_masks_as_we_do(tmp_path):
    words = bpe.train_bpe([TEXT] * 20, 290)
    ours = made("mlm", vocab_size=words.mask + 1, seq_len=64, eot=words.eot)
    to_hf(ours, tmp_path, words)
    found = transformers.pipeline("fill-mask", model=str(tmp_path), top_k=3)("the cat [MASK] on the mat")
    ids = [words.eot, *words.encode_masked("the cat [MASK] on the mat")]
    best = ours(torch.tensor([ids]))[0, ids.index(words.mask)].softmax(-1).topk(3)
    assert [f["token"] for f in found] == best.indices.tolist()
    assert [f["score"] for f in found] == pytest.approx(best.values.tolist(), abs=1e-5)
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = tokens(["the cat", "the cat sat on the mat"], padding=True, return_tensors="pt")
    short = 1 + len(words.encode("the cat"))
    alone = ours(batch["input_ids"][:1, :short])
    assert (opened(tmp_path)(**batch).logits[:1, :short] - alone).abs().max() < 1e-4


@pytest.mark.parametrize("name, attention", [("gpt2", "isolated"), ("hrm", "isolated"), ("hrm", "prefix")])
def test_a_model_of_pairs_has_the_ids_types_and_chats_of_its_rows(name, attention, tmp_path):
    words = with_markers(WORDS)
    ours = made(name, vocab_size=words.vocab_size, attention=attention, **words.marker_ids)
    to_hf(ours, tmp_path, words)
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path)
    question = prompt_ids(words, "why").tolist()
    assert tokens("why")["input_ids"] == question
    pair = tokens("why", "so")
    assert pair["input_ids"] == [*question, *b"so", words.eot] == tokens.apply_chat_template(
        [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}])["input_ids"]
    prefix = attention == "prefix"
    assert pair.get("token_type_ids") == ([1] * 5 + [0] * 3 if prefix else None)
    assert from_hf(KINDS[name], tmp_path).config.attention == ("prefix" if prefix else "causal")
    assert tokens.pad_token_id not in (tokens.eos_token_id, tokens.bos_token_id)
    if prefix:
        theirs = opened(tmp_path)
        idx = torch.tensor([question])
        with torch.no_grad():
            logits = theirs(idx, token_type_ids=torch.ones_like(idx)).logits
            assert (ours(idx)[..., :words.vocab_size] - logits).abs().max() < 1e-4
            assert (theirs(idx).logits - logits).abs().max() > 1e-2  # the control


# -------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("option", ["halt", "inject_input", "qk_norm"])
def test_a_flag_that_transformers_lacks_is_not_exported(option, tmp_path):
    with pytest.raises(UserError, match="--" + option.replace("_", "-")):
        to_hf(made("hrm", **{option: True}), tmp_path / "hf", WORDS)
    with pytest.raises(UserError, match="HF_FAMILIES"):
        to_hf(type("Other", (HRM,), {})(made("hrm").config), tmp_path / "hf", WORDS)
    assert not (tmp_path / "hf").exists()


@each_kind
@pytest.mark.parametrize("owner, last", [
    (lambda model: model, "gain"), (lambda model: blocks_of(model)[0], "norm"),
    (lambda model: model.embed, "bias")])
def test_a_parameter_that_transformers_lacks_is_not_exported(name, owner, last, tmp_path):
    """The parts of its name may be known, in another place."""
    model = made(name)
    owner(model).register_parameter(last, nn.Parameter(torch.ones(32)))
    with pytest.raises(UserError, match=last):
        to_hf(model, tmp_path / "hf", WORDS)
    assert not (tmp_path / "hf").exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The directory of an export of each kind."""
    parent = tmp_path_factory.mktemp("exported")
    for name in KINDS:
        to_hf(made(name), parent / name, WORDS)
    return parent


@pytest.fixture
def changed(exported, tmp_path):
    """Makes a copy of an export with other fields (... removes one) and tensors; returns its directory."""
    def change(name: str, fields: dict, tensors: dict | None = None):
        config = json.loads((exported / name / "config.json").read_text()) | fields
        config = {key: value for key, value in config.items() if value is not ...}
        shutil.copytree(exported / name, tmp_path / "hf", dirs_exist_ok=True)
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
        if tensors:
            file = tmp_path / "hf" / "model.safetensors"
            save_file(load_file(exported / name / file.name) | tensors, file)
        return tmp_path / "hf"

    return change


@pytest.mark.parametrize("name, fields, wanted", [
    ("gpt2", {"activation_function": "gelu_pytorch_tanh", "n_inner": None}, {}),
    ("gpt2", {"resid_pdrop": ...}, {"dropout": 0.1}),
    ("hrm", {"embedding_scale": ..., "initializer_range": 0.1}, {"embed_scale": 10.0}),
    ("hrm", {"num_layers_per_stack": ..., "num_hidden_layers": 3}, {"n_layer": 3}),
    ("hrm", {"rope_parameters": ..., "rope_theta": 500.0}, {"rope_theta": 500.0}),
    ("hrm", {"rope_parameters": None}, {"rope_theta": 10000.0}), ("hrm", {"prefix_lm": ...}, {}),
    ("hrm", {"rope_parameters": {"rope_theta": 70.0}}, {"rope_theta": 70.0}),
    ("mlm", {"layer_types": ..., "rope_parameters": ..., "global_attn_every_n_layers": ...,
             "global_rope_theta": ..., "local_rope_theta": ..., "mlp_dropout": ...},
     {"global_every": 3, "global_theta": 160000.0, "local_theta": 10000.0, "dropout": 0.0}),
    ("mlm", {"rope_parameters": ..., "global_rope_theta": 7.0, "local_rope_theta": 9.0},
     {"global_theta": 7.0, "local_theta": 9.0}),
    ("mlm", {"global_attn_every_n_layers": 9}, {})])
def test_older_and_other_forms_of_a_configuration_are_read(name, fields, wanted, changed):
    config, found = (config_from_hf(KINDS[name], str(changed(name, some)))[0] for some in ({}, fields))
    assert found == replace(config, **wanted)


YARN = {"rope_type": "yarn", "rope_theta": 1e4}
REFUSED = {  # each of these fields, by name
    "gpt2": {"activation_function": "relu", "n_inner": 100, "scale_attn_weights": False, "n_embd": ...,
             "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
             "add_cross_attention": True, "tie_word_embeddings": False},
    "mlm": {"hidden_activation": "relu", "classifier_activation": "relu", "attention_bias": True,
            "mlp_bias": True, "norm_bias": True, "decoder_bias": False, "classifier_bias": True,
            "tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 3, "eos_token_id": None,
            "rope_parameters": {"full_attention": YARN}},
    "hrm": {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
            "head_dim": 99, "rope_parameters": YARN},
    "modern": {"num_key_value_heads": 1, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
               "layer_types": ..., "tie_word_embeddings": True, "head_dim": 99, "intermediate_size": 99,
               "hidden_act": "gelu", "attention_bias": True, "attn_output_gate": False}}


@pytest.mark.parametrize("name, key, value, named", [
    *((name, key, value, key) for name, fields in REFUSED.items() for key, value in fields.items()),
    ("gpt2", "model_type", "modernbert", "gpt2"), ("hrm", "model_type", "gpt2", "hrm_text"),
    ("gpt2", "n_layer", 9, "h.3.ln_1"), ("gpt2", "n_positions", 99, "wpe"),
    ("mlm", "vocab_size", 300, "decoder.bias"), ("hrm", "intermediate_size", 64, "gate_up_proj"),
    ("mlm", "global_attn_every_n_layers", 0, "modulo"), ("mlm", "eos_token_id", ..., "eos_token_id"),
    ("gpt2", "quantization_config", {"quant_method": "x"}, "quantized")])
def test_another_configuration_is_refused(name, key, value, named, changed):
    with pytest.raises(UserError, match=named) as error:
        from_hf(KINDS[name], str(changed(name, {key: value})))
    assert "\n" not in str(error.value)


TABLES = {"gpt2": "transformer.wte.weight", "mlm": "model.embeddings.tok_embeddings.weight"}


@pytest.mark.parametrize("name", TABLES)
def test_tensors_that_cannot_be_meant_are_refused(name, exported, changed, capsys):
    table = load_file(exported / name / "model.safetensors")[TABLES[name]]
    head = {"gpt2": "lm_head.weight", "mlm": "decoder.weight"}[name]
    for dtype in torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool:
        with pytest.raises(UserError, match=f"{TABLES[name]} .*{dtype}"):
            from_hf(KINDS[name], changed(name, {}, {TABLES[name]: table.to(dtype)}))
    with pytest.raises(UserError, match=head):
        from_hf(KINDS[name], changed(name, {}, {head: table + 0.01}))
    from_hf(KINDS[name], changed(name, {}, {head: table.to(torch.bfloat16)}))  # rounded
    buffers = ("transformer.h.0.attn.bias", "h.0.attn.masked_bias", "position_ids", "rotary.inv_freq")
    for dtype in torch.float16, torch.bfloat16, torch.float64:  # the controls
        table = table.to(dtype)
        from_hf(KINDS[name], changed(name, {}, {TABLES[name]: table, head: table.clone()} | {
            buffer: torch.ones(2) for buffer in buffers}))
    assert not capsys.readouterr().out
    from_hf(KINDS[name], changed(name, {}, {"layers.7.Wo": torch.ones(2), "z": torch.ones(2)}))
    assert "layers.7.Wo, z" in capsys.readouterr().out


@pytest.mark.parametrize("norm", ["norm", "layers.0.self_attn.q_norm", "layers.1.input_layernorm"])
def test_a_qwen_with_weights_in_its_norms_is_refused(norm, exported, changed):
    tensors = load_file(exported / "modern" / "model.safetensors")
    key = f"model.{norm}.weight"
    with pytest.raises(UserError, match=key):
        from_hf(GPT2, changed("modern", {}, {key: tensors[key] + 0.1}))


def test_which_files_are_read(exported, changed, monkeypatch):
    """model.safetensors, else those of the index in the directory. OpenAI's names lack a prefix."""
    wanted = from_hf(GPT2, exported / "gpt2").positions.weight
    hf = changed("gpt2", {})
    whole, part, index = (hf / name for name in (
        "model.safetensors", "part.safetensors", "model.safetensors.index.json"))

    def found(source=hf):
        return torch.equal(from_hf(GPT2, str(source)).positions.weight, wanted)

    tensors = load_file(whole)
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, hf / "left-over.safetensors")
    save_file({key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}, whole)
    monkeypatch.setenv("HOME", str(hf.parent))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"some/name": hf}[name])
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../left-over.safetensors")}))
    assert found() and found("~/hf") and found("some/name")
    whole.rename(part)
    assert not found()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, part.name)}))
    assert found()
    for content in "{", "[]", "{}", '{"weight_map": 1}':
        index.write_text(content)
        with pytest.raises(UserError, match="safetensors"):
            from_hf(GPT2, hf)
    for content in b"", b"version https://git-lfs.github.com/spec/v1\n", part.read_bytes()[:-9]:
        whole.write_bytes(content)
        with pytest.raises(UserError, match=whole.name):
            from_hf(GPT2, hf)
    (hf / "config.json").unlink()
    for source, named in (hf, "config.json"), ("no/name", "no/name"):
        with pytest.raises(UserError, match=named):
            from_hf(GPT2, str(source))
