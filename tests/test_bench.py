"""The programs of bench/ start, each with the smallest arguments, or say in one sentence what they lack."""

import importlib.util
import json
import re
import shutil
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finish, run, start
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
LEFT_OUT = {".git", ".ab", "tests", "docs", "shards", "runs"}  # of another checkout
SMALLEST = ["--size", "tiny", "--batch", "2", "--seq-len", "32", "--n-layer", "1", "--vocab-size", "512",
            "--warmup", "1", "--steps", "2", "--pairs", "1", "--profile", "1", "--precision", "fp32",
            "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nanogpt")
    for name, text in CLONE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def race(tmp_path, model: str, *flags, **env) -> tuple[dict, str]:
    """What each contestant of bench/train.py has found, and what was printed."""
    json_file = tmp_path / "found.jsonl"
    done = run(0, "bench/train.py", model, *SMALLEST, "--json", json_file, "--verbose", *flags, **env)
    assert done.code == 0, done.out
    found = json.loads(json_file.read_text().splitlines()[-1])["contestants"]
    for name, r in found.items():
        assert len(re.findall(rf"^\| {re.escape(name)} \| ", done.out, re.M)) == 1, done.out
        assert r["steps"] == 5 and len(r["rounds"]) == 1 and r["loss"] < 7, r
    return found, done.out


@pytest.mark.full
@pytest.mark.parametrize("model, peer", [
    ("gpt2", "hf"), ("hrm", "hf"), ("mlm", "hf"), ("gpt2", "trainer"), ("gpt2", "nanogpt")])
def test_each_peer_trains_from_the_weights_that_ours_has(tmp_path, nanogpt, model, peer):
    if peer != "nanogpt":
        pytest.importorskip("transformers")
    if peer == "trainer":
        pytest.importorskip("accelerate", reason="pip install accelerate")
    source = ["--peer-source", nanogpt] if peer == "nanogpt" else []
    found, _ = race(tmp_path, model, "--peer", peer, *source)
    assert [*found] == ["ours", peer]
    if peer != "trainer":  # which leaves out the last token of a row
        assert abs(found["ours"]["first_loss"] - found[peer]["first_loss"]) < 1e-4, found


@pytest.mark.full
def test_an_older_checkout_trains_with_its_own_code(tmp_path):
    older = tmp_path / "older"
    script = older / "bench" / "train.py"
    shutil.copytree(ROOT, older, ignore=lambda *_: LEFT_OUT)
    text = script.read_text()
    assert text.count("= 5, 0.3, 1e-4, ") == 1  # the third is the learning rate
    script.write_text(text.replace("= 5, 0.3, 1e-4, ", "= 5, 0.3, 0.0, "))
    found, _ = race(tmp_path, "gpt2", f"--also=--code {older}")
    ours, theirs = found["ours"], found[f"ours --code {older}"]
    assert ours["first_loss"] == theirs["first_loss"] and ours["loss"] != theirs["loss"]


NO_READINGS = {"sm_mhz": None, "watts": None, "watts_limit": None}


def readings(device: str = "cuda") -> dict:
    with module_of("train").gpu_readings(SimpleNamespace(device=device)) as found:
        time.sleep(0.3)
    return found


@pytest.fixture
def nvml(monkeypatch):
    """A GPU that tells its power as a mean only."""
    clocks = iter([300, 300, *[1700] * 10_000])
    stub = SimpleNamespace(
        NVML_SUCCESS=0, NVML_CLOCK_SM=1, NVML_FI_DEV_POWER_INSTANT=186,
        nvmlDeviceGetClockInfo=lambda gpu, clock: next(clocks) if (gpu, clock) == ("first", 1) else 0,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000, nvmlDeviceGetPowerUsage=lambda gpu: 400_000,
        nvmlDeviceGetFieldValues=lambda gpu, fields: [SimpleNamespace(nvmlReturn=3)])
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", {0: "first"}.get)
    return stub


