"""Reads documents from files and from the Hugging Face hub. To add a source, write a reader, add it to
READERS, and add its prefix to FILE_PREFIXES in data.py.
"""

import bz2
import codecs
import contextlib
import csv
import datetime
import glob
import gzip
import itertools
import json
import lzma
import math
import numbers
import os
import random
import re
import shlex
import socket
import sys
import sysconfig
import urllib.parse
import urllib.request
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cli.errors import RetryableError, UserError, first_line, names_in, needed, oserror_as_retryable, say
from cli.files import digest_json, sample_digest, sha256_of
from data import FILE_PREFIXES, SHORT_NAMES, SOURCES, open_shard

BLOCK = 1 << 20  # bytes or characters per read; a piece has fewer than twice as many
LONGEST = 64 * BLOCK  # limit on the characters of a field of a table, or of an object in an array
# A line of a tsv in which each field that starts with a quote also ends with one. Group 1 matches if such a
# field contains a tab or a doubled quote.
CLOSED = r'(?:(?:^|\t)(?:"(?:[^"\t]++|(\t|""))*+"(?=\t|\r?\n?$)|(?!")[^\t]*+))*\r?\n?'
ASKS = "system developer user human tool function observation".split()  # roles of messages
ANSWERS = "assistant gpt chatgpt model function_call".split()
# Keys that say whether to learn a message, in OpenAI, Mistral, axolotl, ms-swift, Tinker and torchtune.
MARKS = "weight train training trainable learn loss loss_mask loss_scale train_detail masked".split()
# A mark and its value; group 1 matches if that means no. In tables, a missing mark is None, nan or [].
MARK = re.compile(r"(?i)(masked (true|1(\.0*)?)|(?!masked)\w+ (false|0(\.0*)?))|"
                  r"\w+ (true|false|[01](\.0*)?|none|nan|\[\])?")
LARGEST_READ = 4 << 30  # bytes; a larger source is not read again to see whether it has changed


@dataclass
class Progress:
    """How far a source has been read, and what was found in it."""

    done: int = 0  # bytes read, for the progress bar
    total: int | None = None  # bytes
    seen: int = 0  # documents that were read to their end, or skipped
    divided: Counter = field(default_factory=Counter)  # how often split_on occurred in each file
    unread: dict = field(default_factory=dict)  # names of fields and splits that are not used, in their order


@dataclass
class Conversation:
    """A list of messages in the form of OpenAI or ShareGPT. `where` names its place in errors."""

    where: str
    messages: list
    progress: Progress

    def pairs(self, condition: str = ""):
        """Yields (prompt, response, condition) for each answer that has something before it. The prompt is
        everything said before, one message per line. A system message at the start becomes the condition,
        unless `condition` is given. An answer that is marked as not to be learned gets an empty response, so
        that its prompt still counts. Raises UserError for something that is not a message, and for a mark
        that is neither yes nor no.
        """
        before = []
        for message in self.messages:
            try:
                role = message.get("role") or message["from"]
                content = message.get("content")
                if content is None:
                    content = message.get("value")
                if isinstance(content, list):
                    content = "".join(part["text"] for part in content)
                known = ANSWERS if content is None else ASKS + ANSWERS  # an answer may be only a tool call
                if role not in known:
                    raise KeyError(role)
            except (AttributeError, KeyError, TypeError):
                raise UserError(f"{self.where} has the message {str(message)[:100]}: it needs a role (or "
                                f"from) that is one of {', '.join(ASKS + ANSWERS)}, and a content (or value) "
                                "that is only text.")
            text = text_of(content, self.where)
            learned = True
            for name, value in message.items():
                if name in MARKS and role in ANSWERS:
                    mark = MARK.fullmatch(f"{name} {value}")
                    if not mark:
                        raise UserError(f"{self.where} has a message with the {name} {str(value)[:100]}: an "
                                        "answer is learned as a whole or not at all, so give true or false "
                                        "(or 1 or 0), or rename the key if it means something else.")
                    learned &= not mark[1]
                elif value not in (None, "", []) and name not in (*MARKS, *"role from content value".split()):
                    # put these first, because a table can have more fields than the note shows
                    self.progress.unread = {f"{name} of messages": None} | self.progress.unread
            if role in ("system", "developer") and not (before or condition):
                condition = text
                continue
            if role in ANSWERS and before:
                yield "\n".join(before), text if learned else "", condition
            if text:
                before.append(text)


