"""What llama.cpp makes of --export gguf: the same likeliest ids and log-probabilities."""

import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from runs import Trainer

from cli.errors import UserError
from model import GPT2, HRM, MLM, flag, num_params
from prepare.pipeline import prepare
from vocab.tokenizer import load_tokenizer, prompt_ids
from weights.huggingface import HF_FAMILIES, to_hf
from weights.llama_cpp import to_gguf
from weights.sampling import generate, samples_of
from weights.use import load_run

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="no wheel of llama.cpp fits this machine: pip install xllamacpp")

MODELS = {"gpt2": (GPT2, Trainer("train_gpt2.py", eval_every=99, max_new_tokens=2, lr=1e-2, n_layer=2)),
          "modern": (GPT2, Trainer("train_gpt2.py", eval_every=99, max_new_tokens=2, lr=1e-2, n_layer=3,
                                   modern=True)),
          "hrm": (HRM, Trainer("train_hrm.py", eval_every=99, max_new_tokens=2, lr=1e-2, ff=64, h_cycles=2,
                               l_cycles=2))}
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


def compare(answer: dict, new: list[int], log_p: list[float]) -> None:
    found = answer["choices"][0]["logprobs"]["content"]
    assert [token["id"] for token in found] == new
    assert [token["logprob"] for token in found] == pytest.approx(log_p, abs=1e-3)


@pytest.mark.parametrize("name, tokenizer", [
    ("gpt2", "bytes"), ("hrm", "bpe:300"), ("modern", "bpe:300"),
    pytest.param("gpt2", "bpe:300", marks=pytest.mark.full),
    pytest.param("modern", "bytes", marks=pytest.mark.full),
    pytest.param("hrm", "bytes", marks=pytest.mark.full),
    pytest.param("gpt2", "gpt2", marks=pytest.mark.full)])
