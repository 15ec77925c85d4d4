"""Text in, shards of tokens on disk, batches out.

    python data.py prepare --dataset stdlib                                   # offline: Python's own source
    python data.py prepare --dataset 'text:books/*.txt' --tokenizer bpe:16384
    python data.py prepare --dataset wikipedia-es --tokenizer gpt2 --max-tokens 2B
    python data.py info   shards/stdlib-bpe4096        # what is in it
    python data.py verify shards/stdlib-bpe4096        # compare all bytes with their checksums; also of a run
    python data.py peek   shards/stdlib-bpe4096        # print a few rows as text

prepare/ implements these commands and writes the shards; this file reads them. A shard is a header followed
by an array of tokens (the format of llm.c and modded-nanogpt), and is memory-mapped. `prepare` can be killed
at any time, because the manifest lists the finished shards and where they end in the source. The order of
samples is a pure function of seed and position on any number of ranks, so a checkpoint stores only the number
of samples consumed. Functions import torch only where they need it, so that `prepare` starts five times
faster.

Sections of this file, and what uses them:

    shards    open_shard, read_manifest: prepare/ and the reading section
    order     shuffled, Masker: Loader, train_mlm
    reading   Dataset, Loader, validation_batches: the trainers and training/evaluation.py
"""

import contextlib
import errno
import functools
import inspect
import itertools
import math
import mmap
import re
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm  # comes with datasets

from cli.errors import UserError, joined, names_in, oserror_as_retryable, run_command
from cli.files import digest_json, read_json, sample_digest, sha256_of
from ops.documents import document_bounds
from vocab.tokenizer import load_tokenizer, parse_tokenizer_json, with_markers
from vocab.vocabulary import Vocabulary

# -----------------------------------------------------------------------------------------------------------
# Shards: 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens; as in llm.c.
# All machines that PyTorch has builds for are little-endian.

HEADER_BYTES = 1024
# What to do about a damaged file. `prepare` does nothing while the directory has its manifest.
HOW_TO_RESTORE = "copy it again, or delete its directory and prepare it again."
FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic and version


def map_file(file) -> mmap.mmap | bytes:
    """The content of an open file: memory-mapped, or read if its file system cannot map files (some FUSE)."""
    try:
        # private, because fewer file systems support shared mappings
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return file.read()


def open_shard(path: Path) -> np.ndarray:
    """Maps the tokens of a shard, (n,) uint16 or uint32. Raises UserError if header and length disagree."""
    try:
        with oserror_as_retryable(path), open(path, "rb") as file:
            content = map_file(file)
        header = np.frombuffer(content[:HEADER_BYTES].ljust(HEADER_BYTES), dtype="int32")
        size = len(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "too short")
        raise UserError(f"{path} cannot be read ({reason}): {HOW_TO_RESTORE}")
    dtype = next((d for d, magic in FORMATS.items() if tuple(header[:2]) == magic), None)
    if dtype is None:
        raise UserError(f"{path} is not a shard: the header that data.py and llm.c write is missing. Has it "
                        "2 bytes for each id (uint16, as nanoGPT's) or 4 (int32)? To convert it, make a "
                        "directory x and run python -c \"import numpy; from pathlib import Path; from "
                        "prepare.packing import write_shard; write_shard(Path('x/train_000000.bin'), ["
                        "numpy.fromfile('train.bin', 'uint16')], 'uint32')\", and likewise for val.bin with "
                        "x/val_000000.bin (.npy: numpy.load('train.npy').ravel(); .idx: its .bin).")
    expected = HEADER_BYTES + int(header[2]) * np.dtype(dtype).itemsize  # bytes
    if size != expected:
        raise UserError(f"{path} has {size} bytes instead of {expected}: {HOW_TO_RESTORE}")
    return np.frombuffer(content, dtype, offset=HEADER_BYTES)


