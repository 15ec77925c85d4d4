"""The state of training, for tests that need no whole run."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import ddp_utils
import startup.run
import train_hrm
from model import HRM, HRMConfig, make_optimizers
from training.step import TrainState
from training.strategies import build_model, copy_weights

TINY = dict(vocab_size=60, padded_vocab=64, seq_len=16, n_layer=1, n_head=2, d_model=16, ff=32)
META = {"loss": 2.5, "settings": {"steps": 10}}  # what each checkpoint has


@pytest.fixture
def world():
    yield ddp_utils.init("gloo", "cpu")
    torch.distributed.destroy_process_group()


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
    return TrainState(model, optimizers, run)


def make(seed=0, **changes) -> HRM:
    torch.manual_seed(seed)
    return HRM(HRMConfig(**TINY | changes))


def placed(world, strategy: str, comm="fp32", **changes) -> HRM:
    """The weights of make(), replicated or in shards."""
    weights = make(**changes)
    model = build_model(HRM, weights.config, world, strategy, comm)
    copy_weights(model, weights.state_dict(), world)
    return model


def batch(seed) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(60, (2, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def take_step(state: TrainState, factor=1.0, stop=None):
    """A step on the batch of this rank, with a loss of `factor` times its own. Returns the gradient norm."""
    (state.wrapped(*batch(state.world.rank))[0] * factor).backward()
    norm = state.clip_gradients(1.0, stop)
    state.optimizer_step(1e-2, norm)
    return norm


def make_state(world, seed=0, optimizer="adamw", **changes) -> TrainState:
    """After two steps."""
    state = train_state(make(seed), world, optimizer=optimizer, **{"ema": 0.9} | changes)
    for _ in range(2):
        take_step(state)
    return state


def save(out, world, state, steps=(1,), keep_last=3) -> None:
    """Writes checkpoints of a state, as those of other steps."""
    (out / "checkpoints").mkdir(exist_ok=True)
    checkpoints = ddp_utils.Checkpoints(out, world, keep_last, str)
    meta = {"samples": 7, "family": "HRM", "model_config": asdict(state.model.config)}
    for step in steps:
        checkpoints.save(step, state, meta | META)
    checkpoints.close()