def test_clock_and_power_are_medians_of_the_time_in_between(nvml):
    assert readings() == {"sm_mhz": 1700, "watts": 400, "watts_limit": 700}
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=690_000))
    nvml.nvmlDeviceGetFieldValues = lambda gpu, fields: [field] if fields == [186] else []
    assert readings()["watts"] == 690


def test_what_a_gpu_does_not_tell_ends_no_measurement(nvml, monkeypatch):
    assert readings("cpu") == NO_READINGS
    del nvml.nvmlDeviceGetEnforcedPowerLimit
    assert readings() == {"sm_mhz": 1700, "watts": 400, "watts_limit": None}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert readings() == NO_READINGS


def test_a_profile_has_the_calls_that_launch(monkeypatch):
    """Of CUDA's runtime and of its driver. They are no kernels. Copies may wait for the GPU: not counted."""
    def event(key, kind, count, us):
        return SimpleNamespace(key=key, count=count, device_type=SimpleNamespace(name=kind),
                               is_user_annotation=False, self_cpu_time_total=us * (kind == "CPU"),
                               self_device_time_total=us * (kind == "CUDA"))

    events = [event("cudaLaunchKernel", "CPU", 40, 8e5), event("cuLaunchKernelEx", "CPU", 20, 2e5),
              event("cudaMemcpyAsync", "CPU", 2, 1e6), event("pytorch_flash::flash_fwd", "CUDA", 60, 3e6)]

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return SimpleNamespace(key_averages=lambda: events)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    found = module_of("train").profile(lambda i: torch.tensor(0.5), range(2), torch.device("cuda"))
    assert (found["launches"], found["launching"], found["attention"]) == (30, 0.5, "flash")
    assert [kernel["calls"] for kernel in found["kernels"]] == [30] and len(waits) == 2


# -----------------------------------------------------------------------------------------------------------
# The other programs


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("puzzles")
    return prepare("task:addition", folder / "task-addition-bytes", max_samples=200, workers=1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The export of a run on pairs, and their questions."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"q": f"{n} and 1?", "a": f"it is {n + 1}"} for n in range(200)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = prepare(f"jsonl:{folder}/qa.jsonl", folder / "shards", "bytes", prompt_field="q",
                     response_field="a", row=64, val_split="hash:0.1", workers=1)
    gpt2 = Trainer("train_gpt2.py", seq_len=64, steps=1, eval_every=1, max_new_tokens=1)
    for flags in {}, {"export": True}:
        done = gpt2.train(0, shards, folder / "run", **flags)
        assert done.code == 0, done.out
    return folder / "run", folder / "qa.jsonl"


def missing(*packages: str) -> str | None:
    """The sentence of a program that needs these packages, if one is not installed."""
    for name in packages:
        if not importlib.util.find_spec(name):
            return f"error: No module named '{name}'.*: pip install "
    return None


@pytest.mark.full
def test_clients(pairs):
    sentence = missing("accelerate", "datasets", "transformers", "trl")
    done = run(0, "bench/clients.py", *pairs, "--rows=1", "--steps=1", "--others=2")
    if sentence:
        assert done.code == 1 and re.match(sentence, done.out), done.out
    else:
        rows = re.findall(r"^\| .* \|$", done.out, re.M)
        assert done.code == 0 and len(rows) == 21 and "of 1 |" in rows[0], done.out


@pytest.mark.full
def test_exports():
    sentence = missing("gguf", "peft", "transformers", "xllamacpp")
    done = run(0, "bench/exports.py", "MLM")
    if sentence:
        assert done.code == 1 and re.match(sentence, done.out), done.out
    else:
        assert done.code == 0 and re.search("^ +MLM .* 4 of 4 ", done.out, re.M), done.out