class Source:
    """Documents in a fixed order, which can be read from any index on. `fields` names the field of the text,
    or for pairs the fields of prompt, response and optionally condition; the field of the validation set, if
    any, comes last. Resuming requires the same `identity`. Raises UserError if there is no such source.
    """

    def __init__(self, dataset: str, settings: dict):
        self.dataset = dataset
        self.settings = settings
        self.pairs = settings.get("row") is not None
        self.val_field = settings.get("val_field")
        names = ("prompt_field", "response_field", "condition_field") if self.pairs else ("text_field",)
        self.fields = [settings[name] for name in (*names, "val_field") if settings.get(name)]
        self.kind, self.files = find_source(dataset)
        # what the reader found out: a hub repository's revision and the state of datasets before a
        # `document`, and whether a tsv has quotes
        self.reading = {}
        self.states = {}  # number of the next document → what `reading` gets from datasets
        self.take_schema(None)
        self.progress = Progress(total=sum(path.stat().st_size for path in self.files) or None)
        self.identity = identity_of(self)
        if self.tail and self.kind != "text":
            raise UserError("--val-split tail:F needs a text: source, with a known length: use hash:F.")

    def take_schema(self, schema):
        """Keeps Arrow's schema of what is read next (None: it has none), and for each of the fields that are
        class labels the text of each value, from the metadata that datasets writes.
        """
        self.schema = schema
        self.labels = {}
        for name in self.fields:
            with contextlib.suppress(Exception):  # there is no such metadata
                names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][name]["names"]
                self.labels[name] = dict(enumerate(names))

    @property
    def tail(self) -> float | None:
        """The fraction F of --val-split tail:F; None with hash:F."""
        kind, _, fraction = self.settings["val_split"].partition(":")
        return float(fraction) if kind == "tail" else None

    def documents(self, start: int):
        """Yields (document, split, name of the validation set) from document `start` on. A document is an
        iterable of blocks of text, or a tuple with the fields of a pair, or a generator of such tuples, one
        for each answer of a conversation. If split is None, a hash of the text or first prompt decides.
        """
        named = {}  # name of a validation set → value of the field that it was made from
        documents = READERS[self.kind](self, self.progress)
        # skipped texts stay unread
        for texts, split in itertools.islice(documents, start - self.reading.get("document", 0), None):
            name = ""
            if self.val_field:
                *texts, value = texts
                name = re.sub(r"[^\w-]+", "-", value).strip("-") or "none"
                if named.setdefault(name, value) != value:
                    raise UserError(f"the values {named[name]!r} and {value!r} of {self.val_field} "
                                    f"would share the validation set val_{name}: rename one in the data.")
            if self.pairs:
                texts = tuple(texts)
                if isinstance(texts[0], Conversation):
                    texts = texts[0].pairs(*texts[2:])
            yield texts, split, name

    def texts(self, where, row: dict):
        """Yields the values of a row's `fields` as texts. For a list of messages, which is the field of both
        prompt and response, yields two Conversations. `where` names the row in errors.
        """
        for number, name in enumerate(self.fields):
            value = row
            kind = self.schema
            try:
                for part in [name] if name in row else name.split("."):
                    if value is not None:
                        value = value[part]
                        kind = hasattr(kind, "names") and kind.field(part).type
            except (KeyError, TypeError):
                inside = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
                raise UserError(f"{where} has no field {name!r}, because {part!r} is not in {inside}: name "
                                "another, or write a null where it is missing.")
            if name in self.labels:
                value = self.labels[name].get(value, value)
            if isinstance(value, float) and str(kind).endswith("float"):  # stored with 32 or 16 bits
                value = float(str(kind.to_pandas_dtype()(value)))  # 4.2, not 4.199999809265137
            messages = self.pairs and number < 2 and self.fields[:2] == [name, name]
            if messages and value is not None:
                yield Conversation(where, value if isinstance(value, list) else [value], self.progress)
            else:
                yield text_of(value, f"{where} field {name!r},")

    def checked_texts(self, where, row: dict | None, names=None):
        """Yields `texts` of a row after checking that it has the fields. `names` are the fields as the file
        lists them (default: the row's). Raises UserError if one is missing, or if the row is not a dict.
        """
        if not isinstance(row, dict):
            raise UserError(f"{where} is not JSON, is nested too deeply, is not an object, or has a name "
                            "twice: each line, or each item of one array (at most 64M characters), must be "
                            "one JSON object.")
        self.check_fields(where, names or row)
        yield from self.texts(where, row)

    def check_fields(self, where, there) -> list[str]:
        """The columns that contain the `fields`; for meta.text, that is meta. Raises UserError unless all are
        `there`, the names of the columns, exactly once.
        """
        columns = [name if name in there else name.partition(".")[0] for name in self.fields]
        self.progress.unread |= dict.fromkeys(name for name in there if name not in columns)
        if not (missing := [name for name, column in zip(self.fields, columns)
                            if [*there].count(column) != 1]):
            return [*dict.fromkeys(columns)]
        flag = "--prompt-field NAME --response-field NAME" if self.pairs else "--text-field NAME"
        if missing[0] == self.val_field:
            flag = "--val-field NAME"
        if tokenizer := self.settings.get("tokenizer"):
            flag = f"--tokenizer {shlex.quote(tokenizer)} {flag}"
        if missing[0] in there:
            raise UserError(f"{where} has the field {missing[0]!r} more than once: rename all but one.")
        raise UserError(f"{where} has no field {missing[0]!r}, only {', '.join(there)}: choose one with "
                        f"python data.py prepare --dataset {shlex.quote(self.dataset)} {flag} "
                        "and train on the directory that it makes. A row without the field needs a null "
                        "there; a field inside another is written with a dot, such as meta.text; the first "
                        "row of a table must name its fields.")


