"""Packs pairs into rows, and writes shards and their manifest."""

import bisect
import json
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cli.errors import UserError
from cli.files import sha256_of, write_atomically
from data import FORMATS, manifest_digest


def shard_dtype(vocab_size: int) -> str:
    """The smaller of the two dtypes of shards, if it can hold all ids."""
    return "uint16" if vocab_size < 65_536 else "uint32"  # <, because [MASK] may be an additional id


def write_shard(path: Path, arrays: list[np.ndarray], dtype: str) -> str:
    """Writes the arrays, one after another, as a shard. Returns its sha256."""
    header = np.zeros(256, "int32")
    header[:3] = *FORMATS[dtype], sum(map(len, arrays))
    write_atomically(path, header, *(a.astype(dtype, copy=False) for a in arrays))
    return sha256_of(path)


def total(shards: list[dict], what: str, split: str = "") -> int:
    """The number of "tokens" or "documents" (`what`) in the shards of a split, or of all splits."""
    return sum(shard[what] for shard in shards if split in ("", shard["split"]))


def write_manifest(directory: Path, manifest: dict):
    manifest["checksum"] = manifest_digest(manifest)
    write_atomically(directory / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")


@dataclass
class Packer:
    """Packs whole samples into rows of `row` tokens. A sample goes into the open row where it leaves the
    least space; at most WINDOW rows are open. The rest of a row is filled with start tokens, at least one if
    a start token also ends the sample before it. With `truncate`, a response that is too long is cut, and has
    no end token; otherwise the sample is dropped. Samples with an empty response or a prompt that is too long
    are always dropped.
    """

    WINDOW = 1000

    row: int
    marker_ids: dict[str, int]
    truncate: bool
    counts: Counter

    def __post_init__(self):
        self.space = self.row - (self.marker_ids["end"] < 0)
        # sorted: free tokens, a number that makes the tuple unique, samples
        self.open: list[tuple[int, int, list[np.ndarray]]] = []

    def add(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Adds a sample (n,). Returns the row that had to be closed for it, if any, as a list."""
        prompt = 1 + int((tokens == self.marker_ids["response"]).argmax())
        too_long = len(tokens) > self.space
        dropped = None
        if len(tokens) - (self.marker_ids["end"] >= 0) == prompt:
            dropped = "responses that are empty or not to be learned"
        elif prompt >= self.row:
            dropped = "too long prompts"
        elif too_long and not self.truncate:
            dropped = "too long responses"
        if dropped:
            self.counts[dropped] += 1
            return []
        if too_long:
            self.counts["truncated responses"] += 1
            tokens = tokens[:self.row]
        if prompt == 2:  # only the start token and the response marker
            self.counts["empty prompts"] += 1
        self.counts["samples"] += 1
        self.counts["tokens"] += len(tokens)
        at = bisect.bisect_left(self.open, (len(tokens),))
        free, number, samples = self.open.pop(at) if at < len(self.open) else (
            self.space, self.counts["samples"], [])
        bisect.insort(self.open, (free - len(tokens), number, [*samples, tokens]))
        return self.close(1) if len(self.open) > self.WINDOW else []

    def close(self, count: int) -> list[np.ndarray]:
        """Closes the `count` fullest open rows and returns them, (row,) each."""
        rows = []
        for *_, samples in self.open[:count]:
            used = np.concatenate(samples)
            rows.append(np.pad(used, (0, self.row - len(used)), constant_values=self.marker_ids["start"]))
        del self.open[:count]
        return rows


@dataclass
class ShardWriter:
    """Collects tokens and writes them as shards in a thread. Pairs are packed into rows; a shard of pairs
    ends with an additional start token, because a row is read with the token after it. All splits are
    committed together, so resuming needs only one position: the end of the newest shard.
    """

    MOST_SETS = 16  # limit on validation sets

    directory: Path
    manifest: dict
    thread: ThreadPoolExecutor
    reading: dict  # Source.reading, which the manifest records

    def __post_init__(self):
        shards = self.manifest["shards"]
        self.position = shards[-1]["end"] if shards else [0, 0]  # [document, piece]
        self.splits = {shard["split"] for shard in shards}
        self.packers: dict[str, Packer] = {}
        self.writing = self.thread.submit(lambda: None)  # the newest write, a Future
        self.lost = Counter(self.manifest.get("lost"))  # see HuggingFaceTokenizer.lost_in
        self.counts = Counter(self.manifest.get("pairs"))
        if not self.counts:
            self.counts["read"] = total(shards, "tokens", "train")  # before packing
            self.counts["documents"] = total(shards, "documents")
        self._begin_shard()

    def _begin_shard(self):
        self.arrays = defaultdict(list)
        self.tokens = Counter()
        self.documents = Counter()

    def add(self, document: int, piece: int, split: str, tokens: np.ndarray):
        settings = self.manifest["settings"]
        arrays = [tokens]
        self.splits.add(split)
        if len(self.splits - {"train"}) > self.MOST_SETS:
            raise UserError(f"--val-field {settings['val_field']} has more than {self.MOST_SETS} values, and "
                            "each would be a validation set: give another field, or leave the flag out.")
        if marker_ids := self.manifest.get("roles"):
            if split not in self.packers:
                truncate = settings["long"] == "truncate"
                self.packers[split] = Packer(settings["row"], marker_ids, truncate, self.counts)
            arrays = self.packers[split].add(tokens)
        self.arrays[split] += arrays
        self.tokens[split] += len(tokens)
        self.documents[split] += piece == 0
        self.counts["read"] += len(tokens) if split == "train" else 0
        self.counts["documents"] += piece == 0
        self.position = [document, piece + 1]
        if self.tokens[split] >= settings["shard_tokens"]:
            self.commit()

    def commit(self, complete: bool = False):
        """Starts writing the collected tokens in the thread. Raises the error of the previous write, if it
        failed.
        """
        self.writing.result()
        for split, packer in self.packers.items():
            rows = self.arrays[split]
            rows += packer.close(Packer.WINDOW)
            if rows:
                rows.append(rows[0][:1])
        if not (complete or any(self.arrays.values())):
            return  # all pairs so far were dropped; without a shard, there is nowhere to record the position
        if self.packers:
            self.manifest["pairs"] = dict(self.counts)
        self.manifest["reading"] = dict(self.reading)
        if self.lost:
            self.manifest["lost"] = dict(self.lost)
        self.writing = self.thread.submit(self._write, self.arrays, self.documents, self.position, complete)
        self._begin_shard()

    def _write(self, arrays: dict, documents: Counter, position: list, complete: bool):
        shards = self.manifest["shards"]
        number = int(shards[-1]["file"][-10:-4]) + 1 if shards else 0
        for split, parts in sorted(arrays.items()):
            if parts:
                file = f"{split}_{number:06d}.bin"
                digest = write_shard(self.directory / file, parts, self.manifest["dtype"])
                shards.append({"split": split, "file": file, "tokens": sum(map(len, parts)),
                               "documents": documents[split], "sha256": digest, "end": position})
        self.manifest["complete"] = complete
        write_manifest(self.directory, self.manifest)
