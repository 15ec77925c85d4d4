"""Files that survive a crash, locks, digests and JSON."""

import json

import pytest

from cli.files import digest_json, lock_file, read_json, replacing, sample_digest, to_json


def test_a_lock_that_is_held_is_never_taken(tmp_path):
    """Also not where nobody can be told, as after `| head`: a closed pipe is no file system without locks."""
    with open(tmp_path / "lock", "a") as held, open(tmp_path / "lock", "a") as other:
        assert lock_file(held, pytest.fail) == ""

        def say():
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            lock_file(other, say)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    for content, error in ((b"old", None), (b"new", ZeroDivisionError), (b"new", None)):
        (tmp_path / ".tmp-file").symlink_to(tmp_path / "elsewhere")  # it must not be followed
        before = path.read_bytes() if path.exists() else None
        try:
            with replacing(path) as file:
                file.write(content)
                if error:
                    raise error
        except ZeroDivisionError:
            content = before
        assert path.read_bytes() == content and [*tmp_path.iterdir()] == [path]


def test_a_digest_of_samples_reads_the_length_the_front_the_middle_and_the_end(tmp_path):
    size = 65536
    content = bytes(6 * size)
    texts = [content, content + b"\0", *(content[:at] + b"x" + content[at + 1:] for at in (
        0, size - 1, 3 * size, 4 * size - 1, 5 * size, 6 * size - 1, size, 4 * size))]
    digests = []
    for text in texts:
        (tmp_path / "file").write_bytes(text)
        digests.append(sample_digest(tmp_path / "file"))
    assert len({*digests}) == 8 and digests[-2:] == [digests[0]] * 2  # the last two it does not see


def test_json_holds_what_utf_8_cannot(tmp_path):
    text = to_json({"a": "é\udcff", "path": tmp_path})
    assert text == f'{{"a": "é?", "path": "{tmp_path}"}}'
    (tmp_path / "file").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "file") == json.loads(text)
    assert digest_json([1, "a"]) == digest_json((1, "a")) != digest_json([1, "b"])