def find_source(dataset: str) -> tuple[str, list[Path]]:
    """The key of a data set in READERS, and its local files (none for a task or a hub repository). Raises
    UserError if the source is unknown or matches no file.
    """
    prefix, _, where = dataset.partition(":")
    if dataset == "task:addition":
        return prefix, []
    if dataset == "stdlib":
        return prefix, stdlib_files()
    if prefix in FILE_PREFIXES and where:
        if files := find_files(where, print):
            return prefix, files
        hint = f": for all files of a directory, give '{dataset}/*'" if Path(where).is_dir() else ""
        raise UserError(f"no file matches {where!r}{hint}; if it was prepared elsewhere, copy its directory "
                        "in shards/ to here.")
    if dataset in SHORT_NAMES or prefix == "hf" and where:
        return "hub", find_files(f"{repository(dataset)[0]}/**")  # hf: may name a local directory
    if Path(dataset).is_file():
        if dataset.endswith((".bin", ".idx", ".npy")):
            open_shard(Path(dataset))  # raises another UserError unless it's a shard, which NO_TEXT has
        # [:4], so that .json means jsonl
        likely = next((kind for kind in FILE_PREFIXES if f".{kind[:4]}" in dataset.lower()), "text")
        with unpacked(Path(dataset)):  # raises another UserError if the file has no text
            raise UserError(f"{dataset} is a file: use '{likely}:{dataset}', or one of the prefixes text:, "
                            "csv:, tsv:, jsonl: and parquet:.")
    raise UserError(f"unknown data set {dataset!r}: use {SOURCES}, or a prepared directory.")


def repository(dataset: str) -> list[str | None]:
    """The repository of a data set on the hub (or a local directory), and its configuration or None."""
    name = SHORT_NAMES.get(dataset) or dataset.removeprefix("hf:")
    return [*os.path.expanduser(name).split(":"), None][:2]


def identity_of(source, largest: int = 64 * BLOCK) -> str:
    """A string that identifies a data set and its version. If the files have `largest` bytes or more in all,
    only samples of each are read.
    """
    kind, dataset, files = source.kind, source.dataset, source.files
    if kind == "task":
        return f"{dataset}, the harder half of the levels held out"
    if not files:
        return ":".join(map(str, repository(dataset)))
    sizes = [[path.name, path.stat().st_size] for path in files]
    total = sum(size for _, size in sizes)
    digest = sha256_of if total < largest else sample_digest
    content = digest_json([kind == "hub" and dataset.partition(":")[2], *map(digest, files)])
    return f"{kind}, {len(files)} files, {total} bytes, {digest_json(sizes)[:16]}, content {content[:16]}"


# -----------------------------------------------------------------------------------------------------------
# Readers. For each document of a Source, a reader yields (texts, split or None), and adds what it has read to
# `progress`. Texts may be generators, which read when they are asked.


def read_stdlib(source, progress):
    for path in source.files:
        raw = path.read_bytes()
        progress.done += len(raw)
        try:
            yield [raw.decode()], None
        except UnicodeDecodeError:  # Python's own tests include a few files in other encodings
            yield [], None


