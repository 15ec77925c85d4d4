"""Speed of `data.py prepare`, from start to finished shards, in turn with two others on the same text.

    python bench/prepare.py --tokenizer gpt2 --megabytes 200      # medians of 5 rounds (least to most)

ours       with as many workers as there are cores
thread     tiktoken's encode_to_numpy in one thread
datasets   the usual script, as nanoGPT has it: datasets.map with as many processes, then one file

CPU time (user + system, with children) stands beside the wall clock: other processes slow only that down.
"""

import json
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from cli.parser import ArgumentParser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
from prepare.tokenizer import load_tokenizer

DATASETS = """
import sys, datasets, numpy as np, tiktoken
path, out, name, workers = sys.argv[1:]
tokenizer = tiktoken.get_encoding(name)
def process(example):
    return {"ids": tokenizer.encode_ordinary(example["text"]) + [tokenizer.eot_token]}
rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=out)
rows = rows.map(process, remove_columns=["text"], num_proc=int(workers)).with_format("numpy")
with open(out + ".bin", "wb") as file:
    for batch in rows.iter(1000):
        np.concatenate(batch["ids"]).astype(np.uint16).tofile(file)
"""


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", default="gpt2", help="one of tiktoken's (gpt2)")
    parser.add_argument("--megabytes", type=float, default=200, help="of Python's own source (200)")
    args = parser.parse_args()
    workers = str(data.cpu_count())
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [f.read_text(encoding="utf-8", errors="ignore") for f in files if "site-packages" not in f.parts]
    texts *= max(1, round(args.megabytes * 1e6 / sum(map(len, texts))))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    encoding = load_tokenizer(args.tokenizer)._encoding
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, "corpus.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare = [data.__file__, "prepare", "--dataset", f"jsonl:{path}", "--tokenizer", args.tokenizer]
        ways = {"ours": lambda out: subprocess.run(
                    [sys.executable, *prepare, "--out", out, "--workers", workers], check=True),
                "thread": lambda out: [encoding.encode_to_numpy(t, disallowed_special=()) for t in texts],
                "datasets": lambda out: subprocess.run(
                    [sys.executable, "-c", DATASETS, path, out, args.tokenizer, workers], check=True)}
        speeds = {name: [] for name in ways}
        for i in range(args.rounds):
            for name, way in ways.items():
                cpu, wall = cpu_seconds(), time.perf_counter()
                way(f"{root}/{name}{i}")
                wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
                speeds[name].append((megabytes / wall, megabytes / cpu))
    for name, pairs in speeds.items():
        for clock, found in zip(("the wall clock", "CPU time"), zip(*pairs)):
            print(f"{name}: {statistics.median(found):.1f} MB/s of {clock} ({min(found):.1f} to "
                  f"{max(found):.1f}); {workers} cores")


if __name__ == "__main__":
    main()
