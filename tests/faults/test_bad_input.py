"""Bad input, to every script: one sentence that says how to go on, exit code 2, no traceback, nothing
overwritten.

A case is a line of MISTAKES: the command, and the nouns, joined by &, that its message has to name. They are
what the user got wrong and has to find there, such as a flag, a file, a value or a choice, and so many that a
message about something else lacks one. How the sentence goes is left to the program. A case runs in a
directory with one example of everything that can be wrong; `new` is where a run or shards may be written.
"""

import contextlib
import gzip
import importlib
import io
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import Finished, run
from processes import Group
from runs import Trainer
from test_data import flip, tree

from cli.errors import UserError
from prepare import packing
from prepare.pipeline import prepare

TRAINERS = {"train_hrm.py": Trainer("train_hrm.py", ff=64), "train_gpt2.py": Trainer("train_gpt2.py"),
            "train_mlm.py": Trainer("train_mlm.py", ff=48, window=16)}
# What a command says before what its line says, which overrides it.
USUAL = {"prepare": "--dataset text:good.txt --out new --tokenizer bytes --workers 1"} | {
    script: " ".join(trainer.flags("ready", "new", steps=8)) for script, trainer in TRAINERS.items()}
NEW = ("new/", "shards/", "cache/")  # where something may be written
MISTAKES = {
    "data.py": "arguments & command",
    "data.py nonsense": "nonsense & peek",
    "data.py verify": "arguments & directory",
    "data.py peek ready --rows many": "--rows & many & int",
    "data.py peek ready --split test": "--split & test & train",
    "data.py prepare --shard-tokens 5e6": "--shard-tokens & 5e6 & 500k",
    "data.py prepare --val-split half": "--val-split & half & hash:F",
    "data.py prepare --max-token 5": "--max-token",
    "data.py prepare --dataset nonsense": "nonsense & data set & text:GLOB",
    "data.py prepare --dataset hf:": "hf: & data set & hf:REPO[:CONFIG]",
    "data.py prepare --dataset task:nonsense --max-samples 9": "task:nonsense & data set & task:addition",
    "data.py prepare --dataset task:addition": "task:addition & --max-samples & --max-tokens",
    "data.py prepare --dataset task:addition --max-samples 9 --row 20": "task:addition & text & --row",
    "data.py prepare --dataset text:none/*.txt": "file & 'none/*.txt'",
    "data.py prepare --dataset text:empty.txt": "text:empty.txt & text & --min-words",
    "data.py prepare --dataset text:spaces.txt": "text:spaces.txt & text & --min-words",
    "data.py prepare --dataset text:zeros.txt": "zeros.txt & zero bytes",
    "data.py prepare --dataset text:random.txt": "random.txt & UTF-8",
    "data.py prepare --dataset text:latin.txt": "latin.txt & UTF-8",
    "data.py prepare --dataset jsonl:bad.jsonl": "bad.jsonl, line 2 & JSON",
    "data.py prepare --dataset jsonl:list.jsonl": "list.jsonl, item 1 & JSON",
    "data.py prepare --dataset jsonl:cut.json": "cut.json, item 2 & JSON",
    "data.py prepare --dataset csv:ragged.csv": "ragged.csv, line 3 & fields & tsv:",
    "data.py prepare --dataset csv:cut.csv.gz": "cut.csv.gz & Compressed file",
    "data.py prepare --dataset tsv:latin.txt": "latin.txt & line 1 & UTF-8",
    "data.py prepare --dataset csv:good.csv --text-field meta.x": "good.csv, line 2 & 'meta.x' & text, n",
    "data.py prepare --dataset jsonl:bots.jsonl --prompt-field said --response-field said":
        "bots.jsonl, line 1 & bot & assistant",
    "data.py prepare --dataset jsonl:bots.jsonl --text-field said":
        "bots.jsonl, line 1 & list & --prompt-field",
    "data.py prepare --dataset jsonl:number.jsonl": "number.jsonl, line 1 & JSON",
    "data.py prepare --dataset jsonl:random.txt": "random.txt & line 1 & UTF-8",
    "data.py prepare --dataset jsonl:nofield.jsonl": "nofield.jsonl, line 1 & 'text' & body, title",
    "data.py prepare --dataset jsonl:cut.jsonl.gz": "cut.jsonl.gz & Compressed file",
    "data.py prepare --dataset parquet:fake.parquet": "fake.parquet & parquet file",
    "data.py prepare --dataset parquet:nofield.parquet": "nofield.parquet & 'text' & body",
    "data.py prepare --dataset parquet:damaged.parquet": "damaged.parquet & snappy",
    "data.py prepare --dataset imdb": "stanfordnlp/imdb & network",
    "data.py prepare --dataset hf:nobody/nothing": "nobody/nothing & network",
    "data.py prepare --tokenizer cl100k_base": "cl100k_base & TIKTOKEN_CACHE_DIR",
    "data.py prepare --tokenizer gpt3": "gpt3 & tokenizer & bpe:N",
    "data.py prepare --tokenizer bpe:100": "bpe:100 & bpe:300",
    "data.py prepare --tokenizer model": "model/tokenizer.json & Hugging Face",
    "data.py prepare --tokenizer list": "list/tokenizer.json & Hugging Face",
    "data.py prepare --max-samples 0 --val-split hash:0.01": "--max-samples & 1",
    "data.py prepare --shard-tokens 0": "--shard-tokens & 1B",
    "data.py prepare --workers 0": "--workers & 1",
    "data.py prepare --max-samples 5": "--max-samples & tail:F & --max-tokens",
    "data.py prepare --dataset jsonl:bad.jsonl --val-split tail:0.1": "--val-split & tail:F & text: & hash:F",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q": "--prompt-field & --response-field",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field answer":
        "pairs.jsonl, line 1 & 'answer' & q, a, kind & --prompt-field & --response-field",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field a --condition-field kind":
        "pairs.jsonl, document 1 & tokenizer & <|deep|> & [MASK]",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field a --row 3": "--row & 4",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field a --row 4":
        "jsonl:pairs.jsonl & text & --row",
    "data.py prepare --prompt-field q --response-field a": "text:good.txt & jsonl: & parquet: & hf:",
    "data.py prepare --row 64": "--row & --long & --prompt-field & --response-field",
    "data.py prepare --long cut": "--long & cut & drop",
    "data.py prepare --out ready --tokenizer bpe:300": "ready & tokenizer & bytes & bpe:300 & --out",
    "data.py prepare --dataset text:changed.txt --out ready": "ready & source & 1000 & 1004 & --out",
    "data.py prepare --out ready --shard-tokens 9": "ready & shard_tokens & 9",
    "data.py prepare --out damaged": "damaged/manifest.json",
    "data.py prepare --out strangers": "strangers & notes.txt & manifest & --out",
    "data.py prepare --out nomanifest": "nomanifest & train_000000.bin & manifest & --out",
    "data.py prepare --out good.txt": "good.txt & File exists & --out",
    "data.py prepare --out good.txt/below": "good.txt/below & Not a directory & --out",
    "data.py verify truncated": "truncated/train_000000.bin & 2824 & 2826",
    "data.py info truncated": "truncated/train_000000.bin & 2824 & 2826",
    "data.py peek truncated": "truncated/train_000000.bin & 2824 & 2826",
    "data.py verify header": "header/train_000000.bin & shard",
    "data.py info header": "header/train_000000.bin & shard",
    "data.py verify first": "first/train_000000.bin",
    "data.py verify last": "last/train_000000.bin",
    "data.py verify missing": "missing/tokenizer.json",
    "data.py verify changed": "changed/tokenizer.json",
    "data.py verify noshard": "noshard/train_000000.bin & No such file",
    "data.py verify nomanifest": "nomanifest & manifest.json",
    "data.py info damaged": "damaged/manifest.json",
    "data.py info elsewhere": "elsewhere/manifest.json & ../train_000000.bin",
    "data.py info pattern": "pattern/manifest.json & ../x_000000.bin",
    "data.py info unfinished": "unfinished & prepare",
    "data.py info changed": "changed/tokenizer.json",
    "data.py info ready --tokenizer bpe:300": "ready & tokenizer & bytes & bpe:300 & --tokenizer",
    "data.py info nomanifest": "nomanifest & manifest & tokenizer & --tokenizer",
    "data.py info nowhere": "nowhere & text:GLOB",
    "data.py info bare": "bare & text:GLOB",
    "data.py info good.txt": "good.txt & text:GLOB",
    "data.py info short --tokenizer bytes": "short/train_000000.bin",
    "data.py info other --tokenizer bytes": "other/train_000000.bin & shard",
    "data.py peek ready --seq-len 100000000": "ready & 100000000 & --seq-len",
    "data.py peek ready --rows 0": "--rows & 1",
    "data.py peek ready --seq-len 0": "--seq-len & 1",

    # the same for all trainers
    "train_hrm.py --data nowhere/at/all": "nowhere/at/all & text:GLOB",
    "train_hrm.py --data text:nowhere/*.txt": "file & 'nowhere/*.txt'",
    "train_hrm.py --data text:ready/train_000000.bin --tokenizer bytes": "ready/train_000000.bin & UTF-8",
    "train_hrm.py --data nonsense --tokenizer bytes": "nonsense & data set & text:GLOB",
    "train_hrm.py --data good.txt --tokenizer bytes": "good.txt is a file & 'text:good.txt'",
    "train_hrm.py --data truncated": "truncated/train_000000.bin & 2824 & 2826",
    "train_hrm.py --data header": "header/train_000000.bin & shard",
    "train_hrm.py --data unfinished": "unfinished & prepare",
    "train_hrm.py --data damaged": "damaged/manifest.json",
    "train_hrm.py --data exchanged": "exchanged/train_000000.bin & 101 & 901",
    "train_hrm.py --data nomanifest": "nomanifest & manifest & tokenizer & --tokenizer",
    "train_hrm.py --data changed": "changed/tokenizer.json",
    "train_hrm.py --tokenizer cl100k_base": "cl100k_base & TIKTOKEN_CACHE_DIR",
    "train_hrm.py --seq-len 1000000": "ready & 1000000 & --seq-len",
    "train_hrm.py --data pairs --seq-len 64": "pairs & --seq-len 32 & --row 64",
    "train_hrm.py --attention prefix": "--attention prefix & --loss response & --prompt-field",
    "train_hrm.py --data pairs --loss all": "--attention prefix & --loss response & --prompt-field",
    "train_hrm.py --loss response": "--loss response & pairs & --prompt-field & --response-field",
    "train_gpt2.py --data pairs --condition <|deep|>": "tokenizer & <|deep|> & [MASK]",
    "train_gpt2.py --data pairs --sample-prompt " + "long" * 9: "--sample-prompt & 38 & 32",
    "train_mlm.py --attention prefix": "--attention",
    "train_gpt2.py --attention all": "--attention & 'all' & isolated",
    "train_hrm.py --data pairs --out run-hrm": "run-hrm & tokenizer & bytes & --out",
    "train_hrm.py --data ready,other-text": "ready & other-text & tokenizers",
    "train_hrm.py --data ready,pairs --seq-len 32": "ready & pairs & tokenizers",
    "train_hrm.py --data ready,nowhere/at/all": "nowhere/at/all & text:GLOB",
    "data.py prepare --val-field kind": "text:good.txt & --val-field & kind",
    "data.py prepare --dataset jsonl:pairs.jsonl --text-field a --val-field nothing":
        "pairs.jsonl, line 1 & nothing & --val-field",
    "data.py prepare --dataset jsonl:pairs.jsonl --text-field q --val-field q --val-split hash:0.5":
        "--val-field & q & 16",
    "train_gpt2.py --out run-pairs --data pairs --prompt " + "long" * 9: "prompt & 38 & 32",
    "train_gpt2.py --out run-pairs --data pairs --prompt x --condition <|deep|>":
        "tokenizer & <|deep|> & [MASK]",
    "train_hrm.py --max-tokens 500": "ready & leave it out & None & 500",
    "train_hrm.py --max-samples 5": "ready & leave it out & None & 5",
    "train_hrm.py --max-tokens many": "--max-tokens & many & 500k",
    "train_hrm.py --max-samples 5 --data text:good.txt --tokenizer bytes":
        "--max-samples & tail:F & --max-tokens",
    "train_hrm.py --out ready/manifest.json": "ready/manifest.json & Not a directory & --out",
    "train_hrm.py --out ready/manifest.json/run": "ready/manifest.json/run & Not a directory & --out",
    "train_hrm.py --out run-hrm --d-model 64": "run-hrm & d_model & 32 & 64",
    "train_hrm.py --out run-hrm --seq-len 64": "run-hrm & seq_len & 32 & 64",
    "train_hrm.py --out run-hrm --seed 7": "run-hrm & seed & 0 & 7",
    "train_hrm.py --out run-hrm --data other-text": "run-hrm & tokenizer & bytes & bpe:300 & --out",
    "train_hrm.py --out run-hrm --resume none": "run-hrm & checkpoints & --out",
    "train_hrm.py --out run-hrm --resume run-gpt2": "run-gpt2 & family & GPT2 & HRM & its own trainer",
    "train_hrm.py --resume ready": "ready & checkpoint & hf:ready",
    "train_hrm.py --resume nowhere.pt": "nowhere.pt & hf:nowhere.pt",
    "train_hrm.py --resume good.txt": "good.txt & checkpoint & --out",
    "train_hrm.py --resume malicious.pt": "malicious.pt & checkpoint & --out",
    "train_hrm.py --out run-broken": "run-broken & checkpoint & --out",
    "train_hrm.py --size tiny --init-from nowhere": "nowhere & hf:nowhere",
    "train_gpt2.py --modern --export --out run-gpt2": "run-gpt2 & modern False & not True",
    "train_hrm.py --data text:ready": "file & 'ready' & 'text:ready/*'",
    "train_hrm.py --init-from nowhere": "nowhere & does not exist & hf:nowhere",
    "train_hrm.py --size tiny --init-from hf:/nowhere": "hf:/nowhere & directory & repository",
    "train_hrm.py --size tiny --init-from run-gpt2": "run-gpt2 & family & GPT2 & HRM & trainer",
    "train_hrm.py --learning-rate 1": "--learning-rate",
    "train_hrm.py --step 5": "--step",
    "train_hrm.py --size huge": "--size & huge & tiny",
    "train_hrm.py --lr fast": "--lr & fast & number",
    "train_hrm.py --lr inf": "--lr & inf & 0",
    "train_hrm.py --lr nan": "--lr & nan & 0",
    "train_hrm.py --lr -1": "--lr & -1 & 0",
    "train_hrm.py --steps 0": "--steps & 0 & 1",
    "train_hrm.py --steps 2.5": "--steps & 2.5 & number",
    "train_hrm.py --seed -1": "--seed & -1 & 0",
    "train_hrm.py --ema 1": "--ema & 1 & 0",
    "train_hrm.py --epochs 1": "--epochs & --steps",
    "train_hrm.py --keep-last 0": "--keep-last & 0 & 1",
    "train_hrm.py --save-every 0": "--save-every & 0 & 1",
    "train_hrm.py --global-batch 12 --batch 5": "--batch 5 & 12 & --grad-accum",
    "train_hrm.py --grad-accum 100": "--grad-accum 100 & 12 & --batch",
    "train_hrm.py --batch 2 --grad-accum 5": "--grad-accum 5 & 12 & --batch 2",
    "train_hrm.py --optimizer sgd": "--optimizer & sgd & adamw",
    "train_hrm.py --precision int8": "--precision & int8 & bf16",
    "train_hrm.py --backend nccl --device cpu": "--backend nccl & GPUs",
    "train_hrm.py --strategy zero9": "--strategy & zero9 & zero2",
    "train_hrm.py --strategy zero3 --optimizer muon": "--optimizer muon & matrices & zero1",
    "train_hrm.py --strategy zero1 --comm bf16": "--comm & --strategy ddp",
    "train_hrm.py --strategy zero2 --precision fp32 --comm bf16": "--comm & --precision bf16",
    "train_hrm.py --prompt x --out nowhere/run": "nowhere/run & hf:nowhere/run",
    "train_hrm.py --prompt x --out new": "new & hf:new",
    "train_hrm.py --prompt x --out run-gpt2": "run-gpt2 & family & GPT2 & HRM & trainer",
    "train_hrm.py --prompt x --out ready": "ready & checkpoint & hf:ready",
    "train_hrm.py --prompt x --out run-hrm --temperature -1": "--temperature & -1 & 0",
    # HRM
    "train_hrm.py --n-head 3": "--n-head 3 & --d-model 32",
    "train_hrm.py --bp-steps 40": "--bp-steps 40 & 2 cycles & 4 stack calls",
    "train_hrm.py --bp-cycles 3": "--bp-cycles 3 & 2 cycles",
    "train_hrm.py --bp-steps 5:2": "--bp-steps & 5:2 & 2:5",
    "train_hrm.py --halt --h-cycles 1:3": "--h-cycles & --halt",
    "train_hrm.py --size tiny --init-from run-hrm --l-cycles 1": "run-hrm & l_cycles 3 & not 1",
    "train_hrm.py --h-cycles 3:1": "--h-cycles & 3:1 & 1:5",
    "train_hrm.py --init zero": "--init & zero & identity",
    "train_hrm.py --h-cycles 0": "--h-cycles & 0 & 1",
    # GPT-2
    "train_gpt2.py --n-head 5": "--n-head 5 & --d-model 32",
    "train_gpt2.py --dropout 1": "--dropout & 1 & 0",
    "train_gpt2.py --dropout -0.1": "--dropout & -0.1 & 0",
    "train_gpt2.py --ff 64": "--ff",
    "train_gpt2.py --out run-gpt2 --modern": "run-gpt2 & modern & False & True & --out",
    "train_gpt2.py --out run-gpt2 --n-layer 2": "run-gpt2 & n_layer & 1 & 2",
    "train_gpt2.py --out run-gpt2 --data other-text": "run-gpt2 & tokenizer & bytes & bpe:300 & --out",
    "train_gpt2.py --out run-hrm": "run-hrm & family & HRM & GPT2",
    "train_gpt2.py --size tiny --init-from run-gpt2 --seq-len 64": "run-gpt2 & positions & 32 & --seq-len",
    "train_gpt2.py --size tiny --init-from run-gpt2 --data other-text":
        "run-gpt2 & tokenizer & bytes & bpe:300 & tokenizer.json",
    "train_gpt2.py --size tiny --init-from hf:hf-pickle": "hf-pickle & config.json & model.safetensors",
    "train_gpt2.py --size tiny --init-from hf:hf-json": "hf-json & config.json & model.safetensors",
    "train_gpt2.py --size tiny --init-from hf:hf-type": "hf-type & llama & gpt2",
    "train_gpt2.py --size tiny --init-from hf:hf-lacks": "hf-lacks & config.json & n_embd",
    "train_gpt2.py --size tiny --init-from hf:hf-values": "hf-values & config.json & model",
    "train_gpt2.py --size tiny --init-from hf:hf-fake": "hf-fake/model.safetensors & safetensors",
    "train_gpt2.py --size tiny --init-from hf:hf-empty": "hf-empty & transformer.wte.weight & (258, 32)",
    "train_gpt2.py --export --out nowhere": "nowhere & hf:nowhere",
    # MLM
    "train_mlm.py --preset huge": "--preset & huge & 1gpu_17m",
    "train_mlm.py --preset 1gpu_17m --size tiny": "--preset & --size & not allowed",
    "train_mlm.py --mask-rate 1": "--mask-rate & 1 & 0.001",
    "train_mlm.py --mask-rate 0": "--mask-rate & 0 & 0.001",
    "train_mlm.py --window 0": "--window & 0 & 1",
    "train_mlm.py --prompt x": "--prompt",
    "train_mlm.py --out run-mlm --window 8": "run-mlm & window & 16 & 8",
    "train_mlm.py --out nowhere --fill x": "nowhere & hf:nowhere",
    "train_mlm.py --out run-mlm --fill nothing": "--fill & [MASK]",
    "train_gpt2.py --strategy zero4": "--strategy & zero4 & zero2",
    "train_mlm.py --comm fp8": "--comm & fp8 & bf16",
    "train_hrm.py --comm powersgd:4": "--comm & powersgd:4 & bf16",
    "train_gpt2.py --dry-run 8": "--dry-run 8 & GPUs & GB",
    "test_ddp.py --device nonsense": "--device & nonsense & cuda",
    "test_ddp.py --backend mpi": "--backend & mpi & gloo",
    "test_ddp.py --backend nccl --device cpu": "--backend nccl & GPUs",
    "test_ddp.py --data nowhere": "nowhere & text:GLOB",
    "test_ddp.py --model bert": "unrecognized & --model",
    "test_ddp.py --timeout 0": "--timeout & 0 & 4",
    "monitor.py --interval 0": "--interval & 0 & 0.1",
    "monitor.py --interval often": "--interval & often & number",
    "monitor.py nowhere": "nowhere & metrics.jsonl",
    "monitor.py ready": "ready & metrics.jsonl",
    "monitor.py ready nowhere": "nowhere & metrics.jsonl",
}
# What may go well later with the same command has the exit code 1, all others 2.
NOT_NOW = ("data.py prepare --dataset imdb", "data.py prepare --dataset hf:nobody/nothing")
# Mistakes that the nouns alone would not tell from others: those in one list have the same sentence, but for
# the names of the command, and those in another list have another one.
KINDS = [
    ["data.py prepare --max-token 5", "train_hrm.py --learning-rate 1", "train_hrm.py --step 5",
     "train_mlm.py --attention prefix", "train_mlm.py --prompt x", "train_gpt2.py --ff 64"],
    ["train_hrm.py --attention prefix"],
    ["train_gpt2.py --attention all"],
    ["data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q"],
    ["data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field answer"],
    ["data.py prepare --row 64"],
    ["data.py verify truncated"],
    ["data.py verify header", "data.py info other --tokenizer bytes"],
    ["data.py verify first", "data.py verify last"],
    ["data.py verify noshard"],
    ["data.py info short --tokenizer bytes"],
    ["data.py verify missing", "data.py verify changed", "data.py info changed",
     "train_hrm.py --data changed"],
    ["data.py verify nomanifest"],
    ["data.py info nomanifest", "train_hrm.py --data nomanifest"],
    ["data.py prepare --out damaged", "data.py info damaged", "train_hrm.py --data damaged"],
    ["data.py info unfinished", "train_hrm.py --data unfinished"],
    ["data.py info nowhere", "data.py info bare", "data.py info good.txt",
     "train_hrm.py --data nowhere/at/all"],
    ["data.py prepare --dataset nonsense", "data.py prepare --dataset hf:"],
    ["train_hrm.py --resume ready"],
    ["train_hrm.py --resume nowhere.pt", "train_gpt2.py --export --out nowhere"],
    ["train_hrm.py --resume good.txt", "train_hrm.py --resume malicious.pt"],
]
AS_PROCESSES = ("nonsense", "random.txt --tokenizer", "damaged.parquet", "verify last", "--learning-rate",
                "run-hrm --d-model")


