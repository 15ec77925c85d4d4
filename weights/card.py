"""Writes the model card of an export: README.md in hf/, with the metadata that the Hugging Face hub reads."""

import re
import shlex
from pathlib import Path

from cli.files import write_atomically
from monitor import read_config


def public(word: str) -> str:
    """A word of a command, in which absolute paths and paths that lead upwards lose their folders."""
    return re.sub(r"(^|[=:,])[/~.][^,]*/(?=.)", r"\1", word)


def write_card(path: Path, saved: dict):
    """Writes the card of a checkpoint, without folders and addresses, which its readers need not know."""
    commands = read_config(Path(saved["path"]).parent.parent).get("commands") or [""]  # none in a notebook
    words = [public(word) for word in shlex.split(commands[0]) if not word.startswith("--master_")]
    card = f"""---
library_name: transformers
pipeline_tag: {"fill-mask" if "global_every" in saved["model_config"] else "text-generation"}
tags:
- {saved["family"].lower()}
---
# {saved["family"]} of size {saved["settings"]["size"]}

- Data: `{public(saved["settings"]["data"])}`
- Training loss: {saved["loss"]:.4f} after {saved["step"]:,} steps
- License: to be filled in, here and as `license:` in the first lines

Training began with

    {shlex.join(words)}
"""
    write_atomically(path, card.encode())