def check_types(part: dict, **types: type):
    """Raises ValueError or KeyError unless `part` has these names with values of these types."""
    for name, expected in types.items():
        if not isinstance(part[name], expected):
            raise ValueError(f"{name} is of the wrong type")


def read_manifest(directory: Path) -> dict | None:
    """The manifest of a prepared directory, None if it has none. Raises UserError if it is malformed."""
    path = directory / "manifest.json"
    try:
        manifest = read_json(path)
        check_types(manifest, dataset=str, settings=dict, complete=bool, dtype=str, tokenizer=dict,
                    shards=list)
        check_types(manifest["tokenizer"], name=str, sha256=str, vocab_size=int, eot=int, mask=int)
        if "roles" in manifest:
            check_types(manifest, row=int, roles=dict)
            check_types(manifest["roles"], start=int, response=int, end=int)
        if manifest["format"] != 1:
            raise ValueError("another format")
        for shard in manifest["shards"]:
            check_types(shard, tokens=int, documents=int, sha256=str, end=list)
            # so that it cannot be a path to another directory
            match = re.fullmatch(r"(train|val|val_[\w-]+)_[0-9]{6}\.bin", shard["file"])
            if not match or match[1] != shard["split"]:
                raise ValueError(f"the shard name {shard['file']!r}")
        if manifest["checksum"] != manifest_digest(manifest):
            raise ValueError("its checksum is wrong")
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}): delete {directory} and prepare it again.")


def manifest_digest(manifest: dict) -> str:
    """The checksum of a manifest, which is stored in it."""
    return digest_json(manifest | {"checksum": None})


def read_tokenizer(directory: Path, manifest: dict, name: str | None = None) -> Vocabulary:
    """The tokenizer in a prepared directory. Raises UserError if its file has changed since, or if `name`
    names another tokenizer.
    """
    path = directory / "tokenizer.json"
    recorded = manifest["tokenizer"]
    digest = None
    with contextlib.suppress(FileNotFoundError):
        digest = sha256_of(path)
    if digest != recorded["sha256"]:
        raise UserError(f"{path} is missing or has changed: {HOW_TO_RESTORE}")
    tokenizer = parse_tokenizer_json(recorded["name"], path.read_text(encoding="utf-8"))
    tokenizer.eot = recorded["eot"]  # the rows contain this id, even if today's code would choose another
    if name is None or name == recorded["name"] and not Path(name).exists():
        return tokenizer
    named = None if name.startswith("bpe:") else load_tokenizer(name)  # bpe:N depends on its training text
    if named and "roles" in manifest:
        named = with_markers(named)
    if not named or named.to_json() != tokenizer.to_json():
        raise UserError(f"{directory} was made with the tokenizer {recorded['name']}, not with {name} as it "
                        "is now: leave out --tokenizer, or prepare the data in another directory.")
    return tokenizer


def packed_row_length(directory: str | Path) -> int | None:
    """Tokens per row of a directory of pairs; None if it holds none."""
    with contextlib.suppress(UserError):  # a damaged manifest is reported later, to all ranks
        return (read_manifest(Path(directory)) or {}).get("row")


def in_order(batches, workers: int, function, *arguments):
    """Yields (batch, function(batch, *arguments)) for each batch, in order. The function runs in `workers`
    threads, about 2 · workers batches ahead. Threads help because tokenizers release the GIL.
    """
    pool = ThreadPoolExecutor(workers)
    submitted = ((batch, pool.submit(function, batch, *arguments)) for batch in batches)
    try:
        ahead = deque(itertools.islice(submitted, 2 * workers))
        while ahead:
            ahead.extend(itertools.islice(submitted, 1))
            batch, result = ahead.popleft()
            yield batch, result.result()
    finally:  # don't wait, so that Ctrl-C ends the process at once
        pool.shutdown(wait=False, cancel_futures=True)


