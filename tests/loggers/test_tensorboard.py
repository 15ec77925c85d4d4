"""loggers/tensorboard.py: each logged step is one point of each curve, as TensorBoard itself reads them."""

import math
import os
import time
from pathlib import Path

import pytest
from logs import begun, block, record

from loggers.tensorboard import EventFile

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def events(log) -> EventFile:
    """An epoch has 400 tokens, a step 100."""
    if (log.out / "tb").exists():
        time.sleep(1 - time.time() % 1)  # names of files have seconds, by which TensorBoard orders them
    return EventFile(log)


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of each curve as TensorBoard reads them."""
    events = event_accumulator.EventAccumulator(str(out / "tb"), {"scalars": 0, "tensors": 0}).Reload()
    assert events.Tags()["tensors"] == ["settings/text_summary"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def steps_of(out: Path) -> list[int]:
    return [step for step, _ in curves(out)["Loss/train_step"]]


def test_tags(tmp_path):
    log = begun(tmp_path, 0, events)
    log.write(record(1, val_loss=4.5, bp_steps=2, mine=2.5, **{"val_exact/easy": 0.7}), "")
    log.write(record(2, loss=math.nan, mfu=None, lr="0.1", grad_norm=[1]), "")
    log.write({"step": 2, "val_loss": 4.0, "val_mine": 1.0}, "")
    log.close()
    wanted = {
        "Loss/train_step": [(1, 4.9)], "Loss/val_epoch": [(1, 4.5), (2, 4.0)], "LR": [(1, 1e-3)],
        "GradNorm": [(1, 1.0)], "Throughput/tokens_per_sec": [(1, 50.0), (2, 50.0)],
        "Throughput/mfu": [(1, 0.25)], "HRM/bp_steps": [(1, 2)], "Pairs/val_exact/easy": [(1, 0.7)],
        "Train/mine": [(1, 2.5)], "Val/val_mine": [(2, 1.0)], "System/peak_memory_GB": [(1, 1.0), (2, 1.0)],
        "System/CPU_percent": [(1, 5.0), (2, 5.0)]}
    found = curves(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(points == [pytest.approx(point) for point in wanted[tag]] for tag, points in found.items())


def test_the_curves_of_epochs_are_of_their_logged_steps(tmp_path):
    """The last step ends the last epoch. Neither evaluations nor the time between two starts are in the
    seconds.
    """
    log = begun(tmp_path, 0, events)
    for step in range(1, 11):
        changes = {"loss": step, "tokens_per_sec": 50.0 if step < 9 else 25.0}
        log.write(record(step, **changes), "")
        log.write({"step": step, "tokens": 100 * step, "val_loss": 1.0, "time": 1.8e9}, "")
        if step == 7:  # it is killed
            log = begun(tmp_path, step - 1, events)
            log.write(record(step, **changes, time=1.9e9), "")
    log.close()
    found = curves(tmp_path)
    assert found["Loss/train_epoch"] == [(4, 2.5), (8, 6.5), (10, 9.5)]
    assert found["Time/epoch_seconds"] == [(4, 8.0), (8, 8.0), (10, 8.0)]


@pytest.mark.parametrize("told", [True, False])
def test_an_open_tensorboard_forgets_what_is_made_again(tmp_path, monkeypatch, told):
    """Also half a record. The newest file has all points, so that TensorBoard's faster reader, which a
    program cannot ask, shows the same.
    """
    if not told:  # the control: TensorBoard is not told what to forget
        made = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter",
                            lambda directory, purge_step, **named: made(directory, **named))
    log = begun(tmp_path, 0, events)
    for step in range(1, 9):
        log.write(record(step), "")
    log.write({"step": 8, "val_loss": 4.0}, "")
    path, = (tmp_path / "tb").iterdir()
    os.truncate(path, path.stat().st_size - 30)
    reader = event_accumulator.EventAccumulator(str(tmp_path / "tb"), {"scalars": 0})

    def seen() -> list[int]:
        return [event.step for event in reader.Reload().Scalars("Loss/train_step")]

    assert seen() == [*range(1, 9)]
    for _ in range(2):  # killed each time
        log = begun(tmp_path, 5, events)
        log.write(record(6), "")
    assert (seen() == [*range(1, 7)]) == told
    for old in sorted((tmp_path / "tb").iterdir())[:-1]:
        old.unlink()
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("code, why", [
    (None, "pip install tensorboard"), ("raise SystemExit('made up')", "SystemExit: made up")])
def test_a_package_that_is_missing_or_broken_ends_no_run(tmp_path, monkeypatch, capsys, code, why):
    """Later it is there, and so is the whole curve."""
    with monkeypatch.context() as patch:
        block(patch, "tensorboard", code and tmp_path, code)
        log = begun(tmp_path, 0, events)
        log.write(record(1), "")
        log.close()
    assert capsys.readouterr().out.count(why) == 1
    begun(tmp_path, 1, events)
    assert steps_of(tmp_path) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["thread", "start"])
def test_what_fails_while_curves_are_written_costs_no_point(tmp_path, monkeypatch, capsys, where):
    """A full disk. The next start writes all points."""
    def full(*_):
        raise OSError(28, "No space left on device")

    broken = "tensorboard.summary.writer.record_writer.RecordWriter.write", full
    if where == "start":
        monkeypatch.setattr(*broken)
    log = begun(tmp_path, 0, events)
    log.write(record(1), "")
    monkeypatch.setattr(*broken)
    for step in (2, 3, 4):
        log.write(record(step), "")
    log.close()
    assert capsys.readouterr().out.count("EventFile" if where != "start" else "TensorBoard") == 1
    monkeypatch.undo()
    begun(tmp_path, 4, events)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
