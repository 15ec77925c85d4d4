"""Documents of text, and where they come from. To add a source, write a reader and add it to READERS, and its
prefix to FILE_PREFIXES of data.py.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cli.errors import RetryableError, UserError, access, first_line, names_in, say
from data import (
    FILE_PREFIXES,
    SHORT_NAMES,
    SOURCES,
    digest_json,
    sample_digest,
    sha256_of,
)
from prepare.packages import needed

BLOCK = 1 << 20  # bytes or characters per read; a piece has fewer than twice as many
LONGEST = 64 * BLOCK  # characters of a field of a table, or of an object in an array
# a line of a tsv in which each field that begins with a quote closes; group 1: a tab or a doubled quote in it
CLOSED = r'(?:(?:^|\t)(?:"(?:[^"\t]++|(\t|""))*+"(?=\t|\r?\n?$)|(?!")[^\t]*+))*\r?\n?'
ASKS = "system developer user human tool function observation".split()  # roles of messages
ANSWERS = "assistant gpt chatgpt model function_call".split()
# of whether a message is to be learned, as OpenAI, Mistral, axolotl, ms-swift, Tinker and torchtune name them
MARKS = "weight train training trainable learn loss loss_mask loss_scale train_detail masked".split()
# a mark with its value, with a group if that is a no; a table has None, nan or [] where a mark is missing
MARK = re.compile(r"(?i)(masked (true|1(\.0*)?)|(?!masked)\w+ (false|0(\.0*)?))|"
                  r"\w+ (true|false|[01](\.0*)?|none|nan|\[\])?")
LARGEST_READ = 4 << 30  # bytes that a start reads again to see whether a text has changed


@dataclass
class Progress:
    """How far a source has been read, and what was met there."""

    done: int = 0  # bytes, which the progress bar shows
    total: int | None = None
    seen: int = 0  # documents that were read to their end, or skipped
    divided: bool = False  # whether split_on occurred
    unread: dict = field(default_factory=dict)  # other fields that there are, in their order


@dataclass
class Conversation:
    """A list of messages, as OpenAI or ShareGPT has them."""

    where: str
    messages: list
    progress: Progress

    def pairs(self, condition: str = ""):
        """Yields (prompt, response, condition) for each answer, but for one that nobody asked for. Its prompt
        is all that was said before, in lines. A system message at the beginning is the condition, unless
        there is one already. The response of an answer that is marked as not to be learned is empty, so each
        prompt stays. Raises UserError for what is no message, or a mark that is neither yes nor no.
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
                known = ANSWERS if content is None else ASKS + ANSWERS  # an answer may call a tool alone
                if role not in known:
                    raise KeyError(role)
            except (AttributeError, KeyError, TypeError):
                raise UserError(f"{self.where} has the message {str(message)[:100]}: it needs a role (or "
                                f"from) that is one of {', '.join(ASKS + ANSWERS)}, and a content (or value) "
                                "of text alone.")
            text = text_of(content, self.where)
            learned = True
            for name, value in message.items():
                if name in MARKS and role in ANSWERS:
                    mark = MARK.fullmatch(f"{name} {value}")
                    if not mark:
                        raise UserError(f"{self.where} has a message with the {name} {str(value)[:100]}: an "
                                        "answer is learned as a whole or not at all, so give true or false "
                                        "(or 1 or 0), or rename that key if it says something else.")
                    learned &= not mark[1]
                elif value not in (None, "", []) and name not in (*MARKS, *"role from content value".split()):
                    # before those of rows, of which a table can have more than a line shows
                    self.progress.unread = {f"{name} of messages": None} | self.progress.unread
            if role in ("system", "developer") and not (before or condition):
                condition = text
                continue
            if role in ANSWERS and before:
                yield "\n".join(before), text if learned else "", condition
            if text:
                before.append(text)