def read_task(source, progress):
    """Generates sums; each is a function of its number. The level of a sum names its validation set. All sums
    of the harder half of the levels are held out.
    """
    for number in itertools.count():
        some = random.Random(f"addition {number}")
        untrained = some.random() < UNTRAINED
        level = some.randint(1, LEVELS // 2) + untrained * LEVELS // 2
        name = f"untrained-{level}" if untrained else f"trained-{level}"
        yield (*addition(some, level), name), "val" if untrained else None


def read_text(source, progress):
    """One document per file, or per part of a file between two --split-on, whose line ends may be those of
    Windows. With tail:F, the file at the boundary is divided.
    """
    split_on = source.settings.get("split_on")
    for path, begin, end, split in parts_of(source, progress):
        blocks = text_blocks(path, begin, end, progress)
        if not split_on:
            yield blocks, split
            continue
        any_line_end = re.escape(split_on.replace("\r\n", "\n")).replace("\\\n", "\r?\n")
        rest = ""
        for block in blocks:
            *texts, rest = re.split(any_line_end, rest + block)
            progress.divided[f"{path}"] += len(texts)
            for text in texts:
                yield [text], split
            if len(rest) > 64 * BLOCK:
                raise UserError(f"{path} has {len(rest):,} characters without a {split_on!r}: leave "
                                "--split-on out, or give the text that is between its documents.")
        yield [rest], split


def parts_of(source, progress):
    """Yields (path, begin, end, split) for each file, in bytes. With tail:F, the file at the boundary comes
    twice: its part to train on, and the rest, which is held out.
    """
    sizes = []
    for path in source.files:
        with unpacked(path) as (file, _):
            sizes.append(file.seek(0, os.SEEK_END))
    progress.total = sum(sizes)
    train_bytes = int(progress.total * (1 - (source.tail or 0)))
    for path, size in zip(source.files, sizes):
        if source.tail is None:
            yield path, 0, size, None
            continue
        cut = min(max(train_bytes, 0), size)
        with unpacked(path) as (file, _):
            file.seek(cut)
            cut += re.match(rb"[\x80-\xbf]*", file.read(BLOCK)).end()  # move to the start of a character
        if cut:
            yield path, 0, cut, "train"
        if cut < size:
            yield path, cut, size, "val"
        train_bytes -= size


def text_blocks(path, begin, end, progress):
    """Yields the text of a file from byte `begin` to `end` in blocks. Raises UserError unless it is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()  # -sig skips the BOM
    with unpacked(path) as (file, _):
        file.seek(begin)
        while raw := file.read(min(BLOCK, end - begin)):
            begin += len(raw)
            try:
                text = decoder.decode(raw, final=begin == end)
                refuse_zero(raw)
            except UnicodeDecodeError as error:
                at = begin - len(error.object) + error.start
                file.seek(0)
                line = 1 + sum(end <= at for end in itertools.accumulate(map(len, file)))
                raise not_utf8(path, f"byte {at + 1} in line {line}", error)
            progress.done += len(raw)
            yield text


def lines_of(path, progress):
    """Yields the lines of a file. Raises UserError unless it is UTF-8."""
    before = progress.done
    with unpacked(path) as (file, raw):
        for number, line in enumerate(file, 1):
            progress.done = before + raw.tell()
            try:
                text = line.decode("utf-8-sig", "surrogatepass")
                refuse_zero(line)
            except UnicodeDecodeError as error:
                raise not_utf8(path, f"byte {error.start + 1} of line {number}", error)
            yield text


def read_csv(source, progress):
    """Tables. The first row of each has the names of the fields."""
    csv.field_size_limit(LONGEST)
    tsv = source.kind == "tsv"
    if tsv and "quoted" not in source.reading:
        source.reading["quoted"] = quotes_enclose(source.files)
        say(f"quotes in {source.dataset} {'enclose fields' if source.reading['quoted'] else 'are text'}, "
            "judging by its first 1,000 rows")
    quoted = source.reading.get("quoted", True)
    for path in source.files:
        lines = lines_of(path, progress)
        head = next(lines, "")
        delimiter = "\t" if tsv else max(",;", key=head.count)
        if tsv and quoted:  # an unclosed quote would join lines, so give that line too many fields instead
            lines = (line if re.fullmatch(CLOSED, line) else delimiter * len(head) for line in lines)
        rows = csv.DictReader(itertools.chain([head], lines), delimiter=delimiter, strict=True,
                              quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
        try:
            for row in rows:
                if None in (*row, *row.values()):  # DictReader's mark for additional and for missing fields
                    raise csv.Error("it has more or fewer fields")
                yield source.checked_texts(f"{path}, line {rows.line_num},", row, rows.fieldnames), None
        except csv.Error as error:
            line = rows.reader.line_num  # rows.line_num is the row before
            raise UserError(f"{path}, line {line}, does not end a row like the first ({error}): use tsv: for "
                            "a table with tabs, and csv: for commas or semicolons. In a csv, put quotes "
                            "around a field that contains a separator, a quote or a line break, and double "
                            "the quotes inside it, as Python's csv.writer and spreadsheets do. In a tsv, "
                            "close or double each quote in the line where it opens; convert a table with "
                            "line breaks in its fields to csv.")


def quotes_enclose(files: list[Path]) -> bool:
    """Whether quotes enclose fields in a tsv, rather than being text. They do if, in the first 1,000 rows of
    each file, every field that starts with a quote closes in its row, and one of these fields contains a tab
    or a quote. Or all names of fields have quotes, as R writes them.
    """
    held = False
    for path in files:
        for number, line in enumerate(itertools.islice(lines_of(path, Progress()), 1001)):
            row = re.fullmatch(CLOSED, line)
            if not row:
                return False
            held |= row[1] is not None or number == 0 and all(name[:1] == '"' for name in line.split("\t"))
    return held


def read_jsonl(source, progress):
    """One JSON object per line, or a single array of objects."""
    for path in source.files:
        with unpacked(path) as (file, _):
            array = re.match(rb"(\xef\xbb\xbf)?\s*\[", file.peek(100))
        if array:
            for number, row in enumerate(json_array(path, progress), 1):
                yield source.checked_texts(f"{path}, item {number},", row), None
            continue
        for number, line in enumerate(lines_of(path, progress), 1):
            if not line.isspace():
                yield json_texts(source, f"{path}, line {number},", line), None


# Keeps numbers as written, reads NaN as missing, and returns an object with a repeated name as a list.
JSON = json.JSONDecoder(
    parse_float=str, parse_int=str, parse_constant=lambda text: text.replace("NaN", ""),
    object_pairs_hook=lambda pairs: named if len(named := dict(pairs)) == len(pairs) else pairs)


def json_texts(source, where, line):
    """Yields the texts of a line; parses it only when asked for the first."""
    row = None
    with contextlib.suppress(ValueError, RecursionError):
        row = JSON.decode(line)
    yield from source.checked_texts(where, row)


def json_array(path, progress):
    """Yields the items of the array in a file, which is read in blocks. Yields None where it is damaged."""
    text = ""
    for block in text_blocks(path, 0, math.inf, progress):
        text += block
        if len(text) > LONGEST:
            break
        end = 0
        with contextlib.suppress(ValueError, RecursionError):  # raised at the end of the block or the array
            while True:
                begin = re.compile(r"\s*[\[,]?\s*").match(text, end).end()
                row, end = JSON.raw_decode(text, begin)
                yield row
        text = text[end:]
    if "".join(text.split()) not in ("]", "[]"):
        yield None


def read_parquet(source, progress):
    with needed("pyarrow", source.dataset):
        from pyarrow import parquet
    for path in source.files:
        with readable(path):
            file = parquet.ParquetFile(path)
            source.take_schema(file.schema_arrow)
            columns = source.check_fields(path, file.schema_arrow.names)
            for batch in file.iter_batches(1000, columns=columns):
                yield from rows_of(source, path, batch.to_pydict())
        progress.done += path.stat().st_size


def read_hub(source, progress):
    name, configuration = repository(source.dataset)
    with readable(name):
        if not Path(name).exists():
            if not reachable(os.environ.get("HF_ENDPOINT") or "https://huggingface.co"):
                raise RetryableError(f"no network, so {name} cannot be read: use local files (text:, csv:, "
                                     "tsv:, jsonl:, parquet:) or the source stdlib, which every machine has, "
                                     "or copy its directory in shards/ from a machine that has prepared it.")
            import huggingface_hub
            # so that a resumed run reads the same files, even if the repository has changed
            source.reading.setdefault("revision", huggingface_hub.dataset_info(name).sha)
        if "torch" not in sys.modules:  # datasets would import it, which doubles its time and memory
            os.environ["USE_TORCH"] = "0"
            import datasets
            del os.environ["USE_TORCH"]
        import datasets  # takes 1.2 s
        splits = datasets.load_dataset(name, configuration, streaming=True,
                                       revision=source.reading.get("revision"))
        if "train" not in splits:
            raise UserError(f"{name} has no split train, only {', '.join(splits)}: name files, jsonl:FILE.")
        rows = splits.pop("train")
        progress.unread |= dict.fromkeys(splits)
        source.take_schema(rows.features and rows.features.arrow_schema)
        columns = source.check_fields(name, rows.column_names or next(iter(rows), source.fields))
        rows = rows.select_columns(columns)
        document = source.reading.get("document", 0)
        if document:
            rows.load_state_dict(source.reading["state"])
        # in batches, because single rows are far slower
        for batch in rows.iter(batch_size=1000):
            yield from rows_of(source, name, batch)
            document += len(batch[columns[0]])
            source.states[document] = {"document": document, "state": rows.state_dict()}


# The reader of each kind of data set. FILE_PREFIXES in data.py has the kinds that are files.
READERS = {"stdlib": read_stdlib, "task": read_task, "text": read_text, "csv": read_csv, "tsv": read_csv,
           "jsonl": read_jsonl, "parquet": read_parquet, "hub": read_hub}


@contextlib.contextmanager
def readable(name):
    """A context that turns an error into a UserError: `name` is missing, is damaged or needs a script."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # datasets, pyarrow and httpx raise many kinds
        reason = first_line(error).rstrip(".")
        raise UserError(f"{name} cannot be read ({reason}): check it, and run the same command again.")


def rows_of(source, where, batch):
    """Yields the documents of a batch, {field: values of its rows}."""
    for values in zip(*batch.values()):
        yield [*source.texts(where, dict(zip(batch, values)))], None


@contextlib.contextmanager
def unpacked(path: Path):
    """Opens a file that may be compressed. The context has (file with the decompressed content, the file
    itself, whose position shows the progress). Raises UserError if it contains no text, or if reading fails.
    """
    try:
        with oserror_as_retryable(path), open(path, "rb") as raw:
            head = raw.peek(10)
            file = next((unpack for magic, unpack in PACKED.items() if re.match(magic, head)), iter)(raw)
            for magic, what in NO_TEXT.items():
                if re.match(magic, file.peek(300), re.DOTALL):
                    raise UserError(f"{path} is {what}.")
            yield file, raw
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read to its end ({getattr(error, 'strerror', None) or error}): "
                        "check it, or copy it again.")


