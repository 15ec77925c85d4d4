"""How a command fails: packages that are missing or broken, numbers of a launcher, lists of names."""

import sys
from types import SimpleNamespace

import pytest

import train_mlm
from cli.errors import UserError, first_line, from_launcher, joined, local_rank, needed
from prepare import sources
from vocab import bpe
from weights import use


def use_gguf():
    run = SimpleNamespace(model_class=None, args=SimpleNamespace(export="gguf"), world=None, saved=None,
                          command="")
    use.use_model(run)


NEED = [("gguf", use_gguf), ("pyarrow", lambda: next(sources.read_parquet(SimpleNamespace(
            dataset="parquet:x", files=[]), None))),
        ("tokenizers", lambda: bpe.train_bpe(["a"], 300))]


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "SystemExit"])
def test_a_broken_package_is_named(error, tmp_path, monkeypatch):
    """In front of the one that is installed; with what its import raises."""
    (tmp_path / "front").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "front")
    for package, call in NEED:
        (tmp_path / "front" / f"{package}.py").write_text(f"raise {error}('it is broken')")
        for name in [*sys.modules]:
            if name.partition(".")[0] == package:
                monkeypatch.delitem(sys.modules, name)
        with pytest.raises(UserError, match=rf"{error}: it is broken\).*--force-reinstall {package}\.$"):
            call()


@pytest.mark.parametrize("package, call", NEED)
def test_a_missing_package_is_named(package, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {package}.$"):
        call()


def test_a_package_that_another_lacks_is_not_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError, match="--force-reinstall mine"), needed("mine", "--flag"):
        import safetensors  # noqa: F401


def test_what_is_no_number_in_the_environment_is_0(monkeypatch, capsys):
    """The help is printed once on a node."""
    for value, rank in (("x", 0), ("-1", 0), ("", 0), ("2", 2)):
        monkeypatch.setenv("LOCAL_RANK", value)
        assert local_rank() == rank
        with pytest.raises(SystemExit):
            train_mlm.parse_args(["--help-all"])
        assert ("--timeout" in capsys.readouterr().out) == (rank == 0)
    assert from_launcher("NO_SUCH_NUMBER", 3) == 3


def test_errors_and_names_are_shortened():
    assert first_line(ValueError("a  b\nc")) == "ValueError: a b" and first_line(UserError("a\nb")) == "a"
    assert len(first_line(ValueError("x" * 400))) == 300
    assert joined([*"abcdefgh"])[-1] == "h" and joined([*"abcdefghi"]).endswith(", h and 1 more")