# -----------------------------------------------------------------------------------------------------------
# Order: which rows are in which batch. A pure function of the seed and the number of samples consumed.


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Hashes uint64 values (Steele, Lea and Flood, 2014). Even close inputs give unrelated outputs."""
    x = x + 0x9E3779B97F4A7C15
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Elements `index` (int64 array, each in [0, n)) of the permutation of range(n) for (seed, epoch).

    The method is a Feistel network with four rounds on an even number of bits, applied again while a result
    is outside [0, n) (cycle walking; Black and Rogaway, 2002). It stores nothing, however large n is.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = splitmix64(splitmix64(np.array([seed % 2**64], np.uint64)) ^ epoch)
    keys = splitmix64(key ^ np.arange(4, dtype=np.uint64))

    def encrypt(x):
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (splitmix64(right ^ k) & mask)
        return left << half | right

    x = encrypt(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = encrypt(x[outside])
    return x.astype(np.int64)


def shuffled(positions: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """The rows (n,) of the samples at `positions` (n,), int64 both, in endless epochs, each in
    another order. Position p is in epoch p // rows.
    """
    epochs = positions // rows
    permuted = np.empty_like(positions)
    for epoch in np.unique(epochs):
        permuted[epochs == epoch] = permute(positions[epochs == epoch] % rows, rows, seed, int(epoch))
    return permuted


class Masker:
    """Chooses the tokens to mask and predict, as a pure function of seed, epoch, row and position.

    In each row it picks the K = rate · seq_len positions with the smallest hashes, but no special ids. K is
    fixed, so all batches have the same shape. 80 % of the picked tokens become [MASK], 10 % become a random
    id, and 10 % stay as they are (Devlin et al., 2019).
    """

    def __init__(self, tokenizer, seq_len: int, rate: float, seed: int):
        self.k = max(1, round(rate * seq_len))
        self.mask = tokenizer.mask
        self.positions = np.arange(seq_len, dtype=np.uint64)
        self.seed = splitmix64(np.array([seed], np.uint64) ^ 0x6D61736B)
        self.special = np.zeros(tokenizer.num_ids, dtype=bool)
        self.special[list(tokenizer.specials.values())] = True
        self.ordinary = np.flatnonzero(~self.special)

    def __call__(self, x: np.ndarray, rows: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Masks x (B, T) in place. Returns the picked positions, ascending, and their labels, int64 (B, K)
        each. If a row has fewer than K ordinary tokens, the other labels are −1, which the loss ignores.
        """
        if x.max() >= len(self.special):
            raise ValueError(f"the tokenizer has no id {x.max()}: set dataset.masker_class in change_data.")
        of_row = splitmix64(splitmix64(self.seed ^ epochs.astype(np.uint64)) ^ rows.astype(np.uint64))
        hashes = splitmix64(of_row[:, None] ^ self.positions)  # (B, T)
        order = np.where(self.special.take(x), np.uint64(2**64 - 1), hashes)
        low = np.uint64((1 << (x.shape[1] - 1).bit_length()) - 1)  # the low bits hold the position
        order &= ~low
        order |= self.positions
        order.partition(self.k - 1, axis=1)
        picked = (order[:, :self.k] & low).astype(np.int64)
        picked.sort(axis=1)
        at = picked + np.arange(0, x.size, x.shape[1])[:, None]  # in the flat x
        old = x.take(at).astype(np.int64)
        ordinary = ~self.special.take(old)
        number, tenth = np.divmod(splitmix64(hashes.take(at)), 10)
        random = self.ordinary.take((number % len(self.ordinary)).astype(np.int64))
        new = np.where(tenth == 8, random, np.where(tenth == 9, old, self.mask))
        np.put(x, at, np.where(ordinary, new, old))
        return picked, np.where(ordinary, old, -1)


# -----------------------------------------------------------------------------------------------------------
# Reading


