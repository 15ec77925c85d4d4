"""The programs of bench/ start, each with the smallest arguments, or say in one sentence what they lack."""

import importlib.util
import json
import re
import shlex
import shutil
import zipfile

import pytest
from conftest import ROOT, run
from processes import fork
from runs import Trainer

import train_gpt2
import train_hrm
import train_mlm
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
LEFT_OUT = {".git", ".ab", "tests", "docs", "shards", "runs"}  # of another checkout
SMALLEST = ("--size tiny --batch 2 --seq-len 32 --n-layer 1 --vocab-size 512 --warmup 1 --steps 2 --pairs 1 "
            "--profile 1 --precision fp32 --device cpu --threads 1")
TINY = "--batch=1 --global-batch=1 --seq-len=32 --d-model=32 --n-head=2"


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
def pairs(tmp_path):
    """The questions of a run on pairs, whose export is in `run` beside them."""
    rows = [{"q": f"{n} and 1?", "a": f"it is {n + 1}"} for n in range(200)]
    questions = tmp_path / "qa.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = prepare(f"jsonl:{questions}", tmp_path / "shards", "bytes", prompt_field="q", response_field="a",
                     row=64, val_split="hash:0.1", workers=1)
    gpt2 = Trainer("train_gpt2.py", seq_len=64, steps=1, eval_every=1, max_new_tokens=1)
    for flags in {}, {"export": True}:
        done = gpt2.train(0, shards, tmp_path / "run", **flags)
        assert done.code == 0, done.out
    return questions


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAME = "same.py . . 'gpt2, 1 ranks, plain text, strategy=ddp: equal'"
# the command, its exit code, and what it prints; @ is before a fixture
PROGRAMS = [
    ("clients.py @tmp_path/run @pairs --rows=1 --steps=1 --others=2", 0, r"\A(?s:.*^\| .* \|$){21}"),
    ("cost.py mlm tiny", 0, r"^\| mlm `tiny` \| 3.3 M \| 400 \|  \|  \| < 0.1 \| < 0.1 \| < 0.1 \|$"),
    ("cost.py mlm tinny", 1, "^error: .*tinny.* tiny, 17m, base"),
    ("curves.py @small --device=cpu --tiny --seconds=0.01 --json @tmp_path/json", 0, ""),
    ("exports.py MLM", 0, "^ +MLM .* 4 of 4 "),
    ("kernels.py", 1, "^error: no GPU"),
    ("lab.py --nodes=2 --comm=fp32 --compute=0.001 --parameters=12k --steps=1", 0, r"^\| 1 \| fp32 \| \d+ "),
    ("late.py", 1, "^error: "),  # with what it needs it is in test_late.py
    ("learning.py --data @puzzles --settings puzzle --lr=1e-5,1e-2 --seeds=1 --steps=2 --equal=time --flags "
     "'--batch 2 --global-batch 2 --d-model 32 --n-head 2' --out @tmp_path/runs --picture @tmp_path/a.png "
     "--device=cpu", 0, r"^\| puzzle \| [\d,]+ \| [\d.]+ \| 2 \| 1e-2 \(best\) \| [1-9]"),  # CPU seconds
    ("nanogpt.py @nanogpt @text --iterations=1 --steps=1", 0,
     r"^\| nanoGPT, 1 iterations \| \d+ \| 3.500 \|\n\| train_gpt2.py, 1 steps \| \d+ \| [456].\d{3} \|$"),
    ("nanogpt.py @tmp_path @text", 1, "^error: .*git clone"),
    (SAME, 0, "^1 of 1 are"), (f"{SAME} --control", 1, "^0 of 1 are"),
    ("sampling.py 1 --models=HRM --tokenizer=bytes", 0, r"(?s)^  ours +[\d.]+ .*^  transformers +[\d.]+ "),
    ("scaling.py train_gpt2.py --processes=1,2 --steps=2 -- --data @shards --seq-len=32 --d-model=32 "
     "--n-layer=1 --batch=2 --global-batch=4 --precision=fp32", 0,
     r"^\| 1 \| 2 x 2 x 1 \| float32 \| [\d,]+ \| [\d,]+ \| 100% .*\n\| 2 \| 2 x 1 x 2 \| float32 \|"),
    (f"steps.py . . --trainer=gpt2 --ranks=1 --rounds=2 -- {TINY}", 0, r"^gpt2: .* ratio [\d.]+, 95 %"),
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
    if "--json" in words:
        found = json.loads((tmp_path / "json").read_text().splitlines()[-1])["found"]["ours"]
        assert len(found["curve"]) == 10 and len(found["rates"]) == 3


def test_no_program_is_forgotten():
    """Those that need more are in other tests of this folder."""
    text = "".join(path.read_text() for path in (ROOT / "tests" / "bench").glob("test_*.py"))
    for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*.sh")]:
        assert re.search(rf'["/]{path.name}[" ]', text), path


# -----------------------------------------------------------------------------------------------------------
# bench/train.py


def race(tmp_path, model: str, *flags) -> dict:
    """What each contestant of bench/train.py has found."""
    file = tmp_path / "found.jsonl"
    done = fork(0, "bench/train.py", model, *SMALLEST.split(), "--json", file, "--verbose", *flags)
    assert done.code == 0, done.out
    found = json.loads(file.read_text().splitlines()[-1])["contestants"]
    for name, r in found.items():
        assert len(re.findall(rf"^\| {re.escape(name)} \| ", done.out, re.M)) == 1, done.out
        assert r["steps"] == 5 and len(r["rounds"]) == 1 and r["loss"] < 7, r
    return found


@pytest.mark.full
@pytest.mark.parametrize("model, peer", [
    ("gpt2", "hf"), ("hrm", "hf"), ("mlm", "hf"), ("gpt2", "trainer"), ("gpt2", "nanogpt")])
def test_each_peer_trains_from_the_weights_that_ours_has(tmp_path, nanogpt, model, peer):
    for package in {"nanogpt": (), "trainer": ("transformers", "accelerate")}.get(peer, ("transformers",)):
        pytest.importorskip(package)
    found = race(tmp_path, model, "--peer", peer, *["--peer-source", nanogpt] * (peer == "nanogpt"))
    assert [*found] == ["ours", peer]
    if peer != "trainer":  # which leaves out the last token of a row
        assert abs(found["ours"]["first_loss"] - found[peer]["first_loss"]) < 1e-4, found


@pytest.mark.full
def test_an_older_checkout_trains_with_its_own_code(tmp_path):
    older = tmp_path / "older"
    shutil.copytree(ROOT, older, ignore=lambda *_: LEFT_OUT)
    script = older / "bench" / "train.py"
    text = script.read_text()
    assert text.count("= 5, 0.3, 1e-4, ") == 1  # the third is the learning rate
    script.write_text(text.replace("= 5, 0.3, 1e-4, ", "= 5, 0.3, 0.0, "))
    ours, theirs = race(tmp_path, "gpt2", f"--also=--code {older}").values()
    assert ours["first_loss"] == theirs["first_loss"] and ours["loss"] != theirs["loss"]


# -----------------------------------------------------------------------------------------------------------
# Other programs


@pytest.mark.full
@pytest.mark.parametrize("part, rows, refused", [
    ("copy", 1, 0), ("matmul", 56, 2), ("attention", 12, 8),
    pytest.param("loss", 2, 0, marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"))])
def test_kernels(part, rows, refused):
    """A CPU refuses addmm with out_dtype, and two of the three kernels of attention."""
    done = fork(0, "bench/kernels.py", part, "--device=cpu", "--rows=16384")
    lines = re.findall(r"^\{.*\}$", done.out, re.M)
    assert done.code == 0 and len(lines) == rows, done.out
    assert sum('"error": ' in line for line in lines) == refused, done.out


@pytest.mark.full
def test_probe_tells_digits_from_letters(tmp_path, shards):
    pytest.importorskip("transformers")
    mlm = Trainer("train_mlm.py", ff=48, window=16)
    assert mlm.train(0, shards, tmp_path / "run", steps=4).code == 0
    assert mlm.here("--out", tmp_path / "run", "--export").code == 0
    rows = [row for i in range(60) for row in (
        {"text": f"{17 * i} {i % 7} {i}", "label": "digits"},
        {"text": chr(97 + i % 26) * (i % 9 + 1) + chr(97 + i % 5), "label": "letters"})]
    labelled = tmp_path / "labelled.jsonl"
    for lines, code, said in ((rows, 0, r"(?s)^trained encoder: (9\d|100).*^random enc.*^bag of "),
                              (rows[::2], 1, "^error: .*labelled.jsonl .*two labels")):
        labelled.write_text("\n".join(map(json.dumps, lines)))
        done = fork(0, "bench/probe.py", tmp_path / "run" / "hf", labelled)
        assert done.code == code and re.search(said, done.out, re.M), done.out


def test_text_of_packages(tmp_path):
    """Prose alone, each paragraph once."""
    prose = "This package reads the files of a run and tells what is in each of them, one by one. " * 6
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/README.md", f"{prose}\n\nx = 1; y = 2\n\n{prose}\n")
        wheel.writestr("a/code.py", f'"""{prose}"""\nx = 1\n')
    assert [*module_of("text").documents(tmp_path / "a.whl", set())] == [prose.strip()]


# Rows of the table in docs/clusters.md: the size, and all other cells
COSTS = re.findall(r"^\| (?:GPT-2|HRM|MLM) `(?P<size>[\w-]+)` \| (.+) \|$",
                   (ROOT / "docs" / "clusters.md").read_text(), re.M)
TRAINER_OF = {size: name for name, trainer in (("gpt2", train_gpt2), ("hrm", train_hrm), ("mlm", train_mlm))
              for size in trainer.SIZES if size not in ("tiny", "puzzle")}


@pytest.mark.parametrize("size, cells", [
    pytest.param(*row, id=row[0], marks={"gpt2": (), "350m": pytest.mark.full}.get(row[0], pytest.mark.long))
    for row in COSTS])
def test_the_table_of_costs_is_what_cost_says(size, cells):
    """A size that was not timed has nothing in the measured columns. Each has a row."""
    assert {size for size, _ in COSTS} == TRAINER_OF.keys()
    cost, trainer = module_of("cost"), TRAINER_OF[size]
    row = cost.sizes_of(trainer)[size]
    timed, speed, gb = cost.MEASURED[trainer]
    measured = [f"{speed:,}", gb] if size == timed else ["", ""]
    hours = [cost.rounded(cost.hours(trainer, size, gpus)) for gpus in (1, 8)]
    found = cells.split(" | ")
    assert found[:4] + found[5:] == [cost.tokens_of(row), f"{row['steps']:,}", *measured, *hours]
