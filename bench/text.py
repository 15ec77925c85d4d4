"""Makes English text from the documentation of Python packages, for part D of bench/gpu.sh.

    python bench/text.py .ab/text.tar.xz    # five minutes; downloads 420 MB of packages and deletes them

Reads README files, docstrings and descriptions, and keeps each paragraph of prose once, up to MOST characters
of a package. `data.py prepare` turns them into tokens. The file holds the prepared directory, so you can use
it without network or tokenizer. To make it without the files of gpt2, give --tokenizer bpe:16384.
"""

import gzip
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cli.errors import UserError, run_command  # noqa: E402
from cli.parser import ArgumentParser, local_path  # noqa: E402

PACKAGES = """
    ansible astropy awscli azure-cli biopython botocore diffusers django google-ads google-api-python-client
    google-cloud-aiplatform jax keras langchain-community matplotlib mercurial mlflow mne networkx nltk numpy
    oci pandas pyvista scikit-learn scipy sqlalchemy statsmodels sympy transformers twisted xarray""".split()
MOST = 25_000_000  # characters
QUOTED = re.compile(r'("""|\'\'\')(.*?)\1', re.S)  # a docstring
DESCRIBED = re.compile(r'"(?:description|documentation)"\s*:\s*("(?:[^"\\]|\\.)*")')


def texts(name: str, content: bytes) -> list[str]:
    """What people are meant to read in a file of a package."""
    if name.endswith(".gz"):
        name, content = name[:-3], gzip.decompress(content)
    text = content.decode("utf-8", "replace")
    if name.endswith(".py"):
        return [match[2] for match in QUOTED.finditer(text)]
    if name.endswith(".json"):
        found = [json.loads(match[1], strict=False) for match in DESCRIBED.finditer(text)]
        return [re.sub(r"<[^<>]*>", "", description) for description in found]
    return [text] if name.endswith((".md", ".rst", ".txt")) else []


def prose(text: str, seen: set[str]) -> list[str]:
    """The paragraphs of a text that are prose and not in `seen`, without indentation. Two that differ in
    numbers or punctuation are the same.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = "\n".join(line.strip() for line in paragraph.strip().splitlines())
        letters = re.sub("[^A-Za-z ]", "", paragraph)
        key = letters.lower().replace(" ", "")
        if len(letters) >= max(60, 0.75 * len(paragraph)) and letters.count(" ") >= 8 and key not in seen:
            seen.add(key)
            found.append(paragraph)
    return found


def documents(wheel: Path, seen: set[str]):
    """The prose of each file of a package that has more than a few lines of it."""
    size = 0
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            paragraphs = [p for text in texts(name, archive.read(name)) for p in prose(text, seen)]
            text = "\n\n".join(paragraphs)
            if len(text) >= 400 and size < MOST:
                size += len(text)
                yield text


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=local_path, help="the file to write, .tar.xz")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help=f"names for pip ({len(PACKAGES)})")
    parser.add_argument("--tokenizer", default="gpt2")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels, source, shards = (Path(folder) / name for name in ("wheels", "docs.jsonl", "text"))
        done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                               "--only-binary=:all:", "--dest", wheels, *args.packages])
        if done.returncode:
            raise UserError("pip could not download these packages (see above): give others with --packages.")
        seen = set()
        with open(source, "w") as file:
            for wheel in sorted(wheels.iterdir()):
                before = file.tell()
                for text in documents(wheel, seen):
                    file.write(json.dumps({"text": text}) + "\n")
                print(f"{wheel.name}: {(file.tell() - before) / 1e6:.1f} MB", flush=True)
        subprocess.run([sys.executable, ROOT / "data.py", "prepare", "--dataset", f"jsonl:{source}", "--out",
                        shards, "--tokenizer", args.tokenizer, "--val-split", "hash:0.02"], check=True)
        with tarfile.open(args.out, "w:xz") as archive:
            archive.add(shards, "text")
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    run_command(main)
