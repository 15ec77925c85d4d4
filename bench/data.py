"""Speed of the data path, each part beside what it is made of, in turn, in one run.

    python bench/data.py                    # all parts, medians of 5 rounds
    python bench/data.py read mask open     # some
    python bench/data.py prepare --tokenizer gpt2 --megabytes 30

* read: Shards.take of random rows, as training reads, against a copy of as many bytes of the same memory map
* mask: Masker and take together, tokens a second of one core
* open: Dataset(...) and the first batch at a position far into an epoch, in seconds
* prepare: data.prepare with W workers, from start to finished shards, against W times what one thread encodes
  with tiktoken's encode_to_numpy, and against the usual script: datasets.map with W processes, then one file

CPU seconds (user + system, with children) stand beside the wall clock: other processes slow only that down.
"""

import argparse
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import data

SEQ_LEN, BATCH = 1024, 32


def cpu_seconds() -> float:
    """Of this process, all its threads, and of children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def in_turn(rounds: int, **functions) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each function, `rounds` times in turn after one that does not count."""
    found = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in list(functions.items())[:: 1 if round_ % 2 else -1]:
            cpu, wall = cpu_seconds(), time.perf_counter()
            function()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if round_:
                found[name].append((wall, cpu))
    return found


def median(pairs, clock: int) -> float:
    return statistics.median(pair[clock] for pair in pairs)


