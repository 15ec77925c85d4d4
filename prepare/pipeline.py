"""From a source to a directory of shards. After a kill, it resumes after the last shard that was written."""

import contextlib
import hashlib
import itertools
import math
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cli.errors import UserError, joined, say
from cli.files import cpu_count, lock_file, not_made, sha256_of, write_atomically
from data import FILE_PREFIXES, SHORT_NAMES, in_order, read_manifest, read_tokenizer
from prepare.packing import ShardWriter, shard_dtype, total, write_manifest
from prepare.sources import (
    BLOCK,
    LARGEST_READ,
    LARGEST_ROW,
    TASK_ROW,
    TASK_TOKENS,
    UNTRAINED,
    Source,
    find_files,
    identity_of,
    pieces,
    repository,
    stdlib_files,
)
from vocab.bpe import BPE_TRAIN_CHARS, train_bpe
from vocab.tokenizer import load_tokenizer, prompt_ids, with_markers
from vocab.vocabulary import EOT

# what to do about data without a validation set
HOLD_OUT_MORE = ("into another directory, with --val-split hash:0.5 (for a text: source tail:0.1) or with "
                 "more documents")
LIMITS = "max_tokens max_samples min_words".split()  # flags that leave out a part of the data
LINE_EVERY = 30  # seconds between the lines that `prepare` prints if it shows no progress bar


def default_tokenizer(dataset: str) -> str:
    """The tokenizer of a source if --tokenizer is not given."""
    return {"stdlib": "bpe:4096", "task": "bytes"}.get(dataset.partition(":")[0], "gpt2")


def directory_of(data: str, flags: dict) -> Path:
    """The directory of a --data: itself, or the one that a source is prepared in with these flags, such as
    shards/quijote-bpe4096 for text:books/quijote.txt. With --max-tokens 20k it is
    shards/quijote-bpe4096-20000-tokens, so a smoke test doesn't decide what the next run reads.
    """
    if Path(data).is_dir() or (":" not in data and os.sep in data and not Path(data).is_file()):
        return Path(data)

    def name_of(path, no_name, otherwise):
        names = (path.stem, *reversed(path.parts[:-1]))
        return next((name for name in names if not re.fullmatch(no_name, name)), otherwise)

    prefix, _, where = data.partition(":")
    source = data if prefix == "task" else where or prefix
    if prefix in FILE_PREFIXES:  # books/*.txt is named `books`
        source = name_of(Path(where), r"\W*", prefix)
    tokenizer = flags["tokenizer"] or default_tokenizer(data)
    if os.path.exists(tokenizer):  # runs/any/hf/tokenizer.json is named `any`
        tokenizer = name_of(Path(tokenizer), "tokenizer|hf", "tokenizer")
    limits = "".join(f"-{flags[name]}-{name[4:]}" for name in LIMITS if flags.get(name))
    return Path("shards",
                re.sub(r"[^\w.]+", "-", f"{source}-{tokenizer.replace(':', '')}{limits}").strip("-"))