class Planted:
    """What a pickle does when it is read: it makes a directory here."""

    def __reduce__(self):
        return os.mkdir, ("planted",)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    """A directory with one example of everything that can be wrong."""
    import pyarrow
    import pyarrow.parquet
    import safetensors.torch
    root = tmp_path_factory.mktemp("scene")
    good = b"good text\n" * 100
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32,
            "vocab_size": 258, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    hf = {"pickle": gpt2, "json": None, "type": gpt2 | {"model_type": "llama"}, "fake": gpt2, "empty": gpt2,
          "lacks": {k: v for k, v in gpt2.items() if k != "n_embd"}, "values": gpt2 | {"n_layer": "many"}}
    files = {
        "good.txt": good, "empty.txt": b"", "spaces.txt": b" \n\t\n", "zeros.txt": bytes(5000),
        "random.txt": random.Random(6).randbytes(5000), "latin.txt": "mañana\n".encode("latin-1"),
        "bad.jsonl": b'{"text": "a"}\n{"text": "b"\n', "list.jsonl": b'["text", 1]\n', "number.jsonl": b"5\n",
        "ragged.csv": b"text,n\na,1\nb\n", "cut.csv.gz": gzip.compress(b"text\n" + b"a\n" * 99)[:-9],
        "good.csv": b"text,n\na,1\n", "cut.json": b'[{"text": "a"}, {"text": "b"',
        "bots.jsonl": b'{"said": [{"role": "bot", "content": "a"}]}\n',
        "nofield.jsonl": b'{"body": "a", "title": "b"}\n', "fake.jsonl.gz": b'{"text": "a"}\n',
        "cut.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "fake.parquet": b"PAR1 not at all",
        "strangers/notes.txt": b"mine", "bare/nothing.txt": b"", "short/train_000000.bin": b"\x08\x00",
        "other/train_000000.bin": bytes(5000), "model/tokenizer.json": b'{"model": 5}',
        "list/tokenizer.json": b"[]", "changed.txt": good + b"more",
        "pairs.jsonl": b"".join(b'{"q": "why %d", "a": "so", "kind": "<|deep|>"}\n' % i for i in range(300))}
    files |= {f"hf-{name}/config.json": json.dumps(config).encode() if config else b"{"
              for name, config in hf.items()}
    files |= {f"hf-{name}/model.safetensors": b"\x08" * 100 for name in hf if name not in ("pickle", "empty")}
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    torch.save({"x": Planted()}, root / "hf-pickle" / "pytorch_model.bin")
    torch.save({"format": 1, "tensors": {}, "sums": {}, "x": Planted()}, root / "malicious.pt")
    safetensors.torch.save_file({"unknown": torch.zeros(3)}, root / "hf-empty" / "model.safetensors")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), root / "nofield.parquet")
    table = pyarrow.table({"text": [random.Random(n).randbytes(50).hex() for n in range(1000)]})
    pyarrow.parquet.write_table(table, root / "damaged.parquet")
    intact = (root / "damaged.parquet").read_bytes()
    (root / "damaged.parquet").write_bytes(intact[:5000] + bytes(9000) + intact[14000:])

    ready = prepare(f"text:{root}/good.txt", root / "ready", "bytes", workers=1)
    prepare(f"text:{root}/good.txt", root / "other-text", "bpe:300", workers=1)
    prepare(f"jsonl:{root}/pairs.jsonl", root / "pairs", "bytes", workers=1, prompt_field="q",
            response_field="a", row=32)
    for name in ("truncated", "header", "first", "last", "damaged", "elsewhere", "pattern",
                 "unfinished", "missing", "changed", "nomanifest", "noshard", "exchanged"):
        shutil.copytree(ready, root / name)
    shard, size = "train_000000.bin", (ready / "train_000000.bin").stat().st_size
    os.truncate(root / "truncated" / shard, size - 2)
    for name, offset in {"header": 2, "first": 1024, "last": size - 1}.items():
        flip(root / name / shard, offset)
    manifest = (ready / "manifest.json").read_text()
    for name, text in {"elsewhere": manifest.replace(shard, "../" + shard),
                       "pattern": manifest.replace('"train"', '".*"').replace(shard, "../x_000000.bin"),
                       "unfinished": manifest.replace('"complete": true', '"complete": false')}.items():
        assert text != manifest
        packing.write_manifest(root / name, json.loads(text))
    (root / "damaged" / "manifest.json").write_text(manifest[:-100])
    (root / "missing" / "tokenizer.json").unlink()
    flip(root / "changed" / "tokenizer.json", 300)
    (root / "nomanifest" / "manifest.json").unlink()
    (root / "noshard" / shard).unlink()
    shutil.copy(root / "exchanged" / "val_000000.bin", root / "exchanged" / shard)
    for script, trainer in TRAINERS.items():
        out = root / f"run-{script[6:-3]}"
        done = trainer.here(*trainer.flags(ready, out, steps=8, eval_every=8))
        assert done.code == 0, done.out
    trainer = TRAINERS["train_gpt2.py"]
    done = trainer.here(*trainer.flags(root / "pairs", root / "run-pairs", steps=2))
    assert done.code == 0, done.out
    shutil.copytree(root / "run-hrm", root / "run-broken")
    for path in (root / "run-broken" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-50])
    return root


