"""weights/llama_cpp.py: llama.cpp finds the same likeliest ids and log-probabilities as the model."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import SHARED
from tiny_models import TEXT, made

from cli.errors import UserError
from model import pad_vocab
from vocab import bpe
from vocab.tokenizer import load_tokenizer
from weights.llama_cpp import to_gguf
from weights.sampling import generate

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="no wheel of llama.cpp fits this machine: pip install xllamacpp")

ASK = """
import json, sys
import xllamacpp
path, requests = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx = 32
params.n_parallel = 1
params.warmup = False
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # by default half precision,
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # as are its sums
server = xllamacpp.Server(params)
print("ANSWERS" + json.dumps([server.handle_completions(request) for request in requests]), flush=True)
"""
ASKED = {"max_tokens": 9, "logprobs": 1, "temperature": 0, "cache_prompt": False}


def ask(path, prompts) -> list[dict]:
    requests = [ASKED | {"prompt": prompt} for prompt in prompts]
    done = subprocess.run([sys.executable, "-c", ASK, str(path), json.dumps(requests)], capture_output=True,
                          text=True, timeout=120)
    assert "ANSWERS" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("ANSWERS")[2].splitlines()[0])


@torch.no_grad()
def same(answer: dict, model, ids: list[int]) -> bool:
    """Whether it has the likeliest ids that follow, and their log-probabilities."""
    new = torch.cat([*generate(model, torch.tensor([ids]), 9, 0)])
    whole = torch.cat((torch.tensor(ids), new[:-1]))[None]
    log_p = model(whole)[0].float().log_softmax(-1)[len(ids) - 1:]
    found = answer["choices"][0]["logprobs"]["content"]
    return [token["id"] for token in found] == new.tolist() and [
        token["logprob"] for token in found] == pytest.approx(log_p[range(9), new].tolist(), abs=1e-3)


@pytest.mark.parametrize("name, tokenizer, shape", [
    ("modern", "bpe", {"n_head": 1, "d_model": 2}), ("hrm", "bytes", {}),
    pytest.param("gpt2", "gpt2", {}, marks=pytest.mark.full),
    pytest.param("modern", "bytes", {"n_head": 3, "d_model": 96}, marks=pytest.mark.full)])
def test_llama_cpp_writes_the_same_text(name, tokenizer, shape, tmp_path, monkeypatch):
    """And cuts a text as we do."""
    if tokenizer == "gpt2" and not (SHARED / "tiktoken").is_dir():
        pytest.skip("needs the vocabulary of gpt2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
    words = bpe.train_bpe([TEXT] * 20, 290) if tokenizer == "bpe" else load_tokenizer(tokenizer)
    size, path = words.vocab_size, tmp_path / "model.gguf"
    model = made(name, vocab_size=size, padded_vocab=pad_vocab(size), seq_len=32, **shape)
    # it writes ASCII alone: the server joins the bytes of a character
    model.head_weight.data[[i for i in range(size) if not words.decode([i]).isascii()]] = 0
    to_gguf(model, path, words)
    prompts = ["the cat:\n  ", "\u00e9\u4f60 1234 we'll "]
    ids = [[words.eot, *words.encode(prompt).tolist()] for prompt in prompts]
    answers = ask(path, prompts)
    assert all(same(answer, model, row) for answer, row in zip(answers, ids))
    model.embed.weight.data *= 1.2  # the control
    assert not same(answers[0], model, ids[0])


@pytest.mark.parametrize("name, changes, named", [
    ("mlm", {}, "MLM"), ("hrm", {"halt": True}, "--halt"), ("hrm", {"attention": "prefix"}, "isolated"),
    ("gpt2", {}, "other")])
def test_what_llama_cpp_lacks_is_refused(name, changes, named, tmp_path):
    words = load_tokenizer("bytes")
    if named == "other":
        words.name, words.pattern = named, "[a-z]+"
    with pytest.raises(UserError, match=named):
        to_gguf(made(name, **changes), tmp_path / "x.gguf", words)
    assert not (tmp_path / "x.gguf").exists()
