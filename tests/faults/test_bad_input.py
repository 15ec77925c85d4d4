"""Bad input, to every script: one sentence that says how to go on, exit code 2, no traceback, nothing
overwritten.

A case is a line of MISTAKES, the command and words of its message. It runs in a directory with one example of
everything that can be wrong; `new` is the place where a run or shards may be written.
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

import data

TRAINERS = {"train_hrm.py": Trainer("train_hrm.py", ff=64), "train_gpt2.py": Trainer("train_gpt2.py"),
            "train_mlm.py": Trainer("train_mlm.py", ff=48, window=16)}
# What a command says before what its line says, which overrides it.
USUAL = {"prepare": "--dataset text:good.txt --out new --tokenizer bytes --workers 1"} | {
    script: " ".join(trainer.flags("ready", "new", steps=8)) for script, trainer in TRAINERS.items()}
NEW = ("new/", "shards/", "cache/")  # where something may be written
MISTAKES = {
    "data.py": "required: command",
    "data.py nonsense": "invalid choice: 'nonsense'",
    "data.py verify": "required: directory",
    "data.py peek ready --rows many": "--rows: invalid int value",
    "data.py peek ready --split test": "--split: invalid choice",
    "data.py prepare --shard-tokens 5e6": "'5e6' is not a count",
    "data.py prepare --val-split half": "'half' is not hash:F or tail:F",
    "data.py prepare --max-token 5": "unrecognized arguments: --max-token 5",
    "data.py prepare --dataset nonsense": "unknown data set 'nonsense'",
    "data.py prepare --dataset hf:": "unknown data set",
    "data.py prepare --dataset task:nonsense --max-samples 9": "unknown data set 'task:nonsense'",
    "data.py prepare --dataset task:doubling": "task:doubling is endless",
    "data.py prepare --dataset task:doubling --max-samples 9 --row 20": "holds no text to train on",
    "data.py prepare --dataset text:none/*.txt": "no file matches 'none/*.txt'",
    "data.py prepare --dataset text:empty.txt": "holds no text",
    "data.py prepare --dataset text:spaces.txt": "holds no text",
    "data.py prepare --dataset text:zeros.txt": "zeros.txt contains zero bytes",
    "data.py prepare --dataset text:random.txt": "random.txt is not UTF-8",
    "data.py prepare --dataset text:latin.txt": "latin.txt is not UTF-8",
    "data.py prepare --dataset jsonl:bad.jsonl": "bad.jsonl, line 2, is not JSON",
    "data.py prepare --dataset jsonl:list.jsonl": "list.jsonl, line 1, is not JSON",
    "data.py prepare --dataset jsonl:number.jsonl": "number.jsonl, line 1, is not JSON",
    "data.py prepare --dataset jsonl:random.txt": "random.txt, line 1, is not JSON",
    "data.py prepare --dataset jsonl:nofield.jsonl": "no field 'text' but body, title",
    "data.py prepare --dataset jsonl:cut.jsonl.gz": "cut.jsonl.gz cannot be read to its end",
    "data.py prepare --dataset jsonl:fake.jsonl.gz": "fake.jsonl.gz cannot be read to its end",
    "data.py prepare --dataset parquet:fake.parquet": "fake.parquet cannot be read .* not a parquet file",
    "data.py prepare --dataset parquet:nofield.parquet": "no field 'text' but body",
    "data.py prepare --dataset parquet:damaged.parquet": "damaged.parquet cannot be read .*: check it",
    "data.py prepare --dataset imdb": "no network, so stanfordnlp/imdb cannot be read",
    "data.py prepare --dataset hf:nobody/nothing": "no network, so nobody/nothing cannot be read",
    "data.py prepare --tokenizer cl100k_base": "cannot be downloaded",
    "data.py prepare --tokenizer gpt3": "unknown tokenizer 'gpt3'",
    "data.py prepare --tokenizer bpe:100": "bpe:100 is out of range",
    "data.py prepare --tokenizer model": "model/tokenizer.json is not a Hugging Face",
    "data.py prepare --tokenizer list": "list/tokenizer.json is not a Hugging Face",
    "data.py prepare --max-samples 0 --val-split hash": "limits must be 1 or more",
    "data.py prepare --shard-tokens 0": "--shard-tokens must be between",
    "data.py prepare --workers 0": "limits must be 1 or more",
    "data.py prepare --max-tokens 5": "tail:F, also the default for a few text files, reads the text",
    "data.py prepare --dataset jsonl:bad.jsonl --val-split tail:0.1": "tail:F needs a text: source",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q": "go together: name both",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field answer":
        "no field 'answer' but q, a, kind: name one with --prompt-field and --response-field",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field a --condition-field kind":
        "has no condition <|deep|>, but [MASK]",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field a --row 3": "4 or more",
    "data.py prepare --dataset jsonl:pairs.jsonl --prompt-field q --response-field a --row 4":
        "no text to train on: .* longer than --row",
    "data.py prepare --prompt-field q --response-field a": "has no fields for pairs",
    "data.py prepare --row 64": "--row and --long are for pairs",
    "data.py prepare --long cut": "--long: invalid choice",
    "data.py prepare --out ready --tokenizer bpe:300": "another tokenizer (bytes, now bpe:300)",
    "data.py prepare --dataset text:changed.txt --out ready": "ready was prepared with another source",
    "data.py prepare --out ready --shard-tokens 9": "another shard_tokens",
    "data.py prepare --out damaged": "manifest.json is damaged",
    "data.py prepare --out strangers": "strangers holds notes.txt but no manifest",
    "data.py prepare --out nomanifest": "holds train_000000.bin but no manifest",
    "data.py prepare --out good.txt": "good.txt cannot be written",
    "data.py prepare --out good.txt/below": "good.txt/below cannot be written",
    "data.py verify truncated": "truncated/train_000000.bin has",
    "data.py info truncated": "truncated/train_000000.bin has",
    "data.py peek truncated": "truncated/train_000000.bin has",
    "data.py verify header": "header/train_000000.bin is not a shard",
    "data.py info header": "header/train_000000.bin is not a shard",
    "data.py verify first": "first/train_000000.bin has changed",
    "data.py verify last": "last/train_000000.bin has changed",
    "data.py verify missing": "missing/tokenizer.json is missing or has changed",
    "data.py verify changed": "changed/tokenizer.json is missing or has changed",
    "data.py verify noshard": "noshard/train_000000.bin cannot be read: No such file",
    "data.py verify nomanifest": "nomanifest has no manifest.json",
    "data.py info damaged": "damaged/manifest.json is damaged",
    "data.py info elsewhere": "elsewhere/manifest.json is damaged",
    "data.py info pattern": "pattern/manifest.json is damaged",
    "data.py info unfinished": "unfinished is not complete",
    "data.py info changed": "changed/tokenizer.json is missing or has changed",
    "data.py info ready --tokenizer bpe:300": "made with the tokenizer bytes, not with bpe:300",
    "data.py info nomanifest": "nomanifest has no manifest: name its tokenizer",
    "data.py info nowhere": "nowhere holds no data",
    "data.py info bare": "bare holds no data",
    "data.py info good.txt": "good.txt holds no data",
    "data.py info short --tokenizer bytes": "short/train_000000.bin cannot be read: too short",
    "data.py info other --tokenizer bytes": "other/train_000000.bin is not a shard",
    "data.py peek ready --seq-len 100000000": "is too small",
    "data.py peek ready --rows 0": "must be 1 or more",
    "data.py peek ready --seq-len 0": "must be 1 or more",

    # the same for all trainers
    "train_hrm.py --data nowhere/at/all": "holds no data",
    "train_hrm.py --data text:nowhere/*.txt": "no file matches",
    "train_hrm.py --data text:ready/train_000000.bin --tokenizer bytes": "binary|UTF-8",
    "train_hrm.py --data nonsense --tokenizer bytes": "unknown data set",
    "train_hrm.py --data truncated": "has .* bytes instead of",
    "train_hrm.py --data header": "is not a shard",
    "train_hrm.py --data unfinished": "is not complete",
    "train_hrm.py --data damaged": "manifest.json is damaged",
    "train_hrm.py --data exchanged": "has .* tokens instead of",
    "train_hrm.py --data nomanifest": "name its tokenizer",
    "train_hrm.py --data changed": "tokenizer.json is missing or has changed",
    "train_hrm.py --tokenizer cl100k_base": "tokenizer|vocabulary",
    "train_hrm.py --seq-len 10000000": "too small",
    "train_hrm.py --data pairs --seq-len 64": "pairs has rows of 32 tokens: use --seq-len 32, or prepare",
    "train_hrm.py --attention prefix": "--attention prefix needs pairs and --loss response",
    "train_gpt2.py --data pairs --loss all": "--attention prefix needs pairs and --loss response",
    "train_hrm.py --loss response": "--loss response needs pairs",
    "train_gpt2.py --data pairs --condition <|deep|>": "has no condition <|deep|>",
    "train_gpt2.py --data pairs --sample-prompt " + "long" * 9: "--sample-prompt has 38 tokens, a row 32",
    "train_mlm.py --attention prefix": "unrecognized arguments",
    "train_gpt2.py --attention all": "--attention: invalid choice",
    "train_hrm.py --data pairs --out run-hrm": "another (tokenizer|data|vocab_size)",
    "train_hrm.py --mix 0.5,0.6 --data ready,ready": "'0.5,0.6' is not two or more weights that add up to 1",
    "train_hrm.py --mix 1": "is not two or more weights",
    "train_hrm.py --mix a,b": "--mix",
    "train_hrm.py --mix 0.5,0.5": "--mix has 2 weights for the 1 sources of --data",
    "train_hrm.py --mix 0.5,0.5 --data ready,other-text": "have unlike tokenizers, or only one has pairs",
    "train_hrm.py --mix 0.5,0.5 --data ready,pairs": "have unlike tokenizers, or only one has pairs",
    "train_hrm.py --mix 0.5,0.5 --data ready,nowhere/at/all": "holds no data",
    "train_gpt2.py --out run-pairs --data pairs --prompt " + "long" * 9: "the prompt has 38 tokens, but",
    "train_gpt2.py --out run-pairs --data pairs --prompt x --condition <|deep|>": "has no condition <|deep|>",
    "train_hrm.py --max-tokens 500": "ready was prepared with another max_tokens (None, now 500)",
    "train_hrm.py --max-samples 5": "another max_samples (None, now 5): leave the flag out",
    "train_hrm.py --max-tokens many": "--max-tokens: 'many' is not a count",
    "train_hrm.py --max-tokens 500 --data text:good.txt --tokenizer bytes": "reads the text to its end",
    "train_hrm.py --out ready/manifest.json": "cannot be written",
    "train_hrm.py --out ready/manifest.json/run": "cannot be written",
    "train_hrm.py --out run-hrm --d-model 64": "another d_model",
    "train_hrm.py --out run-hrm --seq-len 64": "another seq_len",
    "train_hrm.py --out run-hrm --seed 7": "another seed",
    "train_hrm.py --out run-hrm --data other-text": "another (tokenizer|data)",
    "train_hrm.py --out run-hrm --resume none": "choose another --out",
    "train_hrm.py --out run-hrm --resume run-gpt2": "has a later checkpoint|another family",
    "train_hrm.py --resume ready": "holds no checkpoint",
    "train_hrm.py --resume nowhere.pt": "does not exist",
    "train_hrm.py --resume good.txt": "cannot be read",
    "train_hrm.py --resume malicious.pt": "cannot be read",
    "train_hrm.py --out run-broken": "nor any older checkpoint",
    "train_hrm.py --size tiny --init-from nowhere": "nowhere does not exist: .* as hf:nowhere",
    "train_gpt2.py --modern --export --out run-gpt2": "was trained with modern False: name the run that",
    "train_hrm.py --data text:ready": "of a directory give its files, 'text:ready/*'",
    "train_hrm.py --init-from run-hrm": "--init-from needs the --size of the weights",
    "train_hrm.py --size tiny --init-from hf:/nowhere": "hf:/nowhere",
    "train_hrm.py --size tiny --init-from run-gpt2": "family GPT2",
    "train_hrm.py --learning-rate 1": "unrecognized arguments",
    "train_hrm.py --step 5": "unrecognized arguments",
    "train_hrm.py --size huge": "--size: invalid choice",
    "train_hrm.py --lr fast": "--lr",
    "train_hrm.py --lr inf": "--lr",
    "train_hrm.py --lr nan": "--lr",
    "train_hrm.py --lr -1": "--lr",
    "train_hrm.py --steps 0": "--steps",
    "train_hrm.py --steps 2.5": "--steps",
    "train_hrm.py --seed -1": "--seed",
    "train_hrm.py --beta1 1": "--beta1",
    "train_hrm.py --epochs 1": "not allowed with",
    "train_hrm.py --keep-last 0": "--keep-last",
    "train_hrm.py --save-every 0": "--save-every",
    "train_hrm.py --global-batch 12 --batch 5": "--batch 5 does not fit",
    "train_hrm.py --grad-accum 100": "--grad-accum 100 does not fit",
    "train_hrm.py --batch 2 --grad-accum 5": "does not fit",
    "train_hrm.py --optimizer sgd": "--optimizer: invalid choice",
    "train_hrm.py --precision int8": "--precision: invalid choice",
    "train_hrm.py --backend nccl --device cpu": "--backend nccl needs GPUs",
    "train_hrm.py --strategy zero9": "--strategy: invalid choice",
    "train_hrm.py --strategy zero3 --optimizer muon": "muon",
    "train_hrm.py --strategy zero1 --comm bf16": "--comm",
    "train_hrm.py --strategy zero2 --comm late": "--comm needs --strategy ddp",
    "train_hrm.py --cpu-offload": "--cpu-offload needs",
    "train_hrm.py --prompt x --out nowhere/run": "does not exist",
    "train_hrm.py --prompt x --out new": "does not exist",
    "train_hrm.py --prompt x --out run-gpt2": "family GPT2",
    "train_hrm.py --prompt x --out ready": "holds no checkpoint",
    "train_hrm.py --prompt x --out run-hrm --temperature -1": "--temperature",
    "train_hrm.py --prompt x --out run-hrm --top-p 2": "--top-p",
    # HRM
    "train_hrm.py --n-head 3": "--n-head",
    "train_hrm.py --bp-steps 40": "--bp-steps 40",
    "train_hrm.py --bp-steps 5:2": "ramp",
    "train_hrm.py --max-cycles 3": "--max-cycles needs --halt",
    "train_hrm.py --ponder-cost 0": "--ponder-cost needs --halt",
    "train_hrm.py --h-cycles 0": "--h-cycles",
    # GPT-2
    "train_gpt2.py --n-head 5": "n_head|--n-head",
    "train_gpt2.py --dropout 1": "--dropout",
    "train_gpt2.py --dropout -0.1": "--dropout",
    "train_gpt2.py --vocab-size 10": "vocab",
    "train_gpt2.py --ff 64": "unrecognized arguments: --ff 64",
    "train_gpt2.py --out run-gpt2 --modern": "another modern",
    "train_gpt2.py --out run-gpt2 --n-layer 2": "another n_layer",
    "train_gpt2.py --out run-gpt2 --data other-text": "another (tokenizer|data)",
    "train_gpt2.py --out run-hrm": "another family|family HRM",
    "train_gpt2.py --size tiny --init-from run-gpt2 --seq-len 64": "learned positions",
    "train_gpt2.py --size tiny --init-from run-gpt2 --data other-text": "was trained with the tokenizer",
    "train_gpt2.py --size tiny --init-from hf:hf-pickle": "no readable config.json with",
    "train_gpt2.py --size tiny --init-from hf:hf-json": "no readable config.json with",
    "train_gpt2.py --size tiny --init-from hf:hf-type": "holds a model of type 'llama'",
    "train_gpt2.py --size tiny --init-from hf:hf-lacks": "lacks 'n_embd'",
    "train_gpt2.py --size tiny --init-from hf:hf-values": "makes no model",
    "train_gpt2.py --size tiny --init-from hf:hf-fake": "cannot be read as safetensors",
    "train_gpt2.py --size tiny --init-from hf:hf-empty": "has no tensor",
    "train_gpt2.py --export --out nowhere": "does not exist",
    # MLM
    "train_mlm.py --preset huge": "--preset",
    "train_mlm.py --preset 1gpu_17m --size tiny": "leave --size out",
    "train_mlm.py --mask-rate 1": "--mask-rate",
    "train_mlm.py --mask-rate 0": "--mask-rate",
    "train_mlm.py --window 0": "--window",
    "train_mlm.py --prompt x": "unrecognized arguments: --prompt x",
    "train_mlm.py --out run-mlm --window 8": "another window",
    "train_mlm.py --out nowhere --fill x": "does not exist",
    "train_mlm.py --out run-mlm --fill nothing": "[MASK]",
    "train_gpt2.py --strategy zero4": "--strategy: invalid choice",
    "train_mlm.py --comm fp8": "--comm: invalid choice: 'fp8'",
    "train_hrm.py --comm powersgd:4": "--comm: invalid choice: 'powersgd:4'",
    "train_gpt2.py --comm late --precision fp16": "--comm late needs --precision bf16 or fp32",
    "train_gpt2.py --dry-run 8": "is not GPUs",
    "test_ddp.py --size nonsense": "has no --size nonsense",
    "test_ddp.py --backend mpi": "--backend: invalid choice",
    "test_ddp.py --backend nccl --device cpu": "--backend nccl needs GPUs",
    "test_ddp.py --data nowhere": "nowhere holds no data",
    "test_ddp.py --model bert": "--model: invalid choice",
    "test_ddp.py --timeout 0": "0 is not at least",
    "monitor.py --interval 0": "--interval: 0 is not between",
    "monitor.py --interval often": "--interval: invalid",
    "monitor.py nowhere": "has no metrics.jsonl",
    "monitor.py ready": "has no metrics.jsonl",
    "monitor.py --output picture.png": "needs the directory of a run",
}
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

    ready = data.prepare(f"text:{root}/good.txt", root / "ready", "bytes", workers=1)
    data.prepare(f"text:{root}/good.txt", root / "other-text", "bpe:300", workers=1)
    data.prepare(f"jsonl:{root}/pairs.jsonl", root / "pairs", "bytes", workers=1, prompt_field="q",
                 response_field="a", row=32)
    for name in ("truncated", "header", "first", "last", "damaged", "elsewhere", "absolute", "pattern",
                 "unfinished", "missing", "changed", "nomanifest", "noshard", "exchanged"):
        shutil.copytree(ready, root / name)
    shard, size = "train_000000.bin", (ready / "train_000000.bin").stat().st_size
    os.truncate(root / "truncated" / shard, size - 2)
    for name, offset in {"header": 2, "first": 1024, "last": size - 1}.items():
        flip(root / name / shard, offset)
    manifest = (ready / "manifest.json").read_text()
    for name, text in {"elsewhere": manifest.replace(shard, "../" + shard),
                       "absolute": manifest.replace(shard, f"{ready}/{shard}"),
                       "pattern": manifest.replace('"train"', '".*"').replace(shard, "../x_000000.bin"),
                       "unfinished": manifest.replace('"complete": true', '"complete": false')}.items():
        assert text != manifest
        data.write_manifest(root / name, json.loads(text))
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


@pytest.fixture(autouse=True)
def inside(scene, monkeypatch):
    """Works in that directory, without a network."""
    monkeypatch.chdir(scene)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(scene / "cache"))
    yield
    for name in NEW:
        shutil.rmtree(scene / name, ignore_errors=True)


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
            code = importlib.import_module(script.removesuffix(".py")).main()
        except data.UserError as error:
            return Finished(error.exit_code, f"error: {error}\n")
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return Finished(code or 0, text.getvalue())


def untouched(scene: Path) -> dict[str, bytes]:
    """All files but the locks, which a run may take, and the log that says why it would not go on."""
    return {name: content for name, content in tree(scene).items()
            if not name.startswith(NEW) and not name.endswith((".lock", "train.log"))}


def check(done: Finished, words: str) -> None:
    last = done.out.rstrip("\n").splitlines()[-1]
    assert done.code == 2 - ("no network" in words) and "Traceback" not in done.out, done.out
    assert last.startswith("error: ") and last.endswith(".") and done.out.count("error: ") == 1, done.out
    assert words in last or re.search(words, last), done.out


@pytest.fixture(scope="module")
def before(scene) -> dict[str, bytes]:
    return untouched(scene)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_sentence(scene, before, command):
    check(in_this_process(*arguments(command)), MISTAKES[command])
    assert untouched(scene) == before
    assert not (scene / "planted").exists()


@pytest.mark.parametrize("command", [
    pytest.param(command, marks=[] if any(part in command for part in AS_PROCESSES) else pytest.mark.long)
    for command in MISTAKES])
def test_a_mistake_ends_the_process(scene, before, command):
    script, listed = arguments(command)
    check(Group(script, *listed, cwd=scene).finish(), MISTAKES[command])
    assert untouched(scene) == before


@pytest.mark.long
def test_a_mistake_under_torchrun(scene, before):
    """torchrun has an exit code of its own, and reports that of its workers; the mistake is said once."""
    for command in ("train_hrm.py --bp-steps 5:2", "train_gpt2.py --out run-gpt2 --n-layer 2"):
        script, listed = arguments(command)
        done = run(2, script, *listed, cwd=scene)
        assert done.code == 1 and done.out.count("error: ") == 1 and "exitcode  : 2" in done.out, done.out
        assert re.search(MISTAKES[command], done.out) and untouched(scene) == before


def test_the_scene_is_wrong_in_nothing_else(scene):
    """Shows that the commands above fail for the reason they are meant to."""
    for command in ("data.py prepare", "data.py info ready", "data.py verify ready", "data.py peek ready",
                    "data.py info nomanifest --tokenizer bytes", "data.py info first",
                    "data.py verify unfinished", "train_hrm.py",
                    *(f"{script} --out run-{script[6:-3]}" for script in TRAINERS),
                    "train_mlm.py --out run-mlm --fill a[MASK]b"):
        script, listed = arguments(command)
        done = Group(script, *listed, cwd=scene).finish()
        assert done.code == 0, done.out
        shutil.rmtree(scene / "new", ignore_errors=True)


def test_the_hub_without_a_network_fails_within_a_second(scene, monkeypatch):
    """The hub's own client tries for 23 seconds."""
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for dataset in ("imdb", "fineweb-edu"):
        begin = time.perf_counter()
        done = in_this_process(*arguments(f"data.py prepare --dataset {dataset}"))
        assert done.code == 1 and "no network" in done.out and time.perf_counter() - begin < 2