def test_llama_cpp_writes_the_same_text(name, tokenizer, corpus, tmp_path, monkeypatch):
    if tokenizer == "gpt2":
        cache = ROOT.parent / "shared" / "data" / "tiktoken"
        if not cache.exists():
            pytest.skip("needs the vocabulary of gpt2")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    shards = prepare(f"text:{corpus}", tmp_path / "shards", tokenizer)
    model_class, trainer = MODELS[name]
    done = trainer.train(0, shards, tmp_path / "run", steps=30)
    assert done.code == 0, done.out
    done = trainer.train(0, shards, tmp_path / "run", export="gguf")
    assert done.code == 0 and "model.gguf is ready for llama-cli" in done.out, done.out
    model, words = load_run(model_class, tmp_path / "run")
    prompts = ["def main(self):\n  ", "\u00e9\u4f60 1234 we'll "]
    answers = ask(tmp_path / "run" / "model.gguf", *(
        ("completions", {"prompt": prompt, "max_tokens": 9, "logprobs": 1} | GREEDY) for prompt in prompts))
    results = [expected(model, [words.eot, *words.encode(prompt).tolist()], 9) for prompt in prompts]
    for answer, (new, log_p) in zip(answers, results):
        compare(answer, new, log_p)
    model.embed.weight.data *= 1.2  # the control
    with pytest.raises(AssertionError):
        compare(answers[0], *expected(model, [words.eot, *words.encode(prompts[0]).tolist()], 9))


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "modern", "hrm"])
def test_llama_cpp_answers_a_chat(name, tmp_path):
    path = tmp_path / "qa.jsonl"
    rows = [{"q": f"{n} and 1?", "a": f"it is {n + 1}"} for n in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = prepare(f"jsonl:{path}", tmp_path / "shards", "bytes", prompt_field="q", response_field="a",
                     row=64)
    model_class, trainer = MODELS[name]
    done = trainer.train(0, shards, tmp_path / "run", steps=200, seq_len=64, attention="isolated")
    assert done.code == 0, done.out
    model, words = load_run(model_class, tmp_path / "run")
    to_gguf(model, tmp_path / "model.gguf", words)
    question = "7 and 1?"
    chat = {"messages": [{"role": "user", "content": question}], "max_tokens": 9} | GREEDY
    turns = [{"role": "user", "content": "5?"}, {"role": "assistant", "content": "6"}, *chat["messages"]]
    ids = prompt_ids(words, question).tolist()
    *chatted, by_ids = ask(tmp_path / "model.gguf", ("chat_completions", chat),
                           ("chat_completions", chat | {"messages": turns}),
                           ("completions", {"prompt": ids, "max_tokens": 8, "logprobs": 1} | GREEDY))
    compare(by_ids, *expected(model, ids, 8))
    sampling = SimpleNamespace(max_new_tokens=9, temperature=0, top_k=0, seed=0, condition="")
    for answer, prompt in zip(chatted, (question, f"5?\n6\n{question}")):  # of several turns as lines
        ours = "".join(samples_of(model, words, "cpu", prompt, sampling, stop=True)[0])
        assert answer["choices"][0]["message"]["content"] == ours


@dataclass
class SiluConfig(GPT2.Config):
    """With the guide's example of a flag, which no export knows."""

    silu: bool = flag(False, "SiLU instead of GELU")


class Silu(GPT2):
    Config = SiluConfig


@pytest.mark.parametrize("n_head, head_dim, n_layer", [
    (1, 2, 1), (2, 8, 2), *(pytest.param(*shape, marks=pytest.mark.full) for shape in (
        (3, 16, 1), (1, 64, 3), (2, 128, 2)))])
def test_a_modern_model_of_any_shape_fits_into_qwen35(n_head, head_dim, n_layer, tmp_path):
    """Log-probabilities to 1e-3, and at most 1.3 times the bytes where zeros can be packed."""
    torch.manual_seed(0)
    model = GPT2(GPT2.Config(n_layer=n_layer, n_head=n_head, d_model=n_head * head_dim, seq_len=32,
                             vocab_size=257, padded_vocab=320, modern=True)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    model.head.weight.data[127:] = 0  # the server joins the bytes of a character
    words = load_tokenizer("bytes")
    to_gguf(model, tmp_path / "model.gguf", words)
    ids = [words.eot, *words.encode("hello wor").tolist()]
    answer, = ask(tmp_path / "model.gguf",
                  ("completions", {"prompt": ids, "max_tokens": 8, "logprobs": 1} | GREEDY))
    compare(answer, *expected(model, ids, 8))
    if n_head * head_dim >= 64:
        assert (tmp_path / "model.gguf").stat().st_size < 1.3 * 4 * num_params(model)


def test_what_llama_cpp_lacks_is_refused_in_one_sentence(tmp_path, monkeypatch):
    """By both exports, also for a subclass that stands in HF_FAMILIES."""
    monkeypatch.setitem(HF_FAMILIES, Silu, HF_FAMILIES[GPT2])
    words = load_tokenizer("bytes")
    shape = {"vocab_size": 257, "padded_vocab": 320, "seq_len": 16, "n_layer": 1, "n_head": 2, "d_model": 16}
    for model, sentence in ((GPT2(SiluConfig(**shape, silu=True)), "a model with --silu has no counterpart"),
                            (GPT2(SiluConfig(**shape, modern=True, silu=True)), "a model with --silu has no"),
                            (Silu(SiluConfig(**shape, silu=True)), "--silu has no|cannot run Silu"),
                            (HRM(HRM.Config(**shape, ff=16, halt=True)), "--halt"),
                            (HRM(HRM.Config(**shape, ff=16, inject_input=True)), "--inject-input"),
                            (HRM(HRM.Config(**shape, ff=16, qk_norm=True)), "--qk-norm"),
                            (HRM(HRM.Config(**shape, ff=16, attention="prefix")), "--attention isolated"),
                            (MLM(MLM.Config(**shape, ff=16)), "cannot run MLM, only GPT2 and HRM")):
        with pytest.raises(UserError, match=sentence):
            to_gguf(model, tmp_path / "x.gguf", words)
        if "attention" not in sentence and not isinstance(model, MLM):  # those are right in transformers
            with pytest.raises(UserError, match=sentence):
                to_hf(model, tmp_path / "hf", words)
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "x.gguf").exists()