# By the first bytes of a file: how to open what is compressed, and what contains no text.
PACKED = {rb"\x1f\x8b": gzip.open, rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open, rb"\xfd7zX": lzma.open}
NO_TEXT = {rb"\x28\xb5\x2f\xfd": "compressed: decompress it with zstd -d, and give the new file",
           rb"PK\x03\x04": "a zip archive, like .docx, .xlsx and .epub: save a document as plain text or a "
                           "sheet as CSV (UTF-8), or unpack it with unzip",
           rb".{257}ustar|7z\xbc\xaf|Rar!\x1a": "an archive: unpack it, for example with tar xf, and give "
                                                  "the files in it",
           rb"%PDF-": "a PDF: convert it to text, for example with pdftotext",
           # numpy's, Megatron's, and a shard (FORMATS)
           rb"\x93NUMPY|MMIDIDX|[\x88\xa1][\xd8\xd9]4\x01":
               "an array: leave out text: to read how to convert it, or give the directory of a shard",
           rb"PAR1": "a parquet file: put parquet: before its name",
           rb"\xff{4}.{3}\0": "an Arrow file, as save_to_disk writes it: in Python, run "
                             "datasets.load_from_disk(FOLDER).to_parquet('x.parquet'), and use "
                             "parquet:x.parquet",
           rb"\xd0\xcf\x11\xe0|\{\\rtf": "a document: save it as plain text"}


