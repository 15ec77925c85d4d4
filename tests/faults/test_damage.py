"""Files that are no longer what was written: bits flipped, cut off, zeroed, exchanged, gone.

Each damage is noticed, or what is read is what was written (where it hit nothing that is read). FAULTS_SEED
repeats a choice.
"""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ddp_utils import make_state, save, world  # noqa: F401

import data
from cli.errors import RunError, UserError
from ddp_utils import list_checkpoints, load_checkpoint, read_checkpoint
from prepare import packing, pipeline
from prepare.command import verify
from prepare.pipeline import prepare
from vocab.tokenizer import load_tokenizer

SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))


def damage(rng: random.Random, path: Path, other: Path) -> str:
    """Harms a file in one of seven ways. Returns which; the content may be the same by chance."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    match kind := rng.choice(("bit", "cut", "zeros", "noise", "hole", "grown", "swap")):
        case "bit":
            content[at] ^= 1 << rng.randrange(8)
        case "cut":
            del content[at:]
        case "zeros":
            content[at:at + 512] = bytes(len(content[at:at + 512]))
        case "noise":
            content[at:at + 16] = rng.randbytes(len(content[at:at + 16]))
        case "hole":
            del content[at:at + rng.randrange(1, 512)]
        case "grown":
            content[at:at] = rng.randbytes(rng.randrange(1, 512))
        case "swap":
            theirs = other.read_bytes()
            other.write_bytes(content)
            content = theirs
    path.write_bytes(content)
    return kind


# -----------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_checkpoints(tmp_path, world, capsys, count):
    """The newest of three is damaged: the one before is taken, and that is said; or nothing has changed."""
    save(tmp_path, world, make_state(world), steps=(1, 2, 3))
    contents = {path: path.read_bytes() for path in list_checkpoints(tmp_path)}
    newest, before, _ = contents
    original = read_checkpoint(newest)
    tensors = {(group, name): t.clone() for group, named in original["tensors"].items()
               for name, t in named.items()}
    rng, refused = random.Random(SEED), 0
    for _ in range(count):
        for path, content in contents.items():
            path.write_bytes(content)
        kind, said = damage(rng, newest, before), []
        found = load_checkpoint(tmp_path, said.append)
        if found["step"] == 3:
            assert not said and kind != "swap" and found["samples"] == 7, f"FAULTS_SEED={SEED}: {kind}"
            assert all(torch.equal(t, found["tensors"][group][name]) for (group, name), t in tensors.items())
            assert found["tensors"].keys() == original["tensors"].keys()
            continue
        refused += 1
        assert found["step"] == (1 if kind == "swap" else 2)
        assert newest.name in said[0] and "is damaged" in said[0]
        assert len(said) == 3 - found["step"]
    assert refused > count / 2
    with capsys.disabled():
        print(f"\n  FAULTS_SEED={SEED}: {count} damaged checkpoints, {refused} refused, {count - refused} "
              "harmless ", end="")


def test_tensors_exchanged_inside_a_checkpoint(tmp_path, world):
    """With checksums that are right: a file made wrong, which only the sums of the tensors can tell."""
    save(tmp_path, world, make_state(world))
    path = list_checkpoints(tmp_path)[0]
    saved = torch.load(path, weights_only=True)
    read_checkpoint(path)
    moments = saved["tensors"]["optimizer"]
    a, b = "embed.weight/exp_avg", "embed.weight/exp_avg_sq"
    moments[a], moments[b] = moments[b], moments[a]
    torch.save(saved, path)
    with pytest.raises(RunError, match="its tensors are not those"):
        read_checkpoint(path)


def test_a_checkpoint_under_the_name_of_another_step(tmp_path, world):
    """A run that believed the name would remove its own new checkpoints as older than this one."""
    save(tmp_path, world, make_state(world), steps=(1, 2))
    newest, older = list_checkpoints(tmp_path)
    shutil.copy(older, newest)
    with pytest.raises(RunError, match="step 1"):
        read_checkpoint(newest)
    shutil.copy(older, tmp_path / "any-other-name.pt")
    assert read_checkpoint(tmp_path / "any-other-name.pt")["step"] == 1


# -----------------------------------------------------------------------------------------------------------
# Shards, manifest and tokenizer


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    words = random.Random(0)
    lines = [json.dumps({"text": " ".join(words.choices("one two three four five six".split(), k=40))})
             for _ in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return prepare(f"jsonl:{folder}/text.jsonl", folder / "out", "bytes", shard_tokens=3000, workers=1,
                   val_split="hash:0.2")


def state_of(directory: Path) -> tuple:
    """All that training can see of prepared data."""
    dataset = data.Dataset([directory], 16)
    held_out = dataset.val[""]
    tokens = np.concatenate([*dataset.train.tokens, *held_out.tokens]).tobytes()
    return dataset.fingerprint, dataset.tokenizer.to_json(), dataset.train.rows, held_out.rows, tokens


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_prepared_data(prepared, tmp_path, capsys, count):
    """`verify` finds it, in any file. Opening the data finds what can be found without reading all of them:
    damage to the manifest, to the tokenizer, and to size or header of a shard."""
    names = sorted(path.name for path in prepared.glob("*.*") if path.name[0] != ".")
    assert len(names) > 6
    rng, refused, at_open = random.Random(SEED), 0, 0
    expected = state_of(prepared)
    manifest = json.loads((prepared / "manifest.json").read_text())
    for _ in range(count):
        shutil.copytree(prepared, tmp_path / "copy", dirs_exist_ok=True)
        victim, other = (tmp_path / "copy" / name for name in rng.sample(names, 2))
        kind = damage(rng, victim, other)
        try:
            verify(tmp_path / "copy")
        except UserError as error:
            refused += 1
            message, size = str(error), (prepared / victim.name).stat().st_size
            assert str(tmp_path / "copy") in message and message.endswith(".") and "\n" not in message
            sized = victim.suffix == ".bin" and victim.stat().st_size == size
            try:
                state_of(tmp_path / "copy")
            except UserError:
                at_open += 1
            else:
                assert sized, f"FAULTS_SEED={SEED}: {kind} of {victim.name} is found by verify only"
        else:  # white space of the manifest, a zero where there was one, equal files
            assert state_of(tmp_path / "copy") == expected, f"FAULTS_SEED={SEED}: {kind} of {victim.name}"
            now = json.loads((tmp_path / "copy" / "manifest.json").read_text())
            assert all(now[key] == manifest[key] for key in manifest if key != "checksum")
    assert refused > 0.9 * count
    capsys.readouterr()
    with capsys.disabled():
        print(f"\n  FAULTS_SEED={SEED}: {count} times damaged data, {refused} found by verify, {at_open} of "
              f"these at open too, {count - refused} harmless ", end="")


def test_a_wrong_position_in_an_unfinished_manifest_is_noticed(prepared, tmp_path):
    """A prepare that went on from there would skip or repeat documents."""
    out = shutil.copytree(prepared, tmp_path / "out")
    text = (out / "manifest.json").read_text()
    manifest = json.loads(text)
    manifest["complete"] = False
    packing.write_manifest(out, manifest)
    position = json.dumps(manifest["shards"][-1]["end"][0])
    text = (out / "manifest.json").read_text()
    assert data.read_manifest(out)["complete"] is False
    (out / "manifest.json").write_text(text.replace(f" {position},\n", f" {int(position) - 1},\n"))
    with pytest.raises(UserError, match="its checksum is wrong"):
        data.read_manifest(out)


@pytest.mark.parametrize("damage", ["short", "gone", "header", "an id", "tokenizer"])
def test_the_advice_for_damaged_data_leads_on(corpus, tmp_path, damage):
    """To prepare them again alone would not: their manifest says that they are prepared."""
    out = prepare(f"text:{corpus}", tmp_path / "out", "bytes")
    path = out / ("tokenizer.json" if damage == "tokenizer" else "train_000000.bin")
    if damage == "short":
        os.truncate(path, 5000)
    elif damage == "header":
        os.truncate(path, 7)
    elif damage == "an id":
        content = bytearray(path.read_bytes())
        content[data.HEADER_BYTES + 1] = 255
        path.write_bytes(content)
    else:
        path.unlink()
    for use in (verify, lambda out: data.Dataset([out], 16)):
        with pytest.raises(UserError, match="delete its directory and prepare it again.$"):
            use(out)
    shutil.rmtree(out)
    prepare(f"text:{corpus}", out, "bytes")
    verify(out)


def test_limits_are_named_as_flags(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = f"text:{corpus}"
    out = pipeline.locate(source, "bytes", 0, 0, max_tokens=5000)
    with pytest.raises(UserError, match="--max-tokens .5000, now 6000.: give --max-tokens 5000 to use"):
        pipeline.locate(source, "bytes", 0, 0, max_tokens=6000)
    assert pipeline.locate(source, "bytes", 0, 0, max_tokens=5000) == out
    assert pipeline.locate(str(out), "bytes", 0, 0, max_tokens=None) == out


def test_a_trainer_names_its_own_flag_and_the_form_of_bpe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--seq-len. must be 4 or more"):
        pipeline.locate("task:addition", "bytes", 0, 0, row=3)
    with pytest.raises(UserError, match="unknown tokenizer 'bpe:32k', .* bpe:N .trained on the data"):
        load_tokenizer("bpe:32k")
