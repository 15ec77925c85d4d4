"""The programs of bench/ start, each with the smallest arguments, or say in one sentence what they lack."""

import json
import re
import runpy
import shlex
import zipfile

import pytest
from conftest import ROOT, run
from runs import Trainer

from prepare.pipeline import prepare

# nanoGPT's interface and names of parameters, as bench/train.py uses them
NANOGPT = """
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias),
                                  "c_proj": nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd),
            "h": nn.ModuleList(Block(c) for _ in range(c.n_layer)),
            "ln_f": nn.LayerNorm(c.n_embd, bias=c.bias)})
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx, targets):
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"].weight[:idx.size(1)]
        for block in parts["h"]:
            x = block(x)
        logits = self.lm_head(parts["ln_f"](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        groups = [{"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""
# nanoGPT's commands, as bench/nanogpt.py gives them
CLONE = {"train.py": "print('step 1: train loss 4.0, val loss 3.5')\n", "model.py": NANOGPT,
         "data/shakespeare_char/prepare.py": "open('input.txt').read()\n"}
RACE = ("--json=@tmp_path/json --size=tiny --batch=2 --seq-len=32 --n-layer=1 --vocab-size=512 --warmup=1 "
        "--steps=2 --pairs=1 --profile=1 --precision=fp32 --device=cpu --threads=1 --verbose")
KERNELS = "--device=cpu --rows=16384"


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nanogpt")
    for name, text in CLONE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def text(corpus, tmp_path):
    (tmp_path / "text.txt").write_text(corpus.read_text()[:20_000])
    return tmp_path / "text.txt"


@pytest.fixture
def small(text, tmp_path):
    return prepare(f"text:{text}", tmp_path / "small", "bytes", workers=1)


@pytest.fixture
def puzzles(tmp_path):
    return prepare("task:addition", tmp_path / "task-addition-bytes", max_samples=200, workers=1)


@pytest.fixture
def adder(puzzles, tmp_path):
    hrm = Trainer("train_hrm.py", seq_len=256, ff=64, l_cycles=1, bp_cycles=1, inject_input=True, steps=1)
    assert hrm.train(0, puzzles, tmp_path / "adder", h_cycles="1:2").code == 0
    return tmp_path / "adder"


SAME = "same.py . . 'gpt2, 1 ranks, plain text, strategy=ddp: equal'"
# the command, its exit code, and what it prints; @ is before a fixture
PROGRAMS = [
    ("carries.py @adder --longest=2 --sums=2 --picture @tmp_path/a.png", 0, r"^2 +(0 +){5}0$"),
    ("clients.py", 2, "error: "),  # what it asks is in test_clients.py
    ("cost.py mlm tiny", 0, r"^\| mlm `tiny` \| 3.3 M \| 400 \| < 0.1 \| none \| < 0.1 \| < 0.1 \|$"),
    ("cost.py mlm tinny", 1, "^error: .*tinny.* tiny, 17m, base"),
    ("curves.py @small --device=cpu --tiny --seconds=0.01", 0, ""),
    ("exports.py MLM", 0, "^ +MLM .* 4 of 4 "),
    ("kernels.py", 1, "^error: no GPU"),
    *((f"kernels.py {part} {KERNELS}", 0, rf"(?s)(?:^\{{.*?){{{rows}}}") for part, rows in (
        ("copy", 1), ("matmul", 56), ("attention", 12), ("loss", 2))),
    ("lab.py --nodes=2 --comm=fp32 --compute=0.001 --parameters=12k --steps=1", 0, r"^\| 1 \| fp32 \| \d+ "),
    ("late.py", 1, "^error: "),  # with what it needs it is in test_late.py
    ("learning.py --data @puzzles --settings puzzle --lr=1e-5,1e-2 --seeds=1 --steps=2 --equal=time --flags "
     "'--batch 2 --global-batch 2 --d-model 32 --n-head 2' --out @tmp_path/runs --picture @tmp_path/a.png "
     "--device=cpu", 0, r"^\| puzzle \| [\d,]+ \| [\d.]+ \| 2 \| 1e-2 \(best\) \| [1-9]"),  # CPU seconds
    *((f"looped.py {model} --inject-input --n-layer=2 --d-model=32 --data @puzzles --seq-len=256 --batch=1 "
       "--global-batch=1 --steps=1 --out @tmp_path/run", 0, " in 2 blocks$") for model in ("loop", "share")),
    ("nanogpt.py @nanogpt @text --iterations=1 --steps=1", 0,
     r"^\| nanoGPT, 1 iterations \| \d+ \| 3.500 \|\n\| train_gpt2.py, 1 steps \| \d+ \| [456].\d{3} \|$"),
    ("nanogpt.py @tmp_path @text", 1, "^error: .*git clone"),
    ("probe.py @tmp_path @text", 1, "^error: .*text.txt "),
    (SAME, 0, "^1 of 1 are"), (f"{SAME} --control", 1, "^0 of 1 are"),
    ("sampling.py 1 --models=HRM --tokenizer=bytes", 0, r"(?s)^  ours +[\d.]+ .*^  transformers +[\d.]+ "),
    ("scaling.py train_gpt2.py --processes=1,2 --steps=2 -- --data @shards --seq-len=32 --d-model=32 "
     "--n-layer=1 --batch=2 --global-batch=4 --precision=fp32", 0,
     r"^\| 1 \| 2 x 2 x 1 \| float32 \| [\d,]+ \| [\d,]+ \| 100% .*\n\| 2 \| 2 x 1 x 2 \| float32 \|"),
    ("steps.py . . --trainer=gpt2 --ranks=1 --rounds=2 -- --batch=1 --global-batch=1 --seq-len=32 "
     "--d-model=32 --n-head=2", 0, r"^gpt2: .* ratio [\d.]+, 95 %"),
    *((f"train.py {model} {RACE} --peer={peer}", 0, r"^\| ours \| ") for model, peer in (
        ("gpt2", "hf"), ("hrm", "hf"), ("mlm", "hf"), ("gpt2", "nanogpt --peer-source=@nanogpt"))),
    ("text.py @tmp_path/out.tar.xz --packages no-such-package", 2, "^error: .*--packages")]


@pytest.mark.full
@pytest.mark.parametrize("command, code, said", PROGRAMS, ids=lambda value: str(value)[:30])
def test_a_program_starts(request, tmp_path, command, code, said):
    words = shlex.split(re.sub(r"@(\w+)", lambda name: str(request.getfixturevalue(name[1])), command))
    done = run(0, f"bench/{words[0]}", *words[1:], cwd=ROOT, PIP_NO_INDEX=1)
    if re.match("error: (No module named .* pip install|no lab here) ", done.out) and done.code == 1:
        pytest.skip(done.out)
    assert done.code == code and re.search(said, done.out, re.M), done.out
    assert (tmp_path / "a.png").exists() or "--picture" not in words
    if "--verbose" in words:  # all begin with the same weights
        found = json.loads((tmp_path / "json").read_text().splitlines()[-1])["contestants"]
        ours, theirs = (contestant["first_loss"] for contestant in found.values())
        assert abs(ours - theirs) < 1e-4, found


def test_no_program_is_forgotten():
    """Those that need more are in other tests of this folder."""
    text = "".join(path.read_text() for path in (ROOT / "tests" / "bench").glob("test_*.py"))
    for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*.sh")]:
        assert re.search(rf'["/]{path.name}[" ]', text), path


@pytest.mark.full
def test_text_of_packages(tmp_path):
    """Prose alone, each paragraph once."""
    documents = runpy.run_path(str(ROOT / "bench" / "text.py"))["documents"]
    prose = "This package reads the files of a run and tells what is in each of them, one by one. " * 6
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/README.md", f"{prose}\n\nx = 1; y = 2\n\n{prose}\n")
        wheel.writestr("a/code.py", f'"""{prose}"""\nx = 1\n')
    assert [*documents(tmp_path / "a.whl", set())] == [prose.strip()]
