"""weights/llama_cpp.py: llama.cpp finds the same likeliest ids and log-probabilities as the model."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import SHARED
from tiny_models import TEXT, made

from cli.errors import UserError
from model import num_params, pad_vocab
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
found = []
for kind, request in requests:
    answer = getattr(server, f"handle_{kind}")(request)
    found.append(answer if isinstance(answer, dict) else json.loads(answer))
print("ANSWERS" + json.dumps(found), flush=True)
"""
GREEDY = {"temperature": 0, "cache_prompt": False}


def ask(path, *requests) -> list[dict]:
    done = subprocess.run([sys.executable, "-c", ASK, str(path), json.dumps(requests)], capture_output=True,
                          text=True, timeout=120)
    assert "ANSWERS" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("ANSWERS")[2].splitlines()[0])


@torch.no_grad()
def expected(model, ids: list[int], count: int):
    """The likeliest ids that follow, and their log-probabilities."""
    new = [int(i) for i in generate(model, torch.tensor([ids]), count, 0)]
    whole = torch.tensor([ids + new[:-1]])
    log_p = model(whole)[0].float().log_softmax(-1)[len(ids) - 1:]
    return new, log_p.gather(1, torch.tensor(new)[:, None])[:, 0].tolist()


def same(answer: dict, new: list[int], log_p: list[float]) -> bool:
    found = answer["choices"][0]["logprobs"]["content"]
    return [token["id"] for token in found] == new and [
        token["logprob"] for token in found] == pytest.approx(log_p, abs=1e-3)


def readable(name: str, words, **changes):
    """A model that writes ASCII alone: the server joins the bytes of a character."""
    model = made(name, vocab_size=words.vocab_size, padded_vocab=pad_vocab(words.vocab_size), **changes)
    others = [i for i in range(words.vocab_size) if not words.decode([i]).isascii()]
    model.head_weight.data[others] = 0
    return model


@pytest.mark.parametrize("name, tokenizer, shape", [
    ("modern", "bpe", {"n_head": 1, "d_model": 2}), ("hrm", "bytes", {}),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("gpt2", "bytes", {}), ("gpt2", "gpt2", {}), ("modern", "bytes", {"n_head": 3, "d_model": 96})))])
def test_llama_cpp_writes_the_same_text(name, tokenizer, shape, tmp_path, monkeypatch):
    """And cuts a text as we do. A modern model has at most 1.3 times the bytes where zeros can be packed."""
    if tokenizer == "gpt2" and not (SHARED / "tiktoken").is_dir():
        pytest.skip("needs the vocabulary of gpt2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
    words = bpe.train_bpe([TEXT] * 20, 290) if tokenizer == "bpe" else load_tokenizer(tokenizer)
    model, path = readable(name, words, seq_len=32, **shape), tmp_path / "model.gguf"
    to_gguf(model, path, words)
    prompts = ["the cat:\n  ", "\u00e9\u4f60 1234 we'll "]
    ids = [[words.eot, *words.encode(prompt).tolist()] for prompt in prompts]
    answers = ask(path, *(("completions", {"prompt": prompt, "max_tokens": 9, "logprobs": 1} | GREEDY)
                          for prompt in prompts))
    assert all(same(answer, *expected(model, row, 9)) for answer, row in zip(answers, ids))
    model.embed.weight.data *= 1.2  # the control
    assert not same(answers[0], *expected(model, ids[0], 9))
    if model.config.d_model >= 64:
        assert path.stat().st_size < 1.3 * 4 * num_params(model)


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