def remove_new(scene: Path) -> None:
    for name in NEW:
        shutil.rmtree(scene / name, ignore_errors=True)


@pytest.fixture(autouse=True)
def inside(scene, monkeypatch):
    """Works in that directory, without a network."""
    monkeypatch.chdir(scene)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(scene / "cache"))
    yield
    remove_new(scene)


def arguments(command: str) -> tuple[str, list[str]]:
    script, _, rest = command.partition(" ")
    if script == "data.py":
        command, _, rest = rest.partition(" ")
        return script, [*command.split(), *USUAL.get(command, "").split(), *rest.split()]
    return script, [*USUAL.get(script, "").split(), *rest.split()]


def in_this_process(script: str, listed: list[str]) -> Finished:
    if script in TRAINERS:
        return TRAINERS[script].here(*listed)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as text:
        patch.setattr(sys, "argv", [script, *listed])
        try:
            commands = {"data.py": "prepare.command", "monitor.py": "loggers.command"}
            name = commands.get(script, script.removesuffix(".py"))
            code = importlib.import_module(name).main()
        except UserError as error:
            return Finished(error.exit_code, f"error: {error}\n")
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return Finished(code or 0, text.getvalue())


def untouched(scene: Path) -> dict[str, bytes]:
    """All files but the locks, which a run may take, and the log that says why it would not go on."""
    return {name: content for name, content in tree(scene).items()
            if not name.startswith(NEW) and not name.endswith((".lock", "train.log"))}


