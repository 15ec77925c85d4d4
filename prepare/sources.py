"""Documents of text, and where they come from."""

import bz2
import codecs
import contextlib
import datetime
import glob
import gzip
import hashlib
import itertools
import json
import lzma
import numbers
import os
import random
import re
import shlex
import socket
import sysconfig
import urllib.parse
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data import FILE_PREFIXES, NotNow, UserError, access, digest_json, first_line, names_in, sha256_of

SHORT_NAMES = {  # repository, configuration
    "imdb": ("stanfordnlp/imdb", None),
    "wikipedia-en": ("wikimedia/wikipedia", "20231101.en"),
    "wikipedia-es": ("wikimedia/wikipedia", "20231101.es"),
    "c4": ("allenai/c4", "en"),
    "c4-es": ("allenai/c4", "es"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
SOURCES = ("stdlib, task:addition, text:GLOB, jsonl:GLOB, parquet:GLOB, hf:REPO[:CONFIG], "
           + ", ".join(SHORT_NAMES))
BLOCK = 1 << 20  # bytes or characters per read; a piece has fewer than twice as many


class Source:
    """Documents in a fixed order, readable from any index on. `fields` names the text field, or for pairs the
    fields of prompt, response and optionally condition; the field of the validation set, if any, comes last.
    A resumed `prepare` must find the same `identity`. The progress bar shows `done` of `total` bytes.
    """

    def __init__(self, dataset: str, settings: dict):
        self.dataset = dataset
        self.pairs = settings.get("row") is not None
        self.val_field = settings.get("val_field")
        self.tokenizer = ""  # as a flag, for a command in an error
        if settings.get("tokenizer"):
            self.tokenizer = f" --tokenizer {shlex.quote(settings['tokenizer'])}"
        names = ("prompt_field", "response_field", "condition_field") if self.pairs else ("text_field",)
        self.fields = [settings[name] for name in (*names, "val_field") if settings.get(name)]
        self.split_on = settings.get("split_on")
        self.divided = False  # whether split_on occurred
        self.seen = 0  # documents that were read to their end, or skipped
        self.named = {}  # the value behind the name of each validation set
        self.unread = {}  # other fields that there are, in their order
        self.done = 0
        self.total = None
        self.files = []
        prefix, _, where = dataset.partition(":")
        refuse_saved(where or dataset)
        if dataset == "task:addition":
            self.identity = f"{dataset}, the harder half of the levels held out"
        elif dataset == "stdlib":
            self.files = stdlib_files()
        elif prefix in FILE_PREFIXES and where:
            self.files = find_files(where, print)
            if not self.files:
                hint = f": of a directory give its files, '{dataset}/*'" if Path(where).is_dir() else ""
                raise UserError(f"no file matches {where!r}{hint}.")
        elif dataset in SHORT_NAMES or prefix == "hf" and where:
            self.repo, self.config = SHORT_NAMES.get(dataset) or [*where.split(":"), None][:2]
            self.repo = os.path.expanduser(self.repo)
            prefix = "hub"
            self.identity = f"{self.repo}:{self.config}"
            self.files = find_files(f"{self.repo}/**")  # if it is a directory here
        elif Path(dataset).is_file():
            raise UserError(f"{dataset} is a file: use 'text:{dataset}', or jsonl: or parquet: before it.")
        else:
            raise UserError(f"unknown data set {dataset!r}: use {SOURCES}, or a prepared directory.")
        self._read = getattr(self, f"_{prefix}")
        if self.files:
            sizes = [[p.name, p.stat().st_size] for p in self.files]
            self.total = sum(size for _, size in sizes)
            self.identity = f"{prefix}, {len(sizes)} files, {self.total} bytes, {digest_json(sizes)[:16]}"
            digest = sha256_of if self.total < 64 * BLOCK else sample_digest
            content = digest_json([prefix == "hub" and where, *map(digest, self.files)])[:16]
            self.identity += f", content {content}"
        val_split = settings["val_split"]
        self.tail = float(val_split[5:]) if val_split.startswith("tail:") else None
        if self.tail and prefix != "text":
            raise UserError("--val-split tail:F needs a text: source, whose length is known: use hash:F.")

    def documents(self, start: int):
        """Yields (document, split, name of the validation set) from document `start` on. A document is blocks
        of text, or a tuple with the fields of a pair. If split is None, a hash of the text or prompt decides.
        """
        for texts, split in itertools.islice(self._read(), start, None):  # skipped texts stay unread
            name = ""
            if self.val_field:
                *texts, value = texts
                name = re.sub(r"[^\w-]+", "-", value).strip("-") or "none"
                if self.named.setdefault(name, value) != value:
                    raise UserError(f"the values {self.named[name]!r} and {value!r} of {self.val_field} "
                                    f"would share the validation set val_{name}: rename one in the data.")
            yield (tuple(texts) if self.pairs else texts), split, name

    def _stdlib(self):
        for path in self.files:
            raw = path.read_bytes()
            self.done += len(raw)
            try:
                yield [raw.decode("utf-8")], None
            except UnicodeDecodeError:  # Python's own tests include a few files in other encodings
                yield [], None

    def _task(self):
        """Each sample is a function of its number. Its level names its validation set. All samples of the
        harder half of the levels are held out.
        """
        for number in itertools.count():
            some = random.Random(f"addition {number}")
            untrained = some.random() < UNTRAINED
            level = some.randint(1, LEVELS // 2) + untrained * LEVELS // 2
            name = f"{'un' * untrained}trained-{level}"
            yield (*addition(some, level), name), "val" if untrained else None

    def _text(self):
        """One document per file, or one between two --split-on; tail:F divides the file at the boundary."""
        sizes = [self._length(path) for path in self.files]
        self.total = sum(sizes)
        train_bytes = int(self.total * (1 - (self.tail or 0)))
        for path, size in zip(self.files, sizes):
            if self.tail is None:
                yield from self._documents(path, 0, size, None)
                continue
            cut = min(max(train_bytes, 0), size)
            with self._open(path) as file:
                file.seek(cut)
                while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:  # inside a UTF-8 character
                    cut += 1
            if cut:
                yield from self._documents(path, 0, cut, "train")
            if cut < size:
                yield from self._documents(path, cut, size, "val")
            train_bytes -= size

    def _length(self, path):
        with self._open(path) as file:
            return file.seek(0, os.SEEK_END)

    def _documents(self, path, begin, end, split):
        blocks = self._text_blocks(path, begin, end)
        if not self.split_on:
            yield blocks, split
            return
        rest = ""
        for block in blocks:
            *texts, rest = (rest + block).split(self.split_on)
            self.divided |= bool(texts)
            yield from (([text], split) for text in texts)
            if len(rest) > 64 * BLOCK:
                raise UserError(f"{path} has {len(rest):,} characters without a {self.split_on!r}: leave "
                                "--split-on out, or name what is between its documents.")
        yield [rest], split

    def _text_blocks(self, path, begin, end):
        decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()  # without its mark
        with self._open(path) as file:
            file.seek(begin)
            while raw := file.read(min(BLOCK, end - begin)):
                try:
                    text = decoder.decode(raw, final=begin + len(raw) == end)
                    refuse_zero(raw)
                except UnicodeDecodeError as error:
                    at = begin + len(raw) - len(error.object) + error.start
                    file.seek(0)
                    line = 1 + sum(end <= at for end in itertools.accumulate(map(len, file)))
                    raise not_utf8(path, f"byte {at + 1} in line {line}", error)
                begin += len(raw)
                self.done += len(raw)
                yield text

    def _jsonl(self):
        for path in self.files:
            before = self.done
            with self._open(path) as file:
                for number, line in enumerate(file, 1):
                    self.done = before + self._raw.tell()
                    if not line.isspace():
                        yield self._json_texts(path, number, line), None

    def _json_texts(self, path, number, line):
        where = f"{path}, line {number},"
        try:
            text = line.decode("utf-8-sig", "surrogatepass")
            refuse_zero(line)
            row = json.loads(text, parse_float=str, parse_int=str, parse_constant=constant)
        except UnicodeDecodeError as error:
            raise not_utf8(path, f"byte {error.start + 1} of line {number}", error)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{where} is not JSON, or nested too deeply, or no object: each line must be one "
                            "JSON object.")
        self._check_fields(where, row)
        yield from self._texts(where, [row[field] for field in self.fields])

    def _texts(self, where, values):
        return [text_of(value, f"{where} field {field!r},") for field, value in zip(self.fields, values)]

    def _parquet(self):
        from pyarrow import parquet

        def batches(path):
            file = parquet.ParquetFile(path)
            self._check_fields(path, file.schema_arrow.names)
            for batch in file.iter_batches(1000, columns=self.fields):
                yield batch.to_pydict()

        for path in self.files:
            yield from self._rows(path, batches(path))
            self.done += path.stat().st_size

    def _hub(self):
        def batches():
            hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
            if not Path(self.repo).exists() and not reachable(hub):
                raise NotNow(f"no network, so {self.repo} cannot be read: use local files (text:, jsonl:, "
                             "parquet:) or the source stdlib, which every machine has.")
            import datasets  # takes 1.2 s
            rows = datasets.load_dataset(self.repo, self.config, split="train", streaming=True)
            if rows.column_names:
                self._check_fields(self.repo, rows.column_names)
            yield from rows.select_columns(self.fields).iter(batch_size=1000)  # row by row is far slower

        return self._rows(self.repo, batches())

    def _rows(self, name, batches):
        """The documents of batches of rows, each with a list for each field."""
        try:
            for batch in batches:
                for values in zip(*(batch[field] for field in self.fields)):
                    yield self._texts(name, values), None
        except (UserError, MemoryError):
            raise
        except Exception as error:  # missing, damaged, in need of a script, or any of httpx
            reason = first_line(error).rstrip(".")
            raise UserError(f"{name} cannot be read ({reason}): check it, and run the same command again.")

    def _check_fields(self, where, there):
        self.unread |= dict.fromkeys(name for name in there if name not in self.fields)
        if missing := [field for field in self.fields if field not in there]:
            flag = "--prompt-field NAME --response-field NAME" if self.pairs else "--text-field NAME"
            flag = "--val-field NAME" if missing[0] == self.val_field else flag
            raise UserError(f"{where} has no field {missing[0]!r} but {', '.join(there)}: choose among them "
                            f"in python data.py prepare --dataset {shlex.quote(self.dataset)}"
                            f"{self.tokenizer} {flag} and train on the directory that this makes. Rows that "
                            "lack it need a null there, and fields inside of others have to be moved out.")

    @contextlib.contextmanager
    def _open(self, path):
        """Opens a file for reading, unpacked. An error while it is open becomes a UserError."""
        try:
            with access(path), open(path, "rb") as self._raw:
                head = self._raw.peek(10)[:10]
                unpack = next((unpack for magic, unpack in PACKED.items() if re.match(magic, head)), iter)
                if unpack == "zstd":
                    raise UserError(f"{path} is packed: unpack it with zstd -d, and name what that writes.")
                yield unpack(self._raw)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read to its end ({reason}): check it, or copy it again.")


PACKED = {rb"\x1f\x8b": gzip.open, rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open, rb"\xfd7zX": lzma.open,
          rb"\x28\xb5\x2f\xfd": "zstd"}  # by the first bytes of a file


def stdlib_files() -> list[Path]:
    """The sources of Python's standard library, sorted."""
    skipped = {"site-packages", "dist-packages"}
    files = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    return sorted(path for path in files if not skipped & {*path.parts})


def find_files(where: str, say=lambda text: None) -> list[Path]:
    """The files of a path or pattern, sorted, each real file once. Brackets may be part of a name."""
    path = Path(os.path.expanduser(where))
    for pattern in (path, *path.parents):
        if glob.has_magic(pattern.name):
            for folder in glob.glob(f"{pattern.parent}/", recursive=True):
                names_in(Path(folder))  # glob leaves out what cannot be listed
    names = glob.glob(str(path), recursive=True) if not path.is_file() else [path]
    names = names or glob.glob(str(path).replace("[", "[[]"), recursive=True)
    found = sorted(filter(Path.is_file, map(Path, names)), reverse=True)
    # some file systems give no numbers
    files = {(path.stat().st_dev, path.stat().st_ino or path): path for path in found}
    if len(files) < len(found):
        say(f"note: {len(found)} names of {where} lead to {len(files)} files: each is read once")
    return sorted(files.values())


def refuse_saved(where: str):
    """Raises UserError for a folder that save_to_disk of datasets has written, or files in it."""
    path = Path(os.path.expanduser(where))
    for folder in (path, path.parent):
        part = ""
        if (several := folder / "dataset_dict.json").is_file():
            names = re.findall(r'"([^"]+)"', several.read_text(encoding="utf-8").partition("[")[2])
            part = f"[{'train' if 'train' in names else names[0]!r}]" if names else ""
        single = (folder / "state.json").is_file() and [*folder.glob("*.arrow")]
        if several.is_file() or single:
            raise UserError(f"{folder} was written by save_to_disk, for load_from_disk alone: in Python, "
                            f"datasets.load_from_disk({str(folder)!r}){part}.to_parquet('x.parquet') makes a "
                            "file for parquet:x.parquet.")


def refuse_zero(raw: bytes):
    """Raises UnicodeDecodeError for a zero byte, as in UTF-16."""
    if (zero := raw.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", raw, zero, zero + 1, "a zero byte")


def constant(text: str) -> str | None:
    """NaN, Infinity or -Infinity in JSON; numbers stay as they are written."""
    return None if text == "NaN" else text


def text_of(value, where: str) -> str:
    """A value of JSON or of a table as text, "" for null and NaN. Raises UserError for what is no text."""
    if isinstance(value, numbers.Number) and value != value:  # missing, among numbers
        return ""
    if isinstance(value, bytes):
        value = value.decode()  # ValueError if it is no text
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str | None):
        return value or ""
    if not isinstance(value, numbers.Number | datetime.date | datetime.time):
        raise UserError(f"{where} holds a {type(value).__name__} and no text: name another field, or write a "
                        'jsonl file of lines such as {"prompt": "…", "response": "…"} for --prompt-field '
                        "prompt --response-field response (cluster/RUNS.md, Chats).")
    return str(value)


def not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> UserError:
    """Names the first byte of a file that is not UTF-8, and commands that mend it."""
    name = shlex.quote(str(path))
    return UserError(f"{path}, {where}, is not UTF-8 text (it is 0x{error.object[error.start]:02x}): convert "
                     f"a text from Windows with iconv -f CP1252 -t UTF-8 {name} > new.txt (or -f UTF-16 if "
                     "it begins with 0xff or 0xfe, or -f UTF-16LE if each second byte is zero), "
                     f"drop what is damaged with iconv -c -f UTF-8 -t UTF-8 {name} > new.txt, or zero bytes "
                     f"with tr -d '\\000' < {name} > new.txt. A packed file has to be unpacked before that, "
                     "and a parquet file named as parquet:.")


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
TASK_TOKENS, TASK_ROW = 2_500_000, 256  # what 600 steps of `puzzle` need
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
    """Cuts a document, unless it is a pair, into about BLOCK characters that end with a line or a word."""
    if isinstance(blocks, tuple):
        yield blocks
        return
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


def sample_digest(path: Path) -> str:
    """A digest of a file's length, front, middle and end: enough to tell two corpora apart."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with access(path), open(path, "rb") as file:
        for offset in (0, size // 2, max(size - 65536, 0)):
            file.seek(offset)
            digest.update(file.read(65536))
    return digest.hexdigest()