def ratio(found: dict, a: str, b: str, clock: int, factor: float = 1.0) -> str:
    """How many times as fast a is as b, round by round."""
    each = [factor * y[clock] / x[clock] for x, y in zip(found[a], found[b])]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def make_shards(directory: Path, tokens: int) -> Path:
    """A prepared directory of random bytes, in two shards, as `prepare` writes it."""
    tokenizer = data.load_tokenizer("bytes")
    data.write_atomically(directory / "tokenizer.json", tokenizer.to_json().encode())
    random, shards = np.random.default_rng(0), []
    for i in range(2):
        name = f"train_{i:06d}.bin"
        ids = random.integers(0, 256, tokens // 2, np.uint16)
        digest = data.write_shard(directory / name, [ids], "uint16")
        shards.append({"split": "train", "file": name, "tokens": tokens // 2, "documents": 1,
                       "sha256": digest, "end": [i, 1]})
    data.write_manifest(directory, {
        "format": 1, "dataset": "random", "settings": {}, "complete": True, "dtype": "uint16",
        "shards": shards, "tokenizer": {
            "name": "bytes", "sha256": data.sha256_of(directory / "tokenizer.json"), "vocab_size": 257,
            "mask": 257}})
    return directory


def read(args, directory: Path) -> None:
    shards = data.Dataset([directory], SEQ_LEN).train
    x = np.empty((BATCH, SEQ_LEN), np.uint16)
    y = np.empty(x.shape, np.int32)
    batches = [np.sort(shards.order(i * BATCH, BATCH, 0)) for i in range(2000)]
    flat = np.empty(BATCH * SEQ_LEN, np.uint16)

    def take():
        for rows in batches:
            shards.take(rows, x, y)

    def copy():  # the same bytes, x and y, in runs as long as a batch
        n = len(flat)
        for i in range(2 * len(batches)):
            start = i * n % (len(shards.tokens[0]) - n)
            np.copyto(flat, shards.tokens[0][start:start + n])

    def nanogpt():  # its get_batch, without the conversion to torch
        for rows in batches[:200]:
            tokens = shards.tokens[0]
            np.stack([tokens[i:i + SEQ_LEN].astype(np.int64) for i in rows])
            np.stack([tokens[i + 1:i + 1 + SEQ_LEN].astype(np.int64) for i in rows])

    found = in_turn(args.rounds, take=take, copy=copy, nanogpt=nanogpt)
    batches_read = {"take": 1, "copy": 1, "nanogpt": 0.1}
    for name, fraction in batches_read.items():
        size = fraction * 2 * len(batches) * BATCH * SEQ_LEN * 2 / 1e9
        print(f"read: {name:8} {size / median(found[name], 0):6.2f} GB/s, of CPU time "
              f"{size / median(found[name], 1):6.2f}")
    print(f"read: take / copy {ratio(found, 'take', 'copy', 1)} of CPU time, "
          f"{ratio(found, 'take', 'copy', 0)} of wall clock")


def mask(args, directory: Path) -> None:
    dataset = data.Dataset([directory], 512)
    masker = data.Masker(dataset.tokenizer, 512, 0.3, 0)
    x = np.empty((64, 512), np.uint16)
    epochs = np.zeros(64, np.int64)
    batches = [np.sort(dataset.train.order(i * 64, 64, 0)) for i in range(50)]

    def both():
        for rows in batches:
            dataset.train.take(rows, x)
            masker(x, rows, epochs)

    np.empty(2_000_000)  # once 16 MB were freed, as in any trainer, glibc keeps blocks of this size for reuse
    found, tokens = in_turn(args.rounds, both=both), len(batches) * x.size
    print(f"mask: gather and mask {tokens / median(found['both'], 1) / 1e6:.1f} M tokens/s of one core (CPU "
          f"time), {tokens / median(found['both'], 0) / 1e6:.1f} by the wall clock")


def open_and_seek(args, directory: Path) -> None:
    import torch  # noqa: F401 — its import is not what is measured

    def begin():
        dataset = data.Dataset([directory], SEQ_LEN)
        loader = data.Loader(dataset.train, BATCH, 0, 1, 0, "cpu", samples=123_456_789)
        loader.step(1)
        loader.close()

    found = in_turn(args.rounds, begin=begin)
    print(f"open: {1000 * median(found['begin'], 0):.1f} ms to open and to have the batch after 123,456,789 "
          f"samples, {1000 * median(found['begin'], 1):.1f} ms of CPU time")


# -----------------------------------------------------------------------------------------------------------


def corpus(directory: Path, megabytes: int) -> Path:
    """Documents as JSON lines: Python's own source, file by file, again and again."""
    import json
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    path, written = directory / "corpus.jsonl", 0
    with open(path, "w", encoding="utf-8") as out:
        while written < megabytes * 1e6:
            for file in files:
                text = file.read_text(encoding="utf-8", errors="ignore")
                if 1000 < len(text) < 200_000 and "site-packages" not in file.parts:
                    out.write(json.dumps({"text": text}) + "\n")
                    written += len(text)
                if written >= megabytes * 1e6:
                    break
    return path


def prepare(args, _) -> None:
    import json
    workers = data.cpu_count()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        path = corpus(directory, args.megabytes)
        texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
        tokenizer = data.load_tokenizer(args.tokenizer)
        count = iter(range(1000))

        def ours():
            quietly(["data.py", "prepare", "--dataset", f"jsonl:{path}", "--tokenizer", args.tokenizer,
                     "--out", directory / f"ours{next(count)}", "--workers", workers])

        def threads():  # what one thread encodes; W of them are W times as fast at best
            for text in texts:
                tokenizer._encoding.encode_to_numpy(text, disallowed_special=())

        def usual():
            quietly([__file__, "--usual", path, directory / f"usual{next(count)}", args.tokenizer, workers])

        found = in_turn(args.rounds, ours=ours, threads=threads, usual=usual)
    size = sum(len(t.encode()) for t in texts) / 1e6
    for name, factor in (("ours", 1), ("threads", workers), ("usual", 1)):
        print(f"prepare: {name:8} {factor * size / median(found[name], 0):6.2f} MB/s by the wall clock, "
              f"{size / median(found[name], 1):6.2f} MB/s of CPU time")
    print(f"prepare: ours / ({workers} x one thread of encode_to_numpy) "
          f"{ratio(found, 'ours', 'threads', 0, 1 / workers)} of wall clock, "
          f"{ratio(found, 'ours', 'threads', 1)} of CPU time, which includes to start Python")
    print(f"prepare: ours / datasets.map {ratio(found, 'ours', 'usual', 0)} of wall clock, "
          f"{ratio(found, 'ours', 'usual', 1)} of CPU time")


def usual(path: str, out: str, name: str, workers: str) -> None:
    """nanoGPT's prepare.py for openwebtext, for a file of JSON lines."""
    import datasets
    import tiktoken
    tokenizer = tiktoken.get_encoding(name)
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=out)

    def process(example):
        ids = tokenizer.encode_ordinary(example["text"])
        ids.append(tokenizer.eot_token)
        return {"ids": ids, "len": len(ids)}

    tokenized = rows.map(process, remove_columns=["text"], num_proc=int(workers))
    length = np.sum(tokenized["len"], dtype=np.uint64)
    array = np.memmap(f"{out}.bin", dtype=np.uint16, mode="w+", shape=(length,))
    index, batches = 0, min(1024, len(tokenized))
    for i in range(batches):
        batch = tokenized.shard(num_shards=batches, index=i, contiguous=True).with_format("numpy")
        joined = np.concatenate(batch["ids"])
        array[index:index + len(joined)] = joined
        index += len(joined)
    array.flush()


def quietly(command: list) -> None:
    import subprocess
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, *map(str, command)], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])


def main() -> None:
    parts = {"read": read, "mask": mask, "open": open_and_seek, "prepare": prepare}
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", default="gpt2", help="of prepare, one of tiktoken's (gpt2)")
    parser.add_argument("--megabytes", type=int, default=200, help="of text for prepare (200)")
    args = parser.parse_args()
    print(f"{data.cpu_count()} cores, medians of {args.rounds} rounds (least to most)", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        if set(args.parts or parts) - {"prepare"}:
            make_shards(Path(directory), 200_000_000)
        for name in args.parts or parts:
            parts[name](args, Path(directory))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--usual"]:
        usual(*sys.argv[2:])
    else:
        main()
