"""What llama.cpp makes of --export gguf: the same likeliest ids and log-probabilities."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from runs import Trainer

import data
from data import UserError
from ddp_utils import load_run
from model import GPT2, HRM, MLM, continue_text, generate, to_gguf

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="no wheel of llama.cpp fits this machine: pip install xllamacpp")

MODELS = {"gpt2": (GPT2, Trainer("train_gpt2.py", eval_every=99, max_new_tokens=2, lr=1e-2, n_layer=2)),
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
    ("gpt2", "bytes"), ("hrm", "bpe:300"), pytest.param("gpt2", "bpe:300", marks=pytest.mark.full),
    pytest.param("hrm", "bytes", marks=pytest.mark.full),
    pytest.param("gpt2", "gpt2", marks=pytest.mark.full)])
def test_llama_cpp_writes_the_same_text(name, tokenizer, corpus, tmp_path, monkeypatch):
    if tokenizer == "gpt2":
        cache = ROOT.parent / "shared" / "data" / "tiktoken"
        if not cache.exists():
            pytest.skip("needs the vocabulary of gpt2")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    shards = data.prepare(f"text:{corpus}", tmp_path / "shards", tokenizer)
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
@pytest.mark.parametrize("name", ["gpt2", "hrm"])
def test_llama_cpp_answers_a_chat(name, tmp_path):
    path = tmp_path / "qa.jsonl"
    rows = [{"q": f"{n} and 1?", "a": f"it is {n + 1}"} for n in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = data.prepare(f"jsonl:{path}", tmp_path / "shards", "bytes", prompt_field="q", response_field="a",
                          row=64)
    model_class, trainer = MODELS[name]
    done = trainer.train(0, shards, tmp_path / "run", steps=200, seq_len=64, attention="isolated")
    assert done.code == 0, done.out
    model, words = load_run(model_class, tmp_path / "run")
    to_gguf(model, tmp_path / "model.gguf", words)
    question = "7 and 1?"
    chat = {"messages": [{"role": "user", "content": question}], "max_tokens": 9} | GREEDY
    ids = data.prompt_ids(words, question).tolist()
    chatted, by_ids = ask(tmp_path / "model.gguf", ("chat_completions", chat),
                          ("completions", {"prompt": ids, "max_tokens": 8, "logprobs": 1} | GREEDY))
    compare(by_ids, *expected(model, ids, 8))
    sampling = SimpleNamespace(max_new_tokens=9, temperature=0, top_k=0, seed=0, condition="")
    ours = "".join(continue_text(model, words, "cpu", question, sampling, stop=True))
    assert chatted["choices"][0]["message"]["content"] == ours


def test_what_llama_cpp_lacks_is_refused_in_one_sentence(tmp_path):
    words = data.load_tokenizer("bytes")
    shape = {"vocab_size": 257, "padded_vocab": 320, "seq_len": 16, "n_layer": 1, "n_head": 2, "d_model": 16}
    for model, sentence in ((GPT2(GPT2.Config(**shape, modern=True)), "--modern"),
                            (HRM(HRM.Config(**shape, ff=16, halt=True)), "--halt"),
                            (HRM(HRM.Config(**shape, ff=16, inject_input=True)), "--inject-input"),
                            (HRM(HRM.Config(**shape, ff=16, attention="prefix")), "--attention isolated"),
                            (MLM(MLM.Config(**shape, ff=16)), "knows no MLM, only GPT2 and HRM")):
        with pytest.raises(UserError, match=sentence):
            to_gguf(model, tmp_path / "x.gguf", words)
    assert not (tmp_path / "x.gguf").exists()
