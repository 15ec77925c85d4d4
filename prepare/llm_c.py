"""Shards that llm.c or modded-nanogpt wrote, which have no manifest."""

import re
from pathlib import Path

from cli.errors import UserError, names_in
from data import open_shard
from prepare.sources import SOURCES, refuse_saved, sample_digest
from prepare.tokenizer import load_tokenizer


def manifest_of_plain_shards(directory: Path, tokenizer_name: str | None) -> tuple:
    """A substitute for the manifest of shards that llm.c wrote, and their tokenizer."""
    paths = [directory / name for name in names_in(directory) if name.endswith(".bin")]
    if not paths:
        refuse_saved(str(directory))
        raise UserError(f"{directory} holds no data: prepare it first, copy it from where it is, name texts "
                        f"as 'text:{directory}' or 'text:{directory}/*', or use one of {SOURCES}.")
    if not tokenizer_name:
        raise UserError(f"{directory} has no manifest: name its tokenizer, as in --tokenizer gpt2.")
    tokenizer = load_tokenizer(tokenizer_name)
    val = r"(?<![a-z])(e?val|valid|validation)(?![a-z])"  # not of "retrieval"
    shards = [{"split": "val" if re.search(val, path.name) else "train", "file": path.name, "documents": 0,
               "tokens": len(open_shard(path)), "sha256": sample_digest(path)} for path in paths]
    return {"dataset": str(directory), "settings": {}, "shards": shards,
            "tokenizer": {"name": tokenizer_name, "sha256": tokenizer_name}}, tokenizer