def alone(noun: str, path: str = "") -> str:
    """A pattern of a noun that stands by itself: --row is not in --rows, nor notes.txt in mine/notes.txt."""
    return rf"(?<![\w./-]){re.escape(noun)}{path}(?![\w-])"


def missing(nouns: str, sentence: str) -> list[str]:
    return [noun for noun in nouns.split(" & ") if not re.search(alone(noun), sentence)]


def without_names(command: str, sentence: str) -> str:
    """A sentence without the words of its command. Where one begins a path, that goes, and the word itself
    stays, as in `changed/tokenizer.json is missing or has changed`."""
    for word in command.split()[2 if command.startswith("data.py") else 1:]:
        path = alone(word, r"/[\w./]*\w")
        sentence = re.sub(path if re.search(path, sentence) else alone(word), "NAME", sentence)
    # nor what each command is offered
    return re.sub(r" \((?:use [^)]*|not needed)\)|, such as run-[\w, -]+(?=; for a)", "", sentence)


def check(done: Finished, command: str) -> str:
    """Whether the sentence is what it should be. Returns it."""
    last = done.out.rstrip("\n").splitlines()[-1]
    assert done.code == (1 if command in NOT_NOW else 2) and "Traceback" not in done.out, done.out
    assert last.startswith("error: ") and last.endswith(".") and done.out.count("error: ") == 1, done.out
    assert not missing(MISTAKES[command], last), (MISTAKES[command], done.out)
    return last