@pytest.mark.full
def test_learning(tmp_path, puzzles):
    picture, flags = tmp_path / "curves.png", "--batch 2 --global-batch 2 --d-model 32 --n-head 2"
    done = run(0, "bench/learning.py", "--data", puzzles, "--settings", "puzzle", "--lr=1e-5,1e-2",
               "--seeds=1", "--steps=2", "--equal=time", "--flags", flags, "--out", tmp_path / "runs",
               "--picture", picture, "--device=cpu", cwd=tmp_path)
    row = r"^\| puzzle \| [\d,]+ \| [\d.]+ \| 2 \| 1e-2 \(best\) \| [1-9]\d* \| "  # and its CPU seconds
    assert done.code == 0 and re.search(row, done.out, re.M), done.out
    assert picture.exists()


@pytest.mark.full
def test_gpu_sh_without_time(tmp_path):
    """It measures nothing, says so, and makes its tables; what it calls is started by other tests."""
    done = finish(start(["bash", ROOT / "bench" / "gpu.sh", "B", tmp_path], TRY=1, BUDGET=1,
                        PYTHON=sys.executable))
    assert done.code == 0 and "* no time for: " in done.out, done.out
    assert (tmp_path / "partB.md").read_text().startswith("# bench/gpu.sh B, "), done.out