def prepare(dataset: str, out: Path | None = None, tokenizer_name: str | None = None,
            workers: int | None = None, **options) -> Path:
    """Tokenizes `dataset` into shards in the directory `out`, and returns it. `options` are flags of
    `data.py prepare`, see `settings_of`. After a kill, the same call resumes. Neither resuming nor the number
    of workers changes the bytes. Raises UserError.
    """
    tokenizer_name = tokenizer_name or default_tokenizer(dataset)
    out = Path(out or directory_of(dataset, options | {"tokenizer": tokenizer_name}))
    settings = {"source": "", "tokenizer": tokenizer_name} | settings_of(dataset, **options)
    source = Source(dataset, settings)  # keeps this dict, which is completed below
    settings["source"] = source.identity
    with lock_directory(out), ThreadPoolExecutor(1) as thread:  # the thread ends before the lock is released
        manifest = read_manifest(out)
        if not manifest or not manifest["shards"]:
            manifest = start_manifest(out, source)
        recorded = manifest["settings"]
        settings["source"] = current_identity(source, out)
        settings["row"] = settings["row"] or manifest.get("row")
        for key in recorded | settings:
            before = recorded.get(key)
            now = settings.get(key)
            if before != now:
                raise UserError(f"{out} was prepared with another {key} ({before}, now {now}): delete "
                                "that directory, or give data.py prepare another --out.")
        tokenizer = read_tokenizer(out, manifest, tokenizer_name)
        if manifest["complete"]:
            say(f"{out} is already prepared: {describe(manifest)}")
            return out
        source.reading |= manifest.get("reading", {"quoted": True})  # the default until 2026-11-28
        if manifest["shards"]:
            say(f"{out} resumes after {len(manifest['shards'])} shards")
        writer = ShardWriter(out, manifest, thread, source.reading)
        tokenize(writer, source, tokenizer, workers or cpu_count())
        held_out = source.settings["val_split"] == "hash:1"  # all of it, beside another training set
        read = writer.counts["documents" if held_out else "read"]
        if not read or writer.packers and not writer.counts["samples"]:
            raise UserError(f"{dataset} holds no text to train on: its documents are empty, shorter than "
                            "--min-words, longer than --row, marked as not to be learned, or all in the "
                            "validation split; --val-split hash:0.000001 avoids the last.")
        writer.commit(complete=True)
        writer.writing.result()
    say(f"{out} is ready: {describe(manifest)}")
    return out