def label_mask(x: np.ndarray, marker_ids: dict[str, int], loss: str) -> np.ndarray:
    """Which positions of rows x (B, T) of pairs have a label to learn, bool (B, T). With `loss` "response",
    these are the positions from <|response|> on; with "all", whole samples. Never learned are the last
    position of a row, an `end` token (nothing follows it), and padding (documents of just a `start` token).
    """
    import torch
    t = np.arange(x.shape[1])
    idx = torch.from_numpy(x.astype(np.int64))
    response = document_bounds(idx, marker_ids["start"], marker_ids["response"])[2].numpy()
    some = (response >= 0) & (x != marker_ids["end"]) & (t < len(t) - 1)
    return some & (t >= response) if loss == "response" else some


def check_ids(path: Path, tokens: np.ndarray, tokenizer):
    """Raises UserError if `tokens` of a file contain an id that the tokenizer (None: any) lacks."""
    if tokenizer and (largest := int(tokens.max(initial=0))) >= tokenizer.vocab_size:
        raise UserError(f"{path} holds the id {largest}, but {tokenizer.name} has {tokenizer.vocab_size} "
                        f"ids: give the right --tokenizer, or {HOW_TO_RESTORE}")


class Shards:
    """Token files as rows x of `seq_len` tokens, and labels y. A label is the next token, or −1 where
    `label_mask`, a function of x, is False. A row never spans two files; tokens that fill no row are not
    used. A file that is listed twice counts twice. Reading a row raises UserError if it has an id that the
    tokenizer lacks.
    """

    def __init__(self, paths: list[Path], seq_len: int, label_mask=None, tokenizer=None):
        self.paths = paths
        self.tokenizer = tokenizer
        self.tokens = [open_shard(path) for path in paths]
        self.seq_len = seq_len
        self.dtype = self.tokens[0].dtype
        self.label_mask = label_mask
        if any(tokens.dtype != self.dtype for tokens in self.tokens):
            raise UserError(f"{paths[0].parent} mixes 16-bit and 32-bit shards: prepare it again.")
        self.num_tokens = sum(map(len, self.tokens))
        self.rows = 0
        self.grids = []  # per file: its first row, its rows (n, T), and the token after each row (n,)
        for tokens in self.tokens:
            n = max(len(tokens) - 1, 0) // seq_len
            rows = tokens[:n * seq_len].reshape(n, seq_len)
            self.grids.append((self.rows, rows, tokens[seq_len::seq_len][:n]))
            self.rows += n

    def take(self, rows: np.ndarray, x: np.ndarray, y: np.ndarray):
        """Copies rows (B,), int64 and ascending, into x (B, T), and their labels into y (B, T), int32."""
        begin = 0
        for path, (first, grid, following) in zip(self.paths, self.grids):
            end = rows.searchsorted(first + len(grid))
            if begin < end:
                local = rows[begin:end] - first
                grid.take(local, 0, x[begin:end], "clip")  # the default mode, "raise", would buffer x
                check_ids(path, x[begin:end], self.tokenizer)
                check_ids(path, following[local], self.tokenizer)
                y[begin:end, -1] = following[local]
                begin = end
        if begin < len(rows):
            raise IndexError(f"row {rows[-1]} of {self.rows}")
        y[:, :-1] = x[:, 1:]
        if self.label_mask:
            y[~self.label_mask(x)] = -1


