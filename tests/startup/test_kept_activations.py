"""kept_for_backward of startup/dry_run.py: what blocks keep, and which sizes fit a GPU."""

import pytest
import torch
from states import flags_of
from tiny_models import BUILDS, gpt2

import train_hrm
from model import GPT2, HRM, use_device
from ops.cross_entropy import logits_bytes
from startup import dry_run

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # the GPU is not touched
LARGER = {"seq_len": 64, "n_head": 4, "d_model": 64}


@pytest.mark.full
@pytest.mark.parametrize("name, mode", [("hrm", "none"), ("hrm", "selective"), ("gpt2", "selective"),
                                        ("mlm", "block")])
def test_compiled_blocks_keep_what_is_counted(name, mode):
    """Against what autograd saves in blocks that Inductor has compiled."""
    model = BUILDS[name](**LARGER)
    inputs = model.dummy_inputs(4, CPU)
    use_device(model, CPU, torch.bfloat16, mode, dynamic=False)
    sizes, known = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def seen(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = model(**inputs)[0]
    torch.compiler.reset()  # Dynamo gives up on a block of which it has compiled many variants
    counted = dry_run.kept_for_backward(type(model), model.config, CPU, torch.bfloat16, mode, inputs, True)
    torch.compiler.reset()
    assert counted == pytest.approx(sum(sizes.values()), rel=0.1) and loss > 0


@pytest.mark.full
@pytest.mark.parametrize("size, faster", [("350m", "none"), ("1b", "selective")])
def test_the_sizes_have_the_fastest_checkpointing_that_fits_into_80_gb(size, faster):
    args = flags_of(train_hrm, ["--size", size])
    model = dry_run.empty_model(HRM, args)
    inputs = model.dummy_inputs(train_hrm.SIZES[size]["batch"], "meta")

    def fits(mode: str) -> bool:
        kept = dry_run.kept_for_backward(HRM, model.config, GPU, torch.bfloat16, mode, inputs, compiled=True)
        kept += logits_bytes(inputs["targets"].numel(), model.config.padded_vocab, torch.bfloat16, True)
        torch.compiler.reset()
        return dry_run.fits(dry_run.memory_of(model, "ddp", args, 8, kept), 80, GPU)

    assert fits(args.checkpoint_activations) and not fits(faster)


def test_dropout_does_not_count_what_only_a_cpu_keeps():
    inputs, kept = gpt2().dummy_inputs(4, CPU), {}
    for dropout in (0.0, 0.1):
        config = gpt2(dropout=dropout).config
        kept[dropout] = [dry_run.kept_for_backward(GPT2, config, GPU, torch.bfloat16, mode, inputs, False)
                         for mode in ("none", "selective", "block")]
    none, selective, block = kept[0.0]
    assert kept[0.0] == kept[0.1] and none > selective > block