class Source:
    """Documents in a fixed order, readable from any index on. `fields` names the text field, or for pairs the
    fields of prompt, response and optionally condition; the field of the validation set, if any, comes last.
    A resumed `prepare` must find the same `identity`.
    """

    def __init__(self, dataset: str, settings: dict):
        self.dataset = dataset
        self.settings = settings
        self.pairs = settings.get("row") is not None
        self.val_field = settings.get("val_field")
        names = ("prompt_field", "response_field", "condition_field") if self.pairs else ("text_field",)
        self.fields = [settings[name] for name in (*names, "val_field") if settings.get(name)]
        self.kind, self.files = find_source(dataset)
        # what it was found to be: the revision of a repository, and where datasets is in it before a
        # `document`; whether a tsv is quoted
        self.reading = {}
        self.states = {}  # what `reading` gets of datasets, by the number of the next document
        self.schema = None  # Arrow's, if there is one
        self.progress = Progress(total=sum(path.stat().st_size for path in self.files) or None)
        self.identity = identity_of(self)
        if self.tail and self.kind != "text":
            raise UserError("--val-split tail:F needs a text: source, whose length is known: use hash:F.")

    @property
    def tail(self) -> float | None:
        """The fraction at the end of a text that is held out, if it is not one of the documents."""
        kind, _, fraction = self.settings["val_split"].partition(":")
        return float(fraction) if kind == "tail" else None

    def documents(self, start: int):
        """Yields (document, split, name of the validation set) from document `start` on. A document is blocks
        of text, a tuple with the fields of a pair, or a generator of such tuples, one for each answer of a
        conversation. If split is None, a hash of the text or of the (first) prompt decides.
        """
        named = {}  # the value behind the name of each validation set
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
        """Yields the values of the `fields` of a row as texts; if they are a list of messages, twice as a
        Conversation.
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
            if isinstance(value, float) and str(kind).endswith("float"):  # of 32 bits, or a halffloat
                value = float(str(kind.to_pandas_dtype()(value)))  # 4.2, and not 4.199999809265137
            messages = self.pairs and number < 2 and self.fields[:2] == [name, name]
            if messages and value is not None:
                yield Conversation(where, value if isinstance(value, list) else [value], self.progress)
            else:
                yield text_of(value, f"{where} field {name!r},")

    def checked_texts(self, where, row: dict | None, names=None):
        """The same of a row that has fields of its own, also with their `names` in the file, or is None."""
        if not isinstance(row, dict):
            raise UserError(f"{where} is not JSON, or nested too deeply, or no object, or has a name "
                            "twice: each line, or each item of one array (of 64M characters at most), must "
                            "be one JSON object.")
        self.check_fields(where, names or row)
        yield from self.texts(where, row)

    def check_fields(self, where, there) -> list[str]:
        """The columns with the `fields`, of `meta.text` that is `meta`. UserError unless all are `there`."""
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
            raise UserError(f"{where} has the field {missing[0]!r} more than once: give each another name.")
        raise UserError(f"{where} has no field {missing[0]!r} but {', '.join(there)}: choose among them in "
                        f"python data.py prepare --dataset {shlex.quote(self.dataset)} {flag} "
                        "and train on the directory that this makes. Rows that lack it need a null there, a "
                        "field inside of another has a name with a dot, as meta.text, and the first row of a "
                        "table names its fields.")


def find_source(dataset: str) -> tuple[str, list[Path]]:
    """The key of a data set in READERS, and its files, of which some have none here. Raises UserError."""
    prefix, _, where = dataset.partition(":")
    if dataset == "task:addition":
        return prefix, []
    if dataset == "stdlib":
        return prefix, stdlib_files()
    if prefix in FILE_PREFIXES and where:
        if files := find_files(where, print):
            return prefix, files
        hint = f": of a directory give its files, '{dataset}/*'" * Path(where).is_dir()
        raise UserError(f"no file matches {where!r}{hint}.")
    if dataset in SHORT_NAMES or prefix == "hf" and where:
        return "hub", find_files(f"{repository(dataset)[0]}/**")  # if it is a directory here
    if Path(dataset).is_file():
        # of .json, too
        likely = next((kind for kind in FILE_PREFIXES if f".{kind[:4]}" in dataset.lower()), "text")
        with unpacked(Path(dataset)):  # which names what has no text
            raise UserError(f"{dataset} is a file: use '{likely}:{dataset}', or text:, csv:, tsv:, jsonl: or "
                            "parquet: before it.")
    raise UserError(f"unknown data set {dataset!r}: use {SOURCES}, or a prepared directory.")


def repository(dataset: str) -> list[str | None]:
    """The repository of a data set on the hub, or a directory here, and its configuration."""
    name = SHORT_NAMES.get(dataset) or dataset.removeprefix("hf:")
    return [*os.path.expanduser(name).split(":"), None][:2]


def identity_of(source, largest: int = 64 * BLOCK) -> str:
    """A text that another data set, or another version of it, does not have. Of files that have `largest`
    bytes or more in all, only samples are read.
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
# Readers. Each yields for each document of a Source its texts, which may be read when they are asked for, and
# its split or None, and adds to `progress` what it has read.