def stdlib_files() -> list[Path]:
    """The sources of Python's standard library, sorted."""
    skipped = {"site-packages", "dist-packages"}
    files = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    return sorted(path for path in files if skipped.isdisjoint(path.parts))


def find_files(where: str, say=lambda text: None) -> list[Path]:
    """The files that a path or pattern matches, sorted, without links to the same file. Brackets may be part
    of a name.
    """
    path = Path(os.path.expanduser(where))
    for pattern in (path, *path.parents):
        if glob.has_magic(pattern.name):
            for folder in glob.glob(f"{pattern.parent}/", recursive=True):
                names_in(Path(folder))  # raises if it cannot be listed; glob would silently skip it
    names = [path] if path.is_file() else glob.glob(str(path), recursive=True)
    names = names or glob.glob(str(path).replace("[", "[[]"), recursive=True)
    paths = sorted(filter(Path.is_file, map(Path, names)), reverse=True)
    # some file systems have no inode numbers
    files = {(path.stat().st_dev, path.stat().st_ino or path): path for path in paths}
    if len(files) < len(paths):
        say(f"note: {len(paths)} names that match {where} are {len(files)} files: each is read once")
    return sorted(files.values())


def refuse_zero(raw: bytes):
    """Raises UnicodeDecodeError for a zero byte, as in UTF-16."""
    if (zero := raw.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", raw, zero, zero + 1, "a zero byte")


def text_of(value, where: str) -> str:
    """A value of JSON or of a table as text; "" for null and NaN. Raises UserError for lists and objects."""
    if value is None or isinstance(value, numbers.Number) and value != value:  # NaN marks a missing number
        return ""
    if isinstance(value, bytes):
        value = value.decode()  # ValueError if it is not UTF-8
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str | numbers.Number | datetime.date | datetime.time):
        return str(value)
    raise UserError(f"{where} holds a {type(value).__name__}, not text: give another field, NAME.KEY for a "
                    "field inside an object, or for a list of messages both --prompt-field NAME and "
                    "--response-field NAME (docs/running.md, Chats); remove other lists from the data.")


