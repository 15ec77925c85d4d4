"""Files that are no longer what was written: bits flipped, cut off, zeroed, exchanged, gone.

Each damage is noticed, or what is read is what was written (where it hit nothing that is read). FAULTS_SEED
repeats a choice.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import Trainer

import data
import ddp_utils
from cli.errors import RunError, UserError
from ddp_utils import list_checkpoints, load_checkpoint, read_checkpoint
from prepare import packing
from prepare.command import verify
from prepare.pipeline import prepare

SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
COUNTS = [30, pytest.param(1000, marks=pytest.mark.long)]


def damage(rng: random.Random, path: Path, other: Path) -> str:
    """Harms a file in one of seven ways. Returns which. The content may be the same by chance."""
    content, theirs = bytearray(path.read_bytes()), other.read_bytes()
    at, some = rng.randrange(len(content)), rng.randrange(1, 512)
    left = len(content) - at
    kind, count, new = rng.choice((
        ("bit", 1, bytes([content[at] ^ 1 << rng.randrange(8)])), ("cut", left, b""),
        ("zeros", 512, bytes(min(512, left))), ("noise", 16, rng.randbytes(min(16, left))),
        ("hole", some, b""), ("grown", 0, rng.randbytes(some)), ("swap", 0, b"")))
    content[at:at + count] = new
    if kind == "swap":
        other.write_bytes(content)
        content = theirs
    path.write_bytes(content)
    print(f"FAULTS_SEED={SEED}: {kind} of {path.name}")  # pytest shows this if the test fails
    return kind


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    done = Trainer("train_gpt2.py", steps=3, save_every=1, d_model=16).train(0, shards, out)
    assert done.code == 0 and len(list_checkpoints(out)) == 3, done.out
    return out


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("count", COUNTS)
def test_the_checkpoint_before_a_damaged_one_is_taken(run, count, one_process):
    contents = {path: path.read_bytes() for path in list_checkpoints(run)}
    newest, before, _ = contents
    original = read_checkpoint(newest)
    rng, refused = random.Random(SEED), 0
    for _ in range(count):
        for path, content in contents.items():
            path.write_bytes(content)
        kind, said = damage(rng, newest, before), []
        found = load_checkpoint(run, said.append)
        if found["step"] == 3:
            assert not said and kind != "swap" and found["samples"] == original["samples"]
            assert found["tensors"].keys() == original["tensors"].keys()
            assert all(torch.equal(tensor, found["tensors"][group][name])
                       for group, named in original["tensors"].items() for name, tensor in named.items())
        else:
            refused += 1
            assert found["step"] == (1 if kind == "swap" else 2)
            assert newest.name in said[0] and len(said) == 3 - found["step"]
    assert refused > count / 2


def test_tensors_exchanged_inside_a_checkpoint_are_noticed(run, one_process):
    """The checksums of the file are right. Only the sums of the tensors can tell. Nothing else is taken, and
    what the message says makes it a checkpoint.
    """
    path = list_checkpoints(run)[0]
    saved = torch.load(path, weights_only=True)
    moments = saved["tensors"]["optimizer"]
    a, b = (next(name for name in moments if name.endswith(end)) for end in ("/exp_avg", "/exp_avg_sq"))
    moments[a], moments[b] = moments[b], moments[a]
    torch.save(saved, path)
    with pytest.raises(UserError) as refused:
        load_checkpoint(run, pytest.fail)
    exec(re.search(r"saved\S+ = \S+", str(refused.value))[0], {"saved": saved, "ddp_utils": ddp_utils})
    torch.save(saved, path)
    load_checkpoint(run, pytest.fail)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(run):
    """A run that believed the name would remove its own new checkpoints as older than this one."""
    newest, older, _ = list_checkpoints(run)
    shutil.copy(older, newest)
    with pytest.raises(RunError, match="step 2"):
        read_checkpoint(newest)
    shutil.copy(older, run / "any-other-name.pt")
    assert read_checkpoint(run / "any-other-name.pt")["step"] == 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    lines = [json.dumps({"text": f"{n * n} words, " * 15}) for n in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return prepare(f"jsonl:{folder}/text.jsonl", folder / "out", "bytes", shard_tokens=3000, workers=1,
                   val_split="hash:0.2")


def state_of(directory: Path) -> tuple:
    """All that training can see of prepared data."""
    dataset = data.Dataset([directory], 16)
    held_out = dataset.val[""]
    tokens = np.concatenate([*dataset.train.tokens, *held_out.tokens]).tobytes()
    return dataset.fingerprint, dataset.tokenizer.to_json(), dataset.train.rows, held_out.rows, tokens


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_data_are_noticed(prepared, tmp_path, count):
    """`verify` finds damage of any file. Opening finds what can be found without reading all of the shards:
    damage of the manifest, of the tokenizer, and of size or header of a shard.
    """
    names = sorted(path.name for path in prepared.glob("*.*") if path.name[0] != ".")
    assert len(names) > 6
    rng, refused = random.Random(SEED), 0
    expected, copy = state_of(prepared), tmp_path / "copy"
    manifest = json.loads((prepared / "manifest.json").read_text())
    for _ in range(count):
        shutil.copytree(prepared, copy, dirs_exist_ok=True)
        victim, other = (copy / name for name in rng.sample(names, 2))
        damage(rng, victim, other)
        try:
            verify(copy)
        except UserError as error:
            refused += 1
            assert str(copy) in str(error) and "\n" not in str(error)
            if victim.suffix != ".bin" or victim.stat().st_size != (prepared / victim.name).stat().st_size:
                with pytest.raises(UserError):
                    state_of(copy)
        else:  # white space of the manifest, a zero where there was one, equal files
            assert state_of(copy) == expected
            now = json.loads((copy / "manifest.json").read_text())
            assert all(now[key] == manifest[key] for key in manifest if key != "checksum")
    assert refused > 0.8 * count


def test_a_wrong_position_in_an_unfinished_manifest_is_noticed(prepared, tmp_path):
    """A prepare that went on from there would skip or repeat documents."""
    out = shutil.copytree(prepared, tmp_path / "out")
    path = out / "manifest.json"
    packing.write_manifest(out, json.loads(path.read_text()) | {"complete": False})
    manifest = data.read_manifest(out)
    assert manifest["complete"] is False
    manifest["shards"][-1]["end"][0] -= 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="manifest.json"):
        data.read_manifest(out)