def read_stdlib(source, progress):
    for path in source.files:
        raw = path.read_bytes()
        progress.done += len(raw)
        try:
            yield [raw.decode()], None
        except UnicodeDecodeError:  # Python's own tests include a few files in other encodings
            yield [], None


def read_task(source, progress):
    """Each sample is a function of its number. Its level names its validation set. All samples of the harder
    half of the levels are held out.
    """
    for number in itertools.count():
        some = random.Random(f"addition {number}")
        untrained = some.random() < UNTRAINED
        level = some.randint(1, LEVELS // 2) + untrained * LEVELS // 2
        name = f"{'un' * untrained}trained-{level}"
        yield (*addition(some, level), name), "val" if untrained else None


def read_text(source, progress):
    """One document per file, or one between two --split-on; tail:F divides the file at the boundary."""
    split_on = source.settings.get("split_on")
    for path, begin, end, split in parts_of(source, progress):
        blocks = text_blocks(path, begin, end, progress)
        if not split_on:
            yield blocks, split
            continue
        rest = ""
        for block in blocks:
            *texts, rest = (rest + block).split(split_on)
            progress.divided |= bool(texts)
            for text in texts:
                yield [text], split
            if len(rest) > 64 * BLOCK:
                raise UserError(f"{path} has {len(rest):,} characters without a {split_on!r}: leave "
                                "--split-on out, or name what is between its documents.")
        yield [rest], split


def parts_of(source, progress):
    """Yields (path, begin, end, split) for each file, or with tail:F for what is trained on and for the rest,
    in bytes.
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
            cut += re.match(rb"[\x80-\xbf]*", file.read(BLOCK)).end()  # to where a UTF-8 character begins
        if cut:
            yield path, 0, cut, "train"
        if cut < size:
            yield path, cut, size, "val"
        train_bytes -= size


def text_blocks(path, begin, end, progress):
    decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()  # without its mark
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
    """Yields the lines of a text."""
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
    """Tables, whose first row has the names of the fields."""
    csv.field_size_limit(LONGEST)
    tsv = source.kind == "tsv"
    if tsv and "quoted" not in source.reading:
        source.reading["quoted"] = quotes_enclose(source.files)
        say(f"quotes in {source.dataset} {'enclose fields' if source.reading['quoted'] else 'are text'}, as "
            "in its first 1,000 rows")
    quoted = source.reading.get("quoted", True)
    for path in source.files:
        lines = lines_of(path, progress)
        head = next(lines, "")
        delimiter = "\t" if tsv else max(",;", key=head.count)
        if tsv and quoted:  # a row that goes on in the next line gets too many fields
            lines = (line if re.fullmatch(CLOSED, line) else delimiter * len(head) for line in lines)
        rows = csv.DictReader(itertools.chain([head], lines), delimiter=delimiter, strict=True,
                              quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
        try:
            for row in rows:
                if None in (*row, *row.values()):  # what is too much, or missing
                    raise csv.Error("it has more fields, or fewer")
                yield source.checked_texts(f"{path}, line {rows.line_num},", row, rows.fieldnames), None
        except csv.Error as error:
            line = rows.reader.line_num  # rows.line_num is that of the row before
            raise UserError(f"{path}, line {line}, does not end a row like the first ({error}): take tsv: "
                            "before a table that tabs divide, csv: for commas or semicolons. A field of a "
                            "csv that holds one of these, a quote or the end of a line has to be between "
                            "quotes, and quotes in it are doubled, as Python's csv.writer and spreadsheets "
                            "write it. In a tsv each quote closes in its line: close or double it there, and "
                            "make a csv of a table whose fields have several lines.")


def quotes_enclose(files: list[Path]) -> bool:
    """Whether quotes in a tsv enclose fields: if each field that begins with one closes in its row, and one
    of these holds a tab or a quote, in the first 1,000 rows of each file.
    """
    held = None
    for path in files:
        for line in itertools.islice(lines_of(path, Progress()), 1001):
            row = re.fullmatch(CLOSED, line)
            if not row:
                return False
            held = held or row[1]
    return held is not None


def read_jsonl(source, progress):
    """An object in each line, or one array of objects."""
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


# numbers stay as they are written, NaN is missing, and what has a name twice is no object
JSON = json.JSONDecoder(
    parse_float=str, parse_int=str, parse_constant=lambda text: text.replace("NaN", ""),
    object_pairs_hook=lambda pairs: named if len(named := dict(pairs)) == len(pairs) else pairs)


def json_texts(source, where, line):
    """The texts of a line, which is parsed when the first is asked for."""
    row = None
    with contextlib.suppress(ValueError, RecursionError):
        row = JSON.decode(line)
    yield from source.checked_texts(where, row)


def json_array(path, progress):
    """Yields the items of an array, whose text is read in blocks, and None where it is damaged."""
    text = ""
    for block in text_blocks(path, 0, math.inf, progress):
        text += block
        if len(text) > LONGEST:
            break
        end = 0
        with contextlib.suppress(ValueError, RecursionError):  # where the block ends, or the array
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
            source.schema = file.schema_arrow
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
                                     "or copy the directory in shards/ from a machine that has prepared it.")
            import huggingface_hub
            # the same files after a kill, whatever becomes of the repository
            source.reading.setdefault("revision", huggingface_hub.dataset_info(name).sha)
        if "torch" not in sys.modules:  # datasets would import it, which doubles its time and memory
            os.environ["USE_TORCH"] = "0"
            import datasets
            del os.environ["USE_TORCH"]
        import datasets  # takes 1.2 s
        rows = datasets.load_dataset(name, configuration, split="train", streaming=True,
                                     revision=source.reading.get("revision"))
        source.schema = rows.features and rows.features.arrow_schema
        columns = source.check_fields(name, rows.column_names or next(iter(rows), source.fields))
        rows = rows.select_columns(columns)
        document = source.reading.get("document", 0)
        if document:
            rows.load_state_dict(source.reading["state"])
        # row by row is far slower
        for batch in rows.iter(batch_size=1000):
            yield from rows_of(source, name, batch)
            document += len(batch[columns[0]])
            source.states[document] = {"document": document, "state": rows.state_dict()}


# how each kind of data set is read; FILE_PREFIXES of data.py names those that are files
READERS = {"stdlib": read_stdlib, "task": read_task, "text": read_text, "csv": read_csv, "tsv": read_csv,
           "jsonl": read_jsonl, "parquet": read_parquet, "hub": read_hub}


@contextlib.contextmanager
def readable(name):
    """A context in which an error becomes a UserError: what is missing, damaged or in need of a script."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # or any of httpx
        reason = first_line(error).rstrip(".")
        raise UserError(f"{name} cannot be read ({reason}): check it, and run the same command again.")


def rows_of(source, where, batch):
    """The documents of a batch of rows, with a list for each field."""
    for values in zip(*batch.values()):
        yield [*source.texts(where, dict(zip(batch, values)))], None


@contextlib.contextmanager
def unpacked(path: Path):
    """Opens a file for reading: what is packed in it, and the file itself, whose position is that in the file
    as it is. An error while it is open becomes a UserError.
    """
    try:
        with access(path), open(path, "rb") as raw:
            head = raw.peek(10)
            file = next((unpack for magic, unpack in PACKED.items() if re.match(magic, head)), iter)(raw)
            for magic, what in NO_TEXT.items():
                if re.match(magic, file.peek(300), re.DOTALL):
                    raise UserError(f"{path} is {what}.")
            yield file, raw
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read to its end ({getattr(error, 'strerror', None) or error}): "
                        "check it, or copy it again.")