def not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> UserError:
    """The error for a file's first byte that is not UTF-8, with commands that repair the file. `where` says
    which byte that is.
    """
    name = shlex.quote(str(path))
    copy = "mended.txt" if path.stem == "new" else "new.txt"  # never the same file
    return UserError(f"{path}, {where}, is not UTF-8 text (it is 0x{error.object[error.start]:02x}): convert "
                     f"a text from Windows with iconv -f CP1252 -t UTF-8 {name} > {copy} (or -f UTF-16 if "
                     "it begins with 0xff or 0xfe, or -f UTF-16LE if every other byte is zero), "
                     f"drop damaged bytes with iconv -c -f UTF-8 -t UTF-8 {name} > {copy}, or zero bytes "
                     f"with tr -d '\\000' < {name} > {copy}. Decompress a compressed file first; a picture "
                     "and an array of ids have no text.")


def addition(some: random.Random, level: int) -> tuple[str, str]:
    """Two twelve-digit numbers and their sum, as texts. The longest run of columns in which the digits add up
    to 9 has `level` columns; a carry from the right passes through all of them.
    """
    while True:
        begin = some.randrange(13 - level)
        first = some.choices(range(10), k=12)
        second = [9 - a if begin <= i < begin + level else some.randrange(10) for i, a in enumerate(first)]
        nines = "".join("9" if a + b == 9 else " " for a, b in zip(first, second))
        if max(map(len, nines.split())) == level:
            a, b = (int("".join(map(str, digits))) for digits in (first, second))
            return f"{a:012}+{b:012}", f"{a + b:013}"


LEVELS = 8  # of task:addition; training has the lower half
TASK_TOKENS, TASK_ROW = 3_500_000, 256  # with these, each level has 500 held-out sums
UNTRAINED = 0.025  # fraction of sums from the upper half of the levels; also fraction held out of the rest
LARGEST_ROW = 1024  # largest default of --row


def reachable(url: str, seconds: float = 1.0) -> bool:
    """Whether the host of `url`, or the proxy for it, accepts a connection within `seconds`."""
    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError):  # in a thread, because a DNS look-up has no time-out
        connecting = ThreadPoolExecutor(1).submit(socket.create_connection, (parts.hostname, port), seconds)
        connecting.result(seconds).close()
        return True
    return False


def pieces(blocks):
    """Cuts a document, an iterable of blocks, into pieces of about BLOCK characters that end with a line or a
    word.
    """
    rest = ""
    for block in blocks:
        for i in range(0, len(block), BLOCK):
            rest += block[i:i + BLOCK]
            if len(rest) >= BLOCK:
                cut = rest.rfind("\n") + 1 or max(rest.rfind(" ", 1), 0) or len(rest)
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest
