"""Curves for TensorBoard."""

from contextlib import suppress
from statistics import fmean

from cli.errors import PACKAGE_ERRORS
from loggers.machine import why_not
from monitor import OTHER_KEYS, TAGS


class EventFile:
    """Curves for TensorBoard, and the settings as text. Each start writes all records to a new file, and
    TensorBoard then forgets the older files. Appending isn't enough: older files may lack points, for
    instance after a full disk, and TensorBoard's faster reader forgets a point only if the new file has one.

    The loss of an epoch is the mean over its logged steps. Its seconds are training time, without
    evaluations, saves and the time between two starts.
    """

    def __init__(self, log):
        self._epoch_tokens = log.settings["epoch_tokens"]
        self._steps = log.settings["steps"]
        self._tokens, self._losses, self._seconds = 0, [], 0.0  # tokens so far, and of this epoch the others
        self._writer = None  # none if nothing can be written
        try:
            from torch.utils.tensorboard import SummaryWriter
            self._writer = SummaryWriter(log.out / "tb", purge_step=0, filename_suffix=".run")
            self._writer.add_text(
                "settings", "\n".join(f"    {name}: {value}" for name, value in log.settings.items()), 0)
            for record in log.records:
                self._add(record)
            self._writer.flush()
        except PACKAGE_ERRORS as error:
            self._writer = None
            log.say(f"curves for TensorBoard are not written: {why_not('tensorboard', error)}")

    def _add(self, record: dict):
        """Adds all points of a record as one event, because the writer opens the file for each event."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        own = "Train" if "loss" in record else "Val"
        points = []
        for key, value in (record | self._end_of_epoch(record)).items():
            base, slash, name = key.partition("/")  # the name of a validation set
            if isinstance(value, int | float) and base not in OTHER_KEYS:
                tag = TAGS.get(base, f"{own}/{base}") + slash + name
                points.append(Summary.Value(tag=tag, simple_value=value))
        self._writer.file_writer.add_summary(Summary(value=points), record["step"], record.get("time"))

    def _end_of_epoch(self, record: dict) -> dict[str, float]:
        """The loss and seconds of an epoch, for the record of the epoch's or the run's last step; else {}."""
        if record.get("loss") is None:  # an evaluation, or NaN
            return {}
        before, self._tokens = self._tokens, record["tokens"]
        self._losses.append(record["loss"])
        self._seconds += (self._tokens - before) / max(record["tokens_per_sec"], 0.1)
        inside = self._tokens // self._epoch_tokens == before // self._epoch_tokens
        if inside and record["step"] != self._steps:
            return {}
        scalars = {"epoch_loss": fmean(self._losses), "epoch_seconds": self._seconds}
        self._losses, self._seconds = [], 0.0
        return scalars

    def log(self, record: dict):
        if self._writer:
            self._add(record)
            self._writer.flush()

    def close(self):
        if self._writer:
            with suppress(*PACKAGE_ERRORS):  # nothing is lost: all records are flushed
                self._writer.close()