# by the first bytes of a file
PACKED = {rb"\x1f\x8b": gzip.open, rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open, rb"\xfd7zX": lzma.open}
NO_TEXT = {rb"\x28\xb5\x2f\xfd": "packed: unpack it with zstd -d, and name what that writes",
           rb"PK\x03\x04": "a zip archive, as .docx, .xlsx and .epub are: save the document as plain text, "
                           "a sheet as CSV (UTF-8), or unpack it with unzip",
           rb".{257}ustar|7z\xbc\xaf|Rar!\x1a": "an archive: unpack it, as with tar xf, and name what is in "
                                                  "it",
           rb"%PDF-": "a PDF: make a text of it, as pdftotext does",
           rb"PAR1": "a parquet file: put parquet: before its name",
           rb"\xff{4}.{3}\0": "an Arrow file, as save_to_disk writes it: in Python, "
                             "datasets.load_from_disk(FOLDER).to_parquet('x.parquet') makes a file for "
                             "parquet:x.parquet",
           rb"\xd0\xcf\x11\xe0|\{\\rtf": "a document: save it as plain text"}


def stdlib_files() -> list[Path]:
    """The sources of Python's standard library, sorted."""
    skipped = {"site-packages", "dist-packages"}
    files = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    return sorted(path for path in files if skipped.isdisjoint(path.parts))


