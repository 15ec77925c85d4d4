"""The state of training, for tests that need no whole run."""

from types import SimpleNamespace

import startup.run
import train_hrm
from model import make_optimizers
from training.step import TrainState


def flags_of(trainer, argv: list[str]):
    """All flags of a new run of a trainer."""
    return startup.run.resolve_flags(trainer.parse_args(argv))


def run_of(world, **changes) -> SimpleNamespace:
    """As much of a run as TrainState and set_modes read, in fp32 with a learning rate of 1e-2; `changes` are
    other flags.
    """
    args = flags_of(train_hrm, ["--precision", "fp32", "--lr", "1e-2"])
    vars(args).update(changes)
    return SimpleNamespace(args=args, world=world, say=print, saved=None)


def train_state(model, world, **changes) -> TrainState:
    """As a trainer makes it, for run_of(world, **changes)."""
    run = run_of(world, **changes)
    optimizers = make_optimizers(model, run.args.optimizer, run.args.lr, train_hrm.BETAS,
                                 run.args.weight_decay)
    state = TrainState(model, optimizers, run)
    return state