@pytest.fixture
def before(scene) -> dict[str, bytes]:
    return untouched(scene)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_sentence(scene, before, command):
    check(in_this_process(*arguments(command)), command)
    assert untouched(scene) == before
    assert not (scene / "planted").exists()


def test_unlike_mistakes_have_unlike_sentences(scene):
    kinds = []  # with names and without: two commands that get the same sentence may lose unlike flags of it
    for commands in KINDS:
        sentences = {}
        for command in commands:
            sentence = check(in_this_process(*arguments(command)), command)
            sentences[sentence] = without_names(command, sentence)
            remove_new(scene)
        assert len(set(sentences.values())) == 1, sentences
        kinds.append({*sentences, *sentences.values()})
    assert sum(map(len, kinds)) == len(set.union(*kinds)), kinds


@pytest.mark.parametrize("command", [
    pytest.param(command, marks=[] if any(part in command for part in AS_PROCESSES) else pytest.mark.long)
    for command in MISTAKES])
def test_a_mistake_ends_the_process(scene, before, command):
    script, listed = arguments(command)
    check(Group(script, *listed, cwd=scene).finish(), command)
    assert untouched(scene) == before


@pytest.mark.long
def test_a_mistake_under_torchrun(scene, before):
    """torchrun has an exit code of its own, and reports that of its workers; the mistake is said once."""
    for command in ("train_hrm.py --bp-steps 5:2", "train_gpt2.py --out run-gpt2 --n-layer 2"):
        script, listed = arguments(command)
        done = run(2, script, *listed, cwd=scene)
        assert done.code == 1 and done.out.count("error: ") == 1 and "exitcode  : 2" in done.out, done.out
        sentence = done.out.partition("error: ")[2].partition("\n")[0]
        assert not missing(MISTAKES[command], sentence) and untouched(scene) == before, done.out


def test_the_scene_is_wrong_in_nothing_else(scene):
    """Shows that the commands above fail for the reason they are meant to."""
    for command in ("data.py prepare", "data.py info ready", "data.py verify ready", "data.py peek ready",
                    "data.py info nomanifest --tokenizer bytes",
                    "data.py verify unfinished", "train_hrm.py",
                    *(f"{script} --out run-{script[6:-3]}" for script in TRAINERS),
                    "train_mlm.py --out run-mlm --fill a[MASK]b"):
        script, listed = arguments(command)
        done = Group(script, *listed, cwd=scene).finish()
        assert done.code == 0, done.out
        remove_new(scene)


def test_the_hub_without_a_network_fails_within_a_second(scene, monkeypatch):
    """The hub's own client tries for 23 seconds."""
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for dataset, nouns in (("imdb", "stanfordnlp/imdb & network"),
                           ("fineweb-edu", "HuggingFaceFW/fineweb-edu & network")):
        begin = time.perf_counter()
        done = in_this_process(*arguments(f"data.py prepare --dataset {dataset}"))
        assert time.perf_counter() - begin < 2
        assert done.code == 1 and not missing(nouns, done.out), done.out
