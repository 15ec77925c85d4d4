"""Files that survive a crash, locks, digests and JSON."""

import errno

import pytest

from cli.files import lock_file, not_made, replacing, sample_digest, to_json, write_atomically


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
    write_atomically(path, b"a", b"b")
    assert path.read_bytes() == b"ab"


def test_a_quota_may_be_raised(tmp_path):
    assert not_made(tmp_path, OSError(errno.EDQUOT, "so"), "way out").exit_code == 1


def test_a_digest_of_samples_reads_the_length_the_front_the_middle_and_the_end(tmp_path):
    content, digests = bytes(6 * 65536), {}
    for at in (None, 0, 65535, 65536, 3 * 65536, 5 * 65536, 6 * 65536 - 1, 6 * 65536):
        (tmp_path / "file").write_bytes(content if at is None else content[:at] + b"x" + content[at + 1:])
        digests[at] = sample_digest(tmp_path / "file")
    assert len({*digests.values()}) == 7 and digests[65536] == digests[None]  # which it does not see


def test_json_holds_what_utf_8_cannot(tmp_path):
    assert to_json({"a": "é\udcff", "path": tmp_path}) == f'{{"a": "é?", "path": "{tmp_path}"}}'
