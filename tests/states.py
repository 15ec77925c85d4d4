"""The state of training, for tests that need no whole run."""

import ddp_utils
import train_hrm
from model import make_optimizers


def train_state(model, world, **changes) -> ddp_utils.TrainState:
    """As a trainer makes it, in fp32 with a learning rate of 1e-2; `changes` are other flags."""
    args = train_hrm.parse_args(["--precision", "fp32", "--lr", "1e-2"])
    vars(args).update(changes)
    ddp_utils.set_modes(model, args, world, print)
    optimizers = make_optimizers(model, args.optimizer, args.lr, train_hrm.BETAS, args.weight_decay)
    return ddp_utils.TrainState(model, optimizers, world, args.strategy, args.comm, args.ema)