def find_files(where: str, say=lambda text: None) -> list[Path]:
    """The files of a path or pattern, sorted, each real file once. Brackets may be part of a name."""
    path = Path(os.path.expanduser(where))
    for pattern in (path, *path.parents):
        if glob.has_magic(pattern.name):
            for folder in glob.glob(f"{pattern.parent}/", recursive=True):
                names_in(Path(folder))  # glob leaves out what cannot be listed
    names = [path] if path.is_file() else glob.glob(str(path), recursive=True)
    names = names or glob.glob(str(path).replace("[", "[[]"), recursive=True)
    paths = sorted(filter(Path.is_file, map(Path, names)), reverse=True)
    # some file systems give no numbers
    files = {(path.stat().st_dev, path.stat().st_ino or path): path for path in paths}
    if len(files) < len(paths):
        say(f"note: {len(paths)} names of {where} lead to {len(files)} files: each is read once")
    return sorted(files.values())


def refuse_zero(raw: bytes):
    """Raises UnicodeDecodeError for a zero byte, as in UTF-16."""
    if (zero := raw.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", raw, zero, zero + 1, "a zero byte")


def text_of(value, where: str) -> str:
    """A value of JSON or of a table as text, "" for null and NaN. Raises UserError for what is no text."""
    if value is None or isinstance(value, numbers.Number) and value != value:  # missing, among numbers
        return ""
    if isinstance(value, bytes):
        value = value.decode()  # ValueError if it is no text
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str | numbers.Number | datetime.date | datetime.time):
        return str(value)
    raise UserError(f"{where} holds a {type(value).__name__} and no text: name another field, one inside of "
                    "an object as NAME.KEY, a list of messages with both --prompt-field NAME and "
                    "--response-field NAME (docs/running.md, Chats); other lists have to be taken out.")


def not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> UserError:
    """Names the first byte of a file that is not UTF-8, and commands that mend it."""
    name = shlex.quote(str(path))
    copy = "mended.txt" if path.stem == "new" else "new.txt"  # never the file itself
    return UserError(f"{path}, {where}, is not UTF-8 text (it is 0x{error.object[error.start]:02x}): convert "
                     f"a text from Windows with iconv -f CP1252 -t UTF-8 {name} > {copy} (or -f UTF-16 if "
                     "it begins with 0xff or 0xfe, or -f UTF-16LE if each second byte is zero), "
                     f"drop what is damaged with iconv -c -f UTF-8 -t UTF-8 {name} > {copy}, or zero bytes "
                     f"with tr -d '\\000' < {name} > {copy}. A packed file has to be unpacked before "
                     "that, and a picture has no text.")


def addition(some: random.Random, level: int) -> tuple[str, str]:
    """Two twelve-digit numbers and their sum, highest digit first. The longest run of columns whose digits
    add up to 9 has `level` columns, so a carry from the right passes through all.
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
TASK_TOKENS, TASK_ROW = 3_500_000, 256  # so that each level has 500 held-out sums
UNTRAINED = 0.025  # fraction of samples from the upper half, all held out; also fraction held out of the rest
LARGEST_ROW = 1024  # the largest default for pairs


def reachable(url: str, seconds: float = 1.0) -> bool:
    """Whether the host of `url`, or the proxy in front of it, accepts a connection within `seconds`."""
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
    """Cuts a document into about BLOCK characters that end with a line or a word."""
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