@pytest.mark.full
@pytest.mark.parametrize("part, rows, refused", [
    ("copy", 1, 0), ("matmul", 56, 2), ("attention", 12, 8),
    pytest.param("loss", 2, 0, marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"))])
def test_kernels(part, rows, refused):
    """A CPU refuses addmm with out_dtype, and two of the three kernels of attention."""
    done = run(0, "bench/kernels.py", part, "--device=cpu", "--rows=16384")
    lines = re.findall(r"^\{.*\}$", done.out, re.M)
    assert done.code == 0 and len(lines) == rows, done.out
    assert sum('"error": ' in line for line in lines) == refused, done.out


@pytest.mark.full
def test_kernels_without_a_gpu():
    done = run(0, "bench/kernels.py", CUDA_VISIBLE_DEVICES="")
    assert done.code == 1 and done.out.startswith("error: no GPU here"), done.out


@pytest.mark.full
def test_lab():
    done = run(0, "bench/lab.py", "--nodes=2", "--comm=fp32", "--compute=0.001", "--parameters=12k",
               "--steps=1")
    if done.code:
        assert done.code == 1 and re.match("error: no lab here: .*\n$", done.out), done.out
    else:
        assert re.search(r"^\| 1 \| fp32 \| \d+ \| \d+ \|", done.out, re.M), done.out


@pytest.mark.full
def test_late_says_what_it_needs():
    """What it computes is in test_late.py."""
    done = run(0, "bench/late.py")
    assert done.code == 1 and done.out.startswith("error: give the number of processes"), done.out


@pytest.mark.full
def test_nanogpt(nanogpt, corpus, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text()[:20_000])
    done = run(0, "bench/nanogpt.py", nanogpt, text, "--iterations=1", "--steps=1")
    theirs, ours = re.findall(r"^\| (.*) \| \d+ \| (\d\.\d{3}) \|$", done.out, re.M)
    assert done.code == 0 and theirs == ("nanoGPT, 1 iterations", "3.500"), done.out
    assert ours[0] == "train_gpt2.py, 1 steps" and 4 < float(ours[1]) < 7, done.out
    done = run(0, "bench/nanogpt.py", tmp_path, text)
    assert done.code == 1 and done.out.startswith("error: ") and "git clone" in done.out, done.out


@pytest.mark.full
def test_probe(tmp_path, shards):
    """Texts of digits and of letters are easy to tell apart."""
    pytest.importorskip("transformers")
    mlm = Trainer("train_mlm.py", ff=48, window=16)
    assert mlm.train(0, shards, tmp_path / "run", steps=4).code == 0
    assert mlm.here("--out", tmp_path / "run", "--export").code == 0
    rows = [{"text": f"{17 * i} {i % 7} {i}", "label": "digits"} for i in range(60)]
    rows += [{"text": chr(97 + i % 26) * (i % 9 + 1) + chr(97 + i % 5), "label": "letters"}
             for i in range(60)]
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text("\n".join(map(json.dumps, rows)))
    done = run(0, "bench/probe.py", tmp_path / "run" / "hf", labelled)
    accuracies = dict(re.findall(r"(trained encoder|random encoder|bag of trained embeddings): ([\d.]+)%",
                                 done.out))
    assert done.code == 0 and len(accuracies) == 3 and float(accuracies["trained encoder"]) > 90, done.out
    for content, sentence in (('["text", 1]', "no lines of JSON with text and label"),
                              ("{", "no lines of JSON"),
                              ('{"text": "a", "label": "b"}\n' * 30, "two labels or more")):
        labelled.write_text(content)
        done = run(0, "bench/probe.py", tmp_path / "run" / "hf", labelled)
        assert done.code == 1 and done.out.startswith("error: ") and sentence in done.out, done.out


def test_lines_that_a_probe_reads(tmp_path):
    """A byte order mark, blank lines and U+2028 are no mistakes; a label that is missing is no class."""
    read_labelled = module_of("probe").read_labelled
    path = tmp_path / "labelled.jsonl"
    rows = ['{"text": "a\u2028b", "label": 1}', "", '{"text": "c", "label": true}',
            '{"text": "d", "label": "x"}']
    path.write_text("\ufeff" + "\r\n".join(rows) + "\n \n")
    assert read_labelled(path) == (["a\u2028b", "c", "d"], ["1", "True", "x"])
    for label in "null", "NaN", '{"a": 1}', "[]":
        path.write_text('{"text": "a", "label": ' + label + "}")
        with pytest.raises(SystemExit, match="no lines of JSON with text and label .*label that is no str"):
            read_labelled(path)


@pytest.mark.full
def test_same():
    """One case, of these sources and themselves, which are equal; with other labels they are not."""
    case = ROOT, ROOT, "gpt2, 1 ranks, plain text, strategy=ddp: equal"
    done = run(0, "bench/same.py", *case)
    assert done.code == 0 and done.out.endswith("1 of 1 are the same\n"), done.out
    done = run(0, "bench/same.py", "--control", *case)
    assert done.code == 1 and done.out.endswith("0 of 1 are the same\n"), done.out


@pytest.mark.full
def test_sampling():
    pytest.importorskip("transformers")
    done = run(0, "bench/sampling.py", "1", "--models=HRM", "--tokenizer=bytes")
    rows = re.findall(r"^  (\w+) +[\d.]+ tokens/s, eight texts", done.out, re.M)
    assert done.code == 0 and rows == ["ours", "transformers"], done.out


@pytest.mark.full
def test_steps():
    done = run(0, "bench/steps.py", ROOT, ROOT, "--trainer=gpt2", "--ranks=1", "--rounds=2",
               "--", "--batch=1", "--global-batch=1", "--seq-len=32", "--d-model=32", "--n-head=2")
    assert done.code == 0 and re.search(r"^gpt2: .* ratio [\d.]+, 95 % interval", done.out, re.M), done.out


# Rows of the table in docs/clusters.md: the size, and all other cells
COSTS = re.findall(r"^\| (?:GPT-2|HRM|MLM) `(?P<size>[\w-]+)` \| (.+) \|$",
                   (ROOT / "docs" / "clusters.md").read_text(), re.M)
TRAINER_OF = {size: name for name in ("gpt2", "hrm", "mlm")
              for size in importlib.import_module(f"train_{name}").SIZES if size not in ("tiny", "puzzle")}


@pytest.mark.parametrize("size, cells", [
    pytest.param(*row, id=row[0], marks=[pytest.mark.full] * (row[0] != "gpt2")) for row in COSTS])
def test_the_table_of_costs_is_what_cost_says(size, cells):
    """A size that was not timed has nothing in the measured columns."""
    cost = module_of("cost")
    trainer = TRAINER_OF[size]
    tokens, steps, speed, gb, _, one, eight = cells.split(" | ")
    row = cost.sizes_of(trainer)[size]
    assert (tokens, steps) == (cost.tokens_of(row), f"{row['steps']:,}")
    timed, *measured = cost.MEASURED[trainer]
    assert [speed, gb] == ([f"{measured[0]:,}", measured[1]] if size == timed else ["", ""])
    assert [one, eight] == [cost.rounded(cost.hours(trainer, size, gpus)) for gpus in (1, 8)]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size, cells", [pytest.param(*row, id=row[0]) for row in COSTS])
def test_the_memory_in_the_table_of_costs_is_what_cost_says(size, cells):
    cost = module_of("cost")
    assert cells.split(" | ")[4] == cost.rounded(cost.memory(TRAINER_OF[size], size))


def test_the_table_of_costs_has_each_size():
    assert {size for size, _ in COSTS} == TRAINER_OF.keys()


@pytest.mark.full
def test_the_hours_of_presets_are_what_cost_says():
    import train_mlm
    cost = module_of("cost")
    for gpus, hours, _, size, _ in train_mlm.PRESETS.values():
        predicted = cost.hours("mlm", size, gpus)
        assert predicted < 1 if hours == "<1" else hours == cost.rounded(predicted), (size, hours)


@pytest.mark.full
def test_cost():
    done = run(0, "bench/cost.py", "mlm", "tiny")
    row = "| mlm `tiny` | 3.3 M | 400 |  |  | < 0.1 | < 0.1 | < 0.1 |"
    assert done.code == 0 and row in done.out, done.out
    done = run(0, "bench/cost.py", "mlm", "tinny")
    assert done.code == 1 and "tinny" in done.out and "tiny, 17m, base" in done.out, done.out


@pytest.mark.full
def test_scaling(shards):
    done = run(0, "bench/scaling.py", "train_gpt2.py", "--processes=1,2", "--steps=2", "--", "--data", shards,
               "--seq-len=32", "--d-model=32", "--n-layer=1", "--batch=2", "--global-batch=4",
               "--precision=fp32")
    rows = re.findall(r"^\| (\d) \| 2 x (\d) x (\d) \| float32 \| [\d,]+ \| [\d,]+ \| (\d+)% \|", done.out,
                      re.M)
    assert done.code == 0 and [row[:3] for row in rows] == [("1", "2", "1"), ("2", "1", "2")], done.out
    assert rows[0][3] == "100" and f"torch {torch.__version__}" in done.out, done.out


@pytest.mark.full
def test_curves(tmp_path, corpus):
    """A row for each of ten evaluations, and the rates of a small model; nanoGPT's recipe needs its code."""
    data, numbers = tmp_path / "data", tmp_path / "curves.jsonl"
    prepare(f"text:{corpus}", data, "bytes", max_tokens=20_000, workers=1)
    done = run(0, "bench/curves.py", data, "--device=cpu", "--tiny", "--seconds=0.01", "--json", numbers)
    assert done.code == 0, done.out
    *_, last = map(json.loads, numbers.read_text().splitlines())
    assert last["kind"] == "curves" and len(last["found"]["ours"]["curve"]) == 10
    assert len(last["found"]["ours"]["rates"]) == 3


def test_text_of_packages(tmp_path):
    """Prose alone, each paragraph once; without a network one sentence."""
    spec = importlib.util.spec_from_file_location("text_of_packages", ROOT / "bench" / "text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prose = "This package reads the files of a run and tells what is in each of them, one by one. " * 6
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/README.md", f"{prose}\n\nx = 1; y = 2\n\n{prose}\n")
        wheel.writestr("a/code.py", f'"""{prose}"""\nx = 1\n')
    assert [*module.documents(tmp_path / "a.whl", set())] == [prose.strip()]
    done = finish(start([sys.executable, ROOT / "bench" / "text.py", tmp_path / "out.tar.xz", "--packages",
                         "no-such-package"], PIP_NO_INDEX=1))
    assert done.code == 2 and "error: pip could not download these packages" in done.out, done.out


def test_no_program_is_forgotten():
    """train.py is started by race, late.py with what it needs by test_late.py."""
    text = (ROOT / "tests" / "test_bench.py").read_text()
    for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*.sh")]:
        assert f'"bench/{path.name}"' in text or f'"bench" / "{path.name}"' in text, path