def settings_of(dataset: str, *, val_split: str | None = None, val_field: str | None = None,
                max_samples: int | None = None, max_tokens: int | None = None,
                min_words: int | None = None, text_field: str = "text", shard_tokens: int = 10**8,
                prompt_field: str | None = None, response_field: str | None = None,
                condition_field: str | None = None, row: int | None = None, long: str | None = None,
                split_on: str | None = None) -> dict:
    """The settings that determine, together with the text and the tokenizer, which bytes `prepare` writes.
    Fills in defaults. Raises UserError for options that conflict.
    """
    prefix, _, where = dataset.partition(":")
    task = prefix == "task"
    if val_split is None:
        files = find_files(f"{repository(dataset)[0]}/**" if prefix == "hf" else where)
        # each text file is one document, so a few of them cannot be split by a hash
        few = prefix == "text" and not split_on and len(files) < 100
        small = (0 < sum(path.stat().st_size for path in files) < 4e7
                 or (max_tokens or 1e9) < 1e7 or (max_samples or 1e9) < 1e4
                 # Linux distributions leave out the tests, which are more than half of the library
                 or prefix == "stdlib" and len(stdlib_files()) < 1000)
        fraction = UNTRAINED if task else 0.1 if small else 0.01
        val_split = "tail:0.1" if few else f"hash:{fraction}"
    if val_split.startswith("tail:") and max_samples:
        raise UserError("--max-samples cannot be used with --val-split tail:F (the default for few text "
                        "files), which reads the text to its end: use --max-tokens, or give fewer files.")
    if split_on and prefix != "text":
        raise UserError(f"--split-on is only for text: sources, not for {dataset}: leave the flag out.")
    if not 1 <= shard_tokens < 2**30:
        raise UserError("--shard-tokens must be between 1 and 1B.")
    for flag, limit in (("--max-samples", max_samples), ("--max-tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise UserError(f"{flag} must be 1 or more.")

    fieldless = prefix in ("text", "stdlib")
    if task:
        if not (max_tokens or max_samples):
            raise UserError(f"{dataset} is endless: limit it with --max-samples or --max-tokens.")
        val_field = val_field or "level"
    elif val_field and fieldless:
        raise UserError(f"{dataset} has no field {val_field}: --val-field is for csv:, tsv:, jsonl:, "
                        "parquet: and hf:.")
    pairs = task or prompt_field or response_field or condition_field
    if text_field != "text" and (pairs or fieldless):
        raise UserError(f"--text-field {text_field} would be ignored, because pairs and plain text have no "
                        "text field: leave the flag out.")
    if pairs and fieldless:
        raise UserError(f"{dataset} has no fields for pairs: use a csv:, tsv:, jsonl:, parquet: or hf: "
                        "source.")
    if pairs and not (task or prompt_field and response_field):
        raise UserError("pairs need both --prompt-field and --response-field: give both.")
    if pairs:
        if row is not None and row < 4:
            raise UserError("--row (a trainer's --seq-len) must be 4 or more.")
        row, long = row or (TASK_ROW if task else 0), long or "truncate"  # 0: row_for decides
    elif row or long:
        raise UserError("--row and --long are only for pairs: give --prompt-field and --response-field too.")
    return {"val_split": val_split, "val_field": val_field, "max_samples": max_samples,
            "max_tokens": max_tokens, "min_words": min_words or 0, "text_field": text_field,
            "shard_tokens": shard_tokens, "prompt_field": prompt_field, "response_field": response_field,
            "condition_field": condition_field, "row": row, "long": long, "split_on": split_on}


@contextlib.contextmanager
def lock_directory(out: Path):
    """A context that creates the directory of a data set and locks it for one process. Raises UserError if it
    cannot be written, or holds other files.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = sorted(name for name in os.listdir(out) if name[0] != "." and name != "tokenizer.json")
        if others and "manifest.json" not in others:
            raise UserError(f"{out} holds {others[0]} but no manifest: empty that directory, or give data.py "
                            "prepare another --out.")
        lock = open(out / ".lock", "a")  # "a", because a link's target must not be emptied
    except OSError as error:
        raise not_made(out, error, "give data.py prepare another --out")
    with lock:
        lock_file(lock, lambda: say(f"waiting for another process that is preparing {out}"))
        yield


def start_manifest(out: Path, source: Source) -> dict:
    """Writes tokenizer.json (trained here for bpe:N) and a manifest without shards; returns the manifest."""
    settings = source.settings
    name = settings["tokenizer"]
    if bpe := re.fullmatch(r"bpe:(\d+)", name):
        size = int(bpe[1])
        if not 300 <= size <= 1_000_000:
            raise UserError(f"{name} is out of range: use bpe:300 to bpe:1000000.")
        say(f"training {name} on {source.dataset}")
        texts = first_texts(source)
        (_, tokenizer), = in_order([texts], 1, train_bpe, size)  # in a thread, so that Ctrl-C works
        if tokenizer.num_ids < size:
            say(f"note: {name} has only {tokenizer.num_ids} ids, because the text is short")
    else:
        tokenizer = load_tokenizer(name)
    if source.pairs:
        tokenizer = with_markers(tokenizer)
        settings["row"] = settings["row"] or row_for(source, tokenizer)
    write_atomically(out / "tokenizer.json", tokenizer.to_json().encode())
    recorded = {"name": name, "sha256": sha256_of(out / "tokenizer.json"),
                "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot, "mask": tokenizer.mask}
    manifest = {"format": 1, "dataset": source.dataset, "settings": settings, "complete": False,
                "shards": [], "dtype": shard_dtype(tokenizer.vocab_size), "tokenizer": recorded,
                "reading": source.reading}
    if source.pairs:
        manifest |= {"row": settings["row"], "roles": tokenizer.marker_ids}
    manifest["whole"] = identity_of(source, LARGEST_READ)
    write_manifest(out, manifest)  # before the first shard: lock_directory refuses shards without a manifest
    return manifest


def check_loss(name: str, counts: Counter) -> str:
    """Returns a warning if a tokenizer has lost characters of a text, else "". Raises UserError if it has
    lost more than 1 % of them.
    """
    lost = counts["lost"] / max(counts["all"], 1)
    text = f"{name} loses {lost:.2%} of the characters of this text, because it has no tokens for them"
    if lost > 0.01:
        raise UserError(f"{text}: use another --tokenizer, such as gpt2 or bpe:N.")
    return f"WARNING: {text}" if lost else ""


def row_for(source: Source, tokenizer) -> int:
    """The default of --row: the multiple of 64, up to LARGEST_ROW, that holds the longest of the first 10,000
    pairs. Longer rows are bad for small data sets: they fill few of them, and a step would read the data
    several times.
    """
    arrays, _ = encode(itertools.islice(read_pieces(source), 10_000), source, tokenizer)
    return min(64 * (max(map(len, arrays), default=0) // 64 + 1), LARGEST_ROW)


def first_texts(source: Source) -> list[str]:
    """About the first BPE_TRAIN_CHARS characters of the training split."""
    texts = []
    budget = BPE_TRAIN_CHARS
    for *_, split, text in read_pieces(source):
        if split == "train":
            parts = text if source.pairs else [text]
            texts += parts
            budget -= sum(map(len, parts))
        if budget <= 0:
            break
    return texts


def tokenize(writer: ShardWriter, source: Source, tokenizer, workers: int):
    """Encodes the source from the writer's position to its end, or until there are max_tokens training
    tokens. There, a text is cut, and a pair is left out. With tail:F, the held-out text still follows.
    """
    from tqdm import tqdm  # comes with datasets
    settings = source.settings
    counts = writer.counts
    marks = 0
    limit = settings["max_tokens"]
    full = limit and counts["read"] >= limit
    progress = source.progress
    progress.done = 0  # first_texts and row_for may have read the beginning
    batches = in_batches(item for item in read_pieces(source, writer.position, counts["documents"])
                         if not full or item[2] != "train")
    lines = not sys.stderr.isatty() or os.environ.get("TQDM_DISABLE")
    said = time.monotonic()
    with tqdm(total=limit or progress.total, unit="tok" if limit else "B", unit_scale=True,
              disable=lines) as bar:
        for batch, (arrays, lost) in in_order(batches, workers, encode, source, tokenizer):
            for (document, piece, split, text), tokens, counted in zip(batch, arrays, lost):
                if full and (split == "train" or not source.tail):
                    continue
                if limit and split == "train":
                    left = limit - counts["read"]
                    full = len(tokens) >= left
                    if source.pairs and len(tokens) > left:
                        continue
                    tokens = tokens[:left]
                if counts["read"] < 10_000_000:  # only there, because it takes 8 % of the time with `bytes`
                    marks += str(text).count(EOT)  # str, because a pair is a tuple
                writer.lost += counted
                for passed in [number for number in source.states if number <= document]:
                    source.reading |= source.states.pop(passed)
                writer.add(document, piece, split, tokens)
            check_loss(tokenizer.name, writer.lost)
            if lines and time.monotonic() > said + LINE_EVERY:
                said = time.monotonic()
                say(f"{counts['read'] / 1e6:.1f}M tokens so far")
            bar.update((counts["read"] if limit else progress.done) - bar.n)
            if full and not source.tail:
                break
    if warning := check_loss(tokenizer.name, writer.lost):
        say(warning)
    if without := [name for name, times in progress.divided.items() if not times]:
        say(f"WARNING: --split-on {settings['split_on']!r} does not occur in {len(without)} of "
            f"{len(progress.divided)} files: {joined(without)}")
    if marks:
        say(f"note: {EOT} occurs {marks:,} times as plain text in the first 10M tokens; to divide a text: "
            f"source into documents there, use --split-on '{EOT}'")
    if progress.unread:
        say(f"note: fields and splits that were not read: {joined([*progress.unread])}")
    if not full and (without := progress.seen - counts["documents"]):
        say(f"note: {without:,} documents have no text or fewer words than --min-words")


def read_pieces(source: Source, position=(0, 0), samples: int = 0):
    """Yields (document, piece, split, text) from `position` on, until there are max_samples documents in all,
    including the `samples` before. A text is a string, or a tuple with the fields of a pair.
    """
    settings = source.settings
    fraction = float(settings["val_split"].partition(":")[2])
    first, skip = position
    samples -= skip > 0  # a document that is resumed in the middle is counted again below
    for document, (blocks, split, name) in enumerate(source.documents(first), first):
        if isinstance(blocks, tuple):
            blocks = [blocks]
        elif not source.pairs:
            blocks = pieces(blocks)
        for piece, text in enumerate(blocks):
            if piece == 0:
                content = whole(text)
                least = settings["min_words"]
                if content.isspace() or least and len(content.split()) < least:
                    break
                if samples == settings["max_samples"]:
                    return
                samples += 1
                if split is None:
                    split = "val" if hash64(text) < fraction * 2**64 else "train"
                if split == "val" and name:
                    split = f"val_{name}"
            if document > first or piece >= skip:
                yield document, piece, split, text
        source.progress.seen = document + 1


def hash64(text: str | tuple) -> int:
    """A number below 2^64 that depends only on the text. For a pair it depends only on the prompt, so no
    prompt is in both training and validation.
    """
    if isinstance(text, tuple):
        text = text[0]
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def whole(text: str | tuple) -> str:
    """One string for a text: itself, or the fields of a pair as lines."""
    return text if isinstance(text, str) else "\n".join(text)


def in_batches(items, chars: int = BLOCK // 2):
    """Yields lists of pieces or pairs with about `chars` characters together, as work for one thread."""
    batch = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(whole(item[-1]))
        if size >= chars:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def encode(items, source: Source, tokenizer) -> tuple[list[np.ndarray], list[Counter]]:
    """Returns the token ids of each piece, and what each loses (see HuggingFaceTokenizer.lost_in). The first
    piece of a document starts with end-of-text; a pair has markers instead. Raises UserError that names the
    document if it cannot be encoded.
    """
    arrays = []
    lost = []
    dtype = shard_dtype(tokenizer.vocab_size)
    for document, piece, split, text in items:
        try:
            if source.pairs:
                prompt, response, *condition = text
                parts = [prompt_ids(tokenizer, prompt, *condition), tokenizer.encode(response)]
                # for lost_in, which compares text: leave out the name of a special token
                text = prompt, response, *(c for c in condition if c not in tokenizer.specials)
                if (end := tokenizer.marker_ids["end"]) >= 0:
                    parts.append([end])
            else:
                parts = [[tokenizer.eot][:piece == 0], tokenizer.encode(text)]
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust is not an Exception
            reason = str(error).rstrip(".") if isinstance(error, UserError) else repr(error)
            raise UserError(f"{source.dataset}, document {document + 1}, cannot be encoded: {reason}.")
        arrays.append(np.concatenate(parts, dtype=dtype, casting="unsafe"))
        split = "train" if source.pairs else split  # nobody uses the bytes of pairs by split
        lost.append(tokenizer.lost_in(whole(text), arrays[-1], split))
    return arrays, lost


def describe(manifest: dict) -> str:
    """A line for the user about a prepared directory: tokens, documents and, for pairs, how full rows are."""
    shards = manifest["shards"]
    train = total(shards, "tokens", "train")
    val = total(shards, "tokens") - train
    text = (f"{train:,} training and {val:,} validation tokens of {manifest['tokenizer']['name']}, "
            f"{total(shards, 'documents'):,} documents")
    if not val:
        text += f" (nothing to evaluate: prepare it again {HOLD_OUT_MORE})"
    if counts := manifest.get("pairs"):
        fill = counts.get("tokens", 0) / max(train + val, 1)
        parts = [f"{counts[what]:,} {what}"
                 for what in sorted(counts.keys() - {"read", "documents", "tokens"})]
        text += f" in rows of {manifest['row']}, {fill:.1%} full: {', '.join(parts)}"
    return text


def locate(data: str, tokenizer_name: str | None, useful: int, local_rank: int, watch=lambda: None,
           row: int | None = None, say=say, **limits: int | None) -> Path:
    """Returns directory_of(data), after preparing it if necessary, up to `limits`, which has the LIMITS.
    Without max_tokens, a source on the hub is prepared up to `useful` tokens. Raises UserError if it was
    prepared with other limits. A limit of None counts as another one, unless `data` is a prepared directory.

    The first process of each node prepares. The others watch for the finished manifest instead of waiting in
    a collective, because preparing can take hours. Meanwhile, watch() raises an error if a process is lost.
    """
    out = directory_of(data, limits | {"tokenizer": tokenizer_name})
    manifest = read_manifest(out)
    # without shards, `prepare` failed early and starts over
    settings = manifest["settings"] if manifest and manifest["shards"] else {}
    prepared = out == Path(data)
    prefix = data.partition(":")[0]
    max_tokens = limits.get("max_tokens")
    endless = not max_tokens and (prefix in ("task", "hf") or data in SHORT_NAMES)
    for flag, limit in limits.items():
        before = settings.get(flag)
        # `out` is named after the limits, and for max_tokens of an endless source there is a note below
        if limit != before and (limit if prepared else before and not (endless and flag == "max_tokens")):
            raise UserError(f"{out} was prepared with another --{flag.replace('_', '-')} ({before}, now "
                            f"{limit}): to use it as it is, give --data {out} without that flag; otherwise "
                            "delete that directory, or give data.py prepare another --out, and use that.")
    if prepared:
        return out
    if prefix == "task":
        useful = TASK_TOKENS
        limits["row"] = row
    if local_rank > 0:
        while not (manifest and manifest["complete"]):
            watch()
            time.sleep(0.2)
            manifest = read_manifest(out)
        return out
    if settings:
        tokens = total(manifest["shards"], "tokens", "train")
        most = settings.get("max_tokens") or useful
        ended = manifest["complete"] and tokens < most
        if endless and useful > most and not ended:
            say(f"note: {out} is prepared up to {most:,} tokens, and this model would take {useful:,}: to "
                f"get them, begin another run with --max-tokens {useful}")
        if manifest["complete"]:
            check_source(data, out, settings)
            return out
    else:
        settings = limits | {"max_tokens": useful if endless else max_tokens}
        if endless and useful:
            say(f"{data} is prepared up to {useful:,} tokens: --max-tokens chooses another number")
    for key in ("source", "tokenizer"):  # in the settings of an unfinished manifest
        settings.pop(key, None)
    return prepare(data, out, tokenizer_name, **settings)


def current_identity(source: Source, out: Path) -> str:
    """The identity of a source that has shards in `out`. If a file is newer than the shards, this reads all
    files to see whether they have changed; if so, it returns an identity of their full content.
    """
    first_written = math.inf
    with contextlib.suppress(OSError):  # read_tokenizer raises an error about it
        first_written = (out / "tokenizer.json").stat().st_mtime
    if all(path.stat().st_mtime < first_written for path in source.files):
        return source.identity
    if source.progress.total >= LARGEST_READ:
        say(f"note: {source.dataset} is newer than {out}, and too large to be compared with it")
    whole = identity_of(source, LARGEST_READ)
    return whole if read_manifest(out).get("whole", whole) != whole else source.identity


def check_source(data: str, out: Path, settings: dict):
    """Raises UserError if `out` was prepared from other files than --data names now."""
    try:
        identity = current_identity(Source(data, settings), out)
    except (UserError, OSError) as error:  # the source is gone; the shards are enough
        return say(f"note: {str(error).rstrip('.')}; {out}, prepared before, is used")
    if identity != settings["source"]:
        raise UserError(f"{out} was prepared from another text ({settings['source']}, now {identity}): to "
                        f"continue with the old one, use --data {out}; for the new one, delete that "
                        "directory, or run data.py prepare with another --out and give that as --data; in "
                        "both cases train with another --out, where --init-from RUN starts from an earlier "
                        "run's weights.")
