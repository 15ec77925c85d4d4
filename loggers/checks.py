"""What a run says of a trainer that was edited: a loss that is divided twice, and an optimizer of its own."""

import functools

from torch.optim.optimizer import register_optimizer_step_post_hook

from monitor import at_end


def begin_checks(run, model, log):
    """Has the log say, once each, what these checks find. Before it is opened, and on rank 0 alone."""
    if log.active:
        hook = register_optimizer_step_post_hook(foreign_parameters(model, log.say))  # of all in this process
        at_end.callback(hook.remove)
        log.sinks.append(MeanLoss(run, log, hook))


class MeanLoss:
    """Whether a loss is the mean over a micro-batch, as F.cross_entropy returns by default. The loop divides
    it by the labels of the step, and the log again, so that all losses of a start are that much too small.
    A sink of the log, up to the first evaluation of this start: later a small loss may be one of texts
    that were learned by heart.
    """

    def __init__(self, run, log, hook):
        self._run, self._log, self._hook = run, log, hook
        self._first = None  # the first loss since this start
        # a loss that the first one cannot be far below; with --init-from only the evaluation tells
        self._usual = log.entropy
        if run.saved:
            self._usual = run.saved["loss"]
        elif run.args.init_from:
            self._usual = None
        self._done = False

    def log(self, record: dict):
        if self._done:
            return
        if record.get("loss") is not None:
            self._labels = record["labels"] / (self._run.grad_accum * self._run.world.world_size)
            self._loss = record["loss"]
            self._first = self._first or self._loss
            self._judge(self._usual)
        elif "val_loss" in record and self._first:
            if not self._run.saved:
                self._judge(record["val_loss"])
            self._done = True

    def _judge(self, usual: float | None):
        if usual and self._first < usual / 10 and usual / 2 < self._loss * self._labels < usual * 2:
            self._done = True
            self._log.say(f"WARNING: the loss is {self._loss:.4g}, but times the {self._labels:,.0f} labels "
                          f"of a micro-batch it is {self._loss * self._labels:.4g}, as large as usual, so "
                          "it seems to be a mean that is divided by them once more. The objective and the "
                          "sums of a trainer are sums over labels: with F.cross_entropy write "
                          "reduction='sum'")

    def close(self):
        self._hook.remove()  # what is trained after the run is not of it


def foreign_parameters(model, say):
    """A hook after each step of any optimizer: whether it has parameters that are not the model's."""
    ours = {*model.parameters()}
    say_once = functools.cache(say)

    def hook(optimizer, args, kwargs):
        foreign = {p for group in optimizer.param_groups for p in group["params"]} - ours
        if foreign:  # where parameters are gathered from shards, the model has others than at the start
            foreign -= {*model.parameters()}
        if foreign:
            say_once(f"WARNING: {type(optimizer).__name__} trains parameters that are not the model's "
                     f"({len(foreign)}, one of shape {max(list(p.shape) for p in foreign)}): no checkpoint "
                     "holds them, and each process trains its own. To keep them, let the model's constructor "
                     "make them, see docs/changing.md")

    return hook
