"""loggers/picture.py: a run as lists and as a picture."""

import json
import os

import pytest
from conftest import finish, start
from logs import begun, block, clock, command, record, write_records

from cli.files import write_atomically
from loggers import picture
from loggers.picture import History

imread = pytest.importorskip("matplotlib.image").imread


def test_a_picture_has_the_curves_of_a_record(tmp_path, monkeypatch):
    """The exact matches and a number of the trainer's own have axes of their own."""
    drawn = []
    monkeypatch.setattr(picture, "save_picture", lambda figure, path: drawn.append(figure))
    found = {"val_loss": 1.0, "val_exact": 0.5, "val_exact/easy": 0.75}
    records = [record(1, mine=2.5), {"step": 1, "tokens": 32, **found}, record(2, loss=None, mine=3.0)]
    picture.draw_curves("run", records, tmp_path / "run.png")
    figure, = drawn
    assert [[(*line.get_xdata(), *line.get_ydata()) for line in axes.lines] for axes in figure.axes] == [
        [(1, 4.9), (1, 1.0)], [(1, 2, 1e-3, 1e-3)], [(1, 2, 50.0, 50.0)], [(1, 2, 2.5, 3.0)], [(1, 0.5)]]


def test_the_picture_is_drawn_at_each_evaluation(tmp_path, monkeypatch):
    """Unless these come so fast that it would take more than 5 % of the time."""
    now, drawn = clock(monkeypatch), []

    def draw(name, records, path):
        drawn.append(records[-1]["step"])
        now[0] += 1.0

    monkeypatch.setattr(picture, "draw_curves", draw)
    log = begun(tmp_path, 0, History)
    for step in range(100, 700, 100):
        log.write(record(step), "")
        log.write({"step": step, "val_loss": 1.0}, "")
        now[0] += 40.0 if step < 400 else 9.0
    assert drawn == [100, 200, 300, 400]
    log.close()
    assert drawn[-1] == 600
    history = json.loads((tmp_path / "history.json").read_text())
    assert history["step"][-2:] == [600, 600] and history["loss"][-2:] == [-55.0, None]


def test_the_command_and_a_run_draw_at_the_same_time(tmp_path, capsys, monkeypatch):
    """Neither takes the other's file. Without a picture, too, the line is printed."""
    write_records(tmp_path, record(1), record(2))
    real, image = os.fsync, tmp_path / "training_history.png"

    def fsync(descriptor):
        monkeypatch.setattr(os, "fsync", real)
        write_atomically(image, b"of the run")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    code, _, errors = command(capsys, tmp_path)
    assert code == 0 and str(image) in errors, errors
    assert imread(image).shape[:2] == (800, 800)
    assert len([*tmp_path.iterdir()]) == 2
    image.unlink()
    image.mkdir()  # so no picture can take this name, not even for root
    code, out, errors = command(capsys, tmp_path)
    assert code == 0 and json.loads(out)["step"] == 2 and str(image) in errors
    assert len([*tmp_path.iterdir()]) == 2


def test_the_backend_of_a_notebook_ends_no_run(tmp_path):
    """In a process of its own, as with !torchrun, where matplotlib is not imported yet."""
    write_records(tmp_path, record(1))
    backend = "module://matplotlib_inline.backend_inline"
    code = ("import os, sys; from loggers.command import main; main(sys.argv[1:]); "
            "print(os.environ['MPLBACKEND'], 'matplotlib' in sys.modules)")
    done = finish(start(["python", "-c", code, tmp_path], MPLBACKEND=backend))
    assert done.code == 0 and f"{backend} True" in done.out, done.out
    assert (tmp_path / "training_history.png").exists()


@pytest.mark.parametrize("code, why", [
    (None, "pip install matplotlib"), ("raise SystemExit('gone')", "gone")])
def test_without_matplotlib_the_lists_are_written(tmp_path, monkeypatch, capsys, code, why):
    block(monkeypatch, "matplotlib", code and tmp_path, code)
    log = begun(tmp_path, 0, History)
    log.write(record(1, val_loss=4.0), "")
    log.close()
    assert capsys.readouterr().out.count(why) == 1
    assert json.loads((tmp_path / "history.json").read_text())["val_loss"] == [4.0]
    code, out, errors = command(capsys, tmp_path)
    assert code == 0 and why in errors and json.loads(out)["loss"] == 4.9
