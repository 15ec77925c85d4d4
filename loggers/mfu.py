"""MFU (model FLOPs utilization): the share of a GPU's peak that the matrix products of a step reach."""

import functools
import re
import statistics

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cli.errors import first_line
from model import HRM, MLM, ModelConfig

# Dense bf16 tensor-core peaks in TFLOP/s, with float32 accumulation, by the driver's name of the GPU. The
# first match counts. Sources: NVIDIA's data sheets for A100, H100, H200 and HGX B200 (figures with sparsity
# are twice as high), and its white papers on Ada (RTX 4090) and GA102 (RTX 3090).
PEAK_TFLOPS = {r"\bA100\b": 312, r"\bH100 PCIe": 756, r"\bH100 NVL": 835, r"\bH100\b": 989,
               r"\bH200 NVL": 835, r"\bH200\b": 989, r"\bB200\b": 2250,
               r"RTX 4090$": 165.2, r"RTX 3090$": 71}


def peak_flops(device, say=print) -> float | None:
    """Peak bf16 FLOP/s of a torch device. None for a CPU and, with a message, for an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(pattern, name):
            return tflops * 1e12
    say(f"MFU is not shown, because the peak of {name} is unknown: add it to PEAK_TFLOPS in loggers/mfu.py")
    return None


def flops_per_token(model_class: type, config: ModelConfig, **example) -> float:
    """FLOPs per token of the matrix products of a training step, with attention as full T × T. Counts them on
    one row of a model on the meta device. `example` has more arguments for its `dummy_inputs`.
    """
    with torch.device("meta"):
        model = model_class(config).to("meta")  # also its buffers
    # the counter takes other kinds of attention for zero FLOPs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**model.dummy_inputs(1, "meta", **example))[0].backward()
    return counter.get_total_flops() / config.seq_len


def examples_of(model: nn.Module, record: dict) -> list[dict]:
    """More arguments of model.dummy_inputs, one dict for each kind of step that a record (with the run's
    settings) stands for. Their FLOPs are averaged.
    """
    c = model.config
    if isinstance(model, MLM):
        return [{"mask_rate": record["mask_rate"]}]
    if isinstance(model, HRM):  # the number of cycles may be random
        drawn = [round(record["cycles"])] if c.halt else range(c.least_cycles or c.cycles, c.cycles + 1)
        return [{"bp_steps": record["bp_steps"], "cycles": cycles} for cycles in drawn]
    return [{}]


class MFU:
    """The MFU of the steps that a record of the log stands for."""

    def __init__(self, run, model: nn.Module, settings: dict):
        self._run = run
        self.model = model
        self._settings = settings
        self._peak = peak_flops(run.world.device, run.say)  # None: MFU is not shown
        self._count = functools.cache(functools.partial(flops_per_token, run.model_class, model.config))

    def flops(self, record: dict) -> float:
        """FLOPs per token of the record's steps."""
        examples = examples_of(self.model, self._settings | record)
        return self._run.flops_factor * statistics.fmean(self._count(**example) for example in examples)

    def __call__(self, record: dict) -> float | None:
        """The MFU, or None if the GPU's peak is unknown or the FLOPs can't be counted (says so once)."""
        if not self._peak:
            return None
        try:
            tokens_per_sec = record["tokens_per_sec"] / self._run.world.world_size
            return tokens_per_sec * self.flops(record) / self._peak
        except Exception as error:  # for instance, shapes that depend on the data
            self._peak = None
            self._run.say(f"MFU is not shown ({type(error).__name__}: {first_line(error)})")