def unigram_entropy(sets: list[Shards], limit: int = 2_000_000) -> float:
    """Entropy in nats of the frequencies of about the first `limit` labels. This is the loss of the best
    model that ignores all context. For text it doesn't depend on the row length.
    """
    labels = []
    for shards in sets:
        if type(shards) is Shards and not shards.label_mask:
            shards = Shards(shards.paths, 1, tokenizer=shards.tokenizer)
        _, y = read_rows(shards, np.arange(min(limit // len(sets) // shards.seq_len + 1, shards.rows)))
        labels.append(y[y >= 0])
    counts = np.bincount(np.concatenate(labels))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def refuse_unlike(contents: dict[Path, tuple[dict, Vocabulary]]):
    """Raises UserError unless all directories have the same tokenizer and marker ids."""
    (first, (manifest, tokenizer)), *others = contents.items()
    ids = tokenizer.to_json(), tokenizer.eot, manifest.get("roles")
    for directory, (other, its_tokenizer) in others:
        if (its_tokenizer.to_json(), its_tokenizer.eot, other.get("roles")) != ids:
            raise UserError(f"{directory} and {first} have different tokenizers, or only one has "
                            "pairs: prepare one with the --tokenizer and fields of the other.")


def files_of_sets(manifests: dict[Path, dict]) -> dict[str, list[Path]]:
    """The files of each validation set by its name: the split val_NAME is the set NAME, and val is "". With
    several directories, the directory's name is put in front if the set has no name or if two directories
    have a set of that name.
    """
    splits = Counter(split for manifest in manifests.values()
                     for split in {shard["split"] for shard in manifest["shards"]})
    folders = Counter(directory.name for directory in manifests)
    sets = defaultdict(list)
    for directory, manifest in manifests.items():
        label = directory.name if folders[directory.name] == 1 else str(directory)
        for shard in manifest["shards"]:
            split = shard["split"]
            name = split[4:]
            if splits[split] > 1 or len(manifests) > 1 and not name:
                name = f"{label}-{name}".strip("-")
            if split != "train":
                sets[name].append(directory / shard["file"])
    return dict(sets)


class Dataset:
    """Directories of shards as rows of `seq_len` tokens. A directory that is listed twice is read twice per
    epoch.

    * `train`: Shards; `val`: Shards by the name of the validation set, "" if it has none
    * `tokenizer`, and `marker_ids`: its ids for `start`, `response` and `end` of a sample (−1: none)
    * `masker_class`: makes the masks of a masked language model; a trainer can replace it
    * `name`, and `fingerprint`, which is the same on all machines that have the same data

    Raises UserError if a directory is damaged, unfinished or too small, or has another tokenizer than the
    first.
    """

    masker_class = Masker
    vocab_size = None  # a trainer sets it if its rows have other ids than the tokenizer's

    def __init__(self, directories: list[Path], seq_len: int, tokenizer_name: str | None = None,
                 loss: str | None = None):
        contents = {directory: read_directory(directory, seq_len, tokenizer_name)
                    for directory in dict.fromkeys(directories)}
        refuse_unlike(contents)
        manifests = {directory: manifest for directory, (manifest, _) in contents.items()}
        first, self.tokenizer = contents[directories[0]]
        self.name = "+".join(directory.name for directory in directories)
        self.marker_ids = first.get("roles", {"start": self.tokenizer.eot, "response": -1, "end": -1})
        pairs = self.marker_ids["response"] >= 0
        if loss == "response" and not pairs:
            raise UserError("--loss response needs pairs: leave it out, or prepare the data with "
                            "--prompt-field and --response-field.")
        self.loss = loss or ("response" if pairs else "all")
        which = functools.partial(label_mask, marker_ids=self.marker_ids, loss=self.loss) if pairs else None
        read = functools.partial(Shards, seq_len=seq_len, label_mask=which, tokenizer=self.tokenizer)
        train = [directory / shard["file"] for directory in directories
                 for shard in manifests[directory]["shards"] if shard["split"] == "train"]
        names = ", ".join(map(str, contents))
        if not train:
            raise UserError(f"{names} holds no training shards: add a directory that does, --data TRAIN,VAL.")
        self.train = read(train)
        if not self.train.rows:
            raise UserError(f"{names} is too small: {self.train.num_tokens} training tokens do not fill a "
                            f"row of {seq_len}; lower --seq-len or prepare more text.")
        sets = {name: read(paths) for name, paths in files_of_sets(manifests).items()}
        self.val = {name: shards for name, shards in sets.items() if shards.rows}
        self.short = [name or "val" for name, shards in sets.items() if not shards.rows]  # than a row
        for shards in (self.train, *self.val.values()):
            first = shards.paths[0]
            counted = manifests[first.parent].get("lost", {})
            split = first.name[:-10]  # such as "val_"
            unknown = 1 if self.tokenizer.exact else math.nan
            ratio = counted.get(f"{split}bytes", unknown) / counted.get(f"{split}tokens", 1)
            # bytes of the text / bytes that its tokens spell; NaN if `prepare` has not counted them
            shards.byte_ratio = 1 if abs(ratio - 1) < 5e-4 else ratio
        self.manifest = [*manifests.values()][-1]  # of the last directory
        # if these differ, a document that is in two directories may be both trained on and held out
        self.val_splits = {split if split.startswith("hash:") else f"{split} of {directory}"
                           for directory, manifest in manifests.items()
                           if (split := str(manifest["settings"].get("val_split") or ""))}
        digests = [digest_of(manifests[directory]) for directory in directories]
        self.fingerprint = digests[0] if len(digests) == 1 else digest_json(digests)

    def check_sets(self, ids: float = math.inf):
        """Raises UserError if a set that a trainer has put here has no rows, or ids of another tokenizer.
        From now on reading it raises ValueError for what isn't one of a model's `ids`.
        """
        for rows in (self.train, *self.val.values()):
            if not rows.rows:
                raise UserError("this trainer's change to the data leaves a set without rows: keep some "
                                "rows, or remove that set from dataset.val.")
            tokenizer = getattr(rows, "tokenizer", None) or self.tokenizer
            if tokenizer is not self.tokenizer and not self.vocab_size and (
                    tokenizer.to_json() != self.tokenizer.to_json()):
                raise UserError(f"{rows.paths[0].parent} has another tokenizer than the data of this run, or "
                                "only one of them has pairs: prepare both alike, with the same "
                                "tokenizer.json.")
            rows.ids = ids
            read_rows(rows, np.arange(1))  # raises if it cannot be read

    def too_short(self) -> str:
        """A sentence about the validation sets that are shorter than a row. There must be one."""
        return (f"an evaluation leaves out the validation set {joined(self.short)}, which is shorter than a "
                f"row of {self.train.seq_len} tokens: lower --seq-len in a new run or with --eval-only, or "
                "hold out more text")


def manifest_of_plain_shards(directory: Path, tokenizer_name: str | None) -> tuple:
    """A manifest for a directory without one, such as shards that llm.c wrote, and the tokenizer that was
    named. Raises UserError if the directory has no shards or no tokenizer was named.
    """
    paths = [directory / name for name in names_in(directory) if name.endswith(".bin")]
    if not paths:
        raise UserError(f"{directory} holds no data: prepare it first, or copy it here; for text files, "
                        f"give 'text:{directory}' or 'text:{directory}/*'; the sources are {SOURCES}.")
    if not tokenizer_name:
        raise UserError(f"{directory} has no manifest: name its tokenizer, as in --tokenizer gpt2.")
    tokenizer = load_tokenizer(tokenizer_name)
    val = r"(?<![a-z])(e?val|valid|validation)(?![a-z])"  # but not the end of "retrieval"
    shards = [{"split": "val" if re.search(val, path.name) else "train", "file": path.name, "documents": 0,
               "tokens": len(open_shard(path)), "sha256": sample_digest(path)} for path in paths]
    return {"dataset": str(directory), "settings": {}, "shards": shards,
            "tokenizer": {"name": tokenizer_name, "sha256": tokenizer_name}}, tokenizer


def read_directory(directory: Path, seq_len: int,
                   tokenizer_name: str | None = None) -> tuple[dict, Vocabulary]:
    """Manifest and tokenizer of a directory of shards. Checks the size of each shard, but not its checksum.
    Raises UserError if the directory is damaged or unfinished, or has pairs in rows of another length.
    """
    if manifest := read_manifest(directory):
        row = manifest.get("row")
        if row and seq_len not in (1, row):  # `data.py info` passes 1
            raise UserError(f"{directory} has rows of {row} tokens: use --seq-len {row}, or prepare it with "
                            f"--row {seq_len}.")
        if not manifest["complete"]:
            raise UserError(f"{directory} is not complete: run the prepare command that made it again.")
        tokenizer = read_tokenizer(directory, manifest, tokenizer_name)
    else:
        manifest, tokenizer = manifest_of_plain_shards(directory, tokenizer_name)
    for i, shard in enumerate(manifest["shards"]):
        tokens = open_shard(directory / shard["file"])
        if len(tokens) != shard["tokens"]:
            raise UserError(f"{directory / shard['file']} has {len(tokens)} tokens instead of "
                            f"{shard['tokens']}: {HOW_TO_RESTORE}")
        if i == 0:  # Shards.take checks the others when it reads them
            check_ids(directory / shard["file"], tokens[:1_000_000], tokenizer)
    return manifest, tokenizer


def digest_of(manifest: dict) -> str:
    """A digest of a directory's tokenizer and shards, from the checksums in its manifest."""
    shards = [[shard["file"], shard["sha256"]] for shard in manifest["shards"]]
    return digest_json([manifest["tokenizer"]["sha256"], *shards])


def read_rows(shards: Shards, rows: np.ndarray, epochs: np.ndarray | None = None,
              masker: Masker | None = None) -> list[np.ndarray]:
    """Returns x and labels (B, T) of `rows` (B,), which must ascend. With a masker, returns masked x (B, T),
    masked positions (B, K) and their labels (B, K); these also depend on `epochs` (B,).
    """
    x = np.empty((len(rows), shards.seq_len), shards.dtype)
    y = np.empty(x.shape, np.int32)
    if epochs is None:
        epochs = 0 * rows
    wanted = inspect.signature(shards.take).parameters  # a trainer's own Shards may want epochs
    shards.take(rows, x, y, *[epochs] * ("epochs" in wanted))
    if x.dtype.kind == "f" or x.min() < 0 or max(x.max(), y.max()) >= getattr(shards, "ids", math.inf):
        raise ValueError(f"rows have {x.dtype} from {x.min()} to {x.max()} and labels to {y.max()}, but a "
                         "model takes ids: whole numbers from 0 on, below dataset.vocab_size of change_data.")
    return [x, *masker(x, rows, epochs)] if masker else [x, y]


class Loader:
    """The endless training steps of one rank, read ahead by a thread.

    For each micro-batch, the ranks share the next batch × world_size positions of the global order. Rank r
    gets the r-th slice, sorted so that it reads forward through the files. `world` has the rank, world_size
    and device of this process, see ddp_utils.World. `samples` is the number that the run has consumed before.
    """

    def __init__(self, shards: Shards, batch: int, world, seed: int, samples: int = 0,
                 masker: Masker | None = None):
        self.shards = shards
        self.batch = batch
        self.seed = seed
        self.masker = masker
        self.position = samples + world.rank * batch  # this rank's first sample of the next step
        self.stride = batch * world.world_size
        self.device = world.device
        self._micro_batches = 0  # per step that is read ahead
        self._steps = None  # a generator, see in_order

    def step(self, micro_batches: int) -> tuple[int, list[tuple]]:
        """Reads the next step. Returns this rank's number of labels in it, and its micro-batches on `device`:
        (x, y), (B, T) each, or with a masker x (B, T), positions (B, K) and labels (B, K), all int64. Labels
        of −1 are ignored. Changing `micro_batches` discards what was read ahead. Raises what reading raised.
        """
        if micro_batches != self._micro_batches:
            self.close()
            positions = itertools.count(self.position, micro_batches * self.stride)
            self._steps = in_order(positions, 1, self._read, micro_batches)
            self._micro_batches = micro_batches
        position, (parts, labels) = next(self._steps)
        self.position = position + micro_batches * self.stride
        parts = to_device(parts, self.device)
        return labels, [tuple(part.long() for part in micro_batch) for micro_batch in zip(*parts)]

    def _read(self, position: int, micro_batches: int) -> tuple[list, int]:
        """Returns the step at `position` as tensors (micro_batches, B, …) on the CPU, and the number of its
        labels that count.
        """
        import torch
        batches = []
        for _ in range(micro_batches):
            samples = np.arange(position, position + self.batch)
            epochs = samples // self.shards.rows
            rows = shuffled(samples, self.shards.rows, self.seed)
            order = np.argsort(rows)
            batches.append(read_rows(self.shards, rows[order], epochs[order], self.masker))
            position += self.stride
        parts = [torch.from_numpy(np.stack(arrays)) for arrays in zip(*batches)]
        return parts, int((parts[-1] >= 0).sum())

    def close(self):
        """Ends the thread."""
        if self._steps:
            self._steps.close()


def to_device(parts: list, device) -> list:
    """Copies tensors to a device. To a GPU, the copy runs in the background, from pinned memory."""
    if device.type == "cuda":
        parts = [part.pin_memory() for part in parts]
    return [part.to(device, non_blocking=True) for part in parts]


def validation_batches(shards: Shards, batch: int, world, limit: int | None = None,
                       masker: Masker | None = None):
    """Yields this rank's batches of the first `limit` rows (None: all), in order. Batches have the form of
    Loader's and are read ahead. Every rank gets the same number of batches: rows past the last one are filled
    with labels of −1, which the loss ignores, so each row counts once on any number of ranks. Rank 0
    shows a progress bar.
    """
    import torch
    total = min(shards.rows, limit or shards.rows)
    stride = batch * world.world_size

    def read(begin: int) -> list:
        rows = np.arange(begin, begin + batch)
        arrays = read_rows(shards, np.minimum(rows, total - 1), np.zeros_like(rows), masker)
        arrays[-1][rows >= total] = -1
        return [torch.from_numpy(array.astype(np.int64)) for array in arrays]

    begins = range(world.rank * batch, -(-total // stride) * stride, stride)
    for _, parts in tqdm(in_order(begins, 1, read), "evaluation", len(begins), leave=False,
                         disable=world.rank or None):  # None: it's shown if stderr is a terminal
        yield tuple(to_device(parts, world.device))


def sources_of(data: str) -> list[str]:
    """The sources in a trainer's --data: one source, or several prepared directories divided by commas."""
    first, *others = data.split(",")
    return [first, *others] if others and Path(first).is_dir() and not Path(data).is_dir() else [data]


SHORT_NAMES = {  # name → REPO[:CONFIG] on the Hugging Face hub
    "imdb": "stanfordnlp/imdb",
    "wikipedia-en": "wikimedia/wikipedia:20231101.en",
    "wikipedia-es": "wikimedia/wikipedia:20231101.es",
    "c4": "allenai/c4:en",
    "c4-es": "allenai/c4:es",
    "fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT",
}
SOURCES = ("stdlib, task:addition, text:GLOB, csv:GLOB, tsv:GLOB, jsonl:GLOB, parquet:GLOB, "
           f"hf:REPO[:CONFIG], {', '.join(SHORT_NAMES)}")
FILE_PREFIXES = ("text", "csv", "tsv", "jsonl", "parquet")  # each has a reader in prepare/sources.py


def main():
    """Runs `python data.py`."""
    from prepare.command import NotPreparedError, command  # imports this file again, as the module `data`
    try:
        command()
    except NotPreparedError as error:  # to verify a run
        import ddp_utils  # and torch, for which the other commands don't wait
        ddp_utils.verify_checkpoints(error.args[0])


if __name__ == "__main__":
    run_command(main)
