"""Starting: from a notebook or a script, in any terminal, with rows of one's own; epochs that a resume counts
in another batch; memory that is freed; values that no machine can serve.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, finish, start
from processes import fork
from runs import Trainer, assert_close_runs, assert_same_run, copy_of_the_first_half, steps_of, tensors_of
from states import flags_of
from test_own_evaluation import changed

import ddp_utils
import train_gpt2
import train_hrm
import train_mlm
from cli.errors import UserError
from ddp_utils import STOP_SIGNALS, list_checkpoints, read_checkpoint
from model import ConfigError

GPT2 = Trainer("train_gpt2.py", max_new_tokens=5, batch=2)
TRAINERS = [GPT2, pytest.param(Trainer("train_hrm.py", max_new_tokens=5, ff=64), marks=pytest.mark.full),
            pytest.param(Trainer("train_mlm.py", ff=48, window=16), marks=pytest.mark.full)]


# -------------------------------------------------------------------------------------- notebooks and scripts

def handlers() -> list:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize("module", [train_gpt2, pytest.param(train_hrm, marks=pytest.mark.full),
                                    pytest.param(train_mlm, marks=pytest.mark.full)])
def test_main_can_be_called_again(tmp_path, shards, module, monkeypatch, capsys):
    """With a list of flags, after a mistake, after an interrupt in the middle of a step, to use the run."""
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel-1.json"])
    trainer = Trainer(module.__name__ + ".py", ff=48) if module is not train_gpt2 else GPT2
    flags = trainer.flags(shards, tmp_path / "run", steps=4)
    own = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test before may have changed
    before, hook = handlers(), sys.excepthook

    def cleaned_up() -> bool:
        assert handlers() == before and sys.excepthook is hook and gc.get_freeze_count() == 0
        return not torch.distributed.is_initialized()

    module.main(flags)
    assert cleaned_up()
    for mistake in (["--n-layer", "x"], [*flags, "--seq-len", "16"]):  # before and after the process group
        with pytest.raises(UserError):
            module.main(mistake)
        assert cleaned_up()
    step = ddp_utils.seed_step

    def interrupted(seed, number, rank):
        if number == 6:
            signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt
        step(seed, number, rank)

    with monkeypatch.context() as patch:
        patch.setattr(ddp_utils, "seed_step", interrupted)
        with pytest.raises(KeyboardInterrupt) as held:  # its traceback keeps the frames, as a notebook does
            module.main([*flags, "--steps", "8"])
        assert cleaned_up()
    module.main([*flags, "--steps", "8"])
    assert cleaned_up() and steps_of(tmp_path / "run")[-1]["step"] == 8 and held
    if module is not train_mlm:
        module.main(["--out", str(tmp_path / "run"), "--prompt", "def", "--max-new-tokens", "2"])
        assert "step 8 from" in capsys.readouterr().err and cleaned_up()
    with pytest.raises(KeyboardInterrupt):  # the next interrupt is Python's own
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, own)


SCRIPT = """
import sys
import torch
import train_gpt2
from cli.errors import UserError
*flags, first, second = sys.argv[1:]
for out in (first, second, first):
    try:
        train_gpt2.main(["--no-such-flag"])
    except UserError:
        train_gpt2.main([*flags, "--out", out])  # while sys.exc_info() still has the mistake
    assert not torch.distributed.is_initialized()
print("the script goes on")
"""


def test_a_script_calls_main_on_several_processes(tmp_path, shards):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = GPT2.flags(shards, "unused", steps=2)
    del flags[flags.index("--out"):flags.index("--out") + 2]
    done = fork(2, os.path.relpath(tmp_path / "script.py", ROOT), *flags, tmp_path / "a", tmp_path / "b")
    assert done.code == 0 and done.out.count("the script goes on") == 2, done.out
    assert "this run is complete after 2 steps" in done.out
    assert_same_run(tmp_path / "a", tmp_path / "b")


THREE_TIMES = """
import sys
import torch
import ddp_utils
import train_gpt2
how, *flags = sys.argv[1:]
for _ in range(3):
    if how == "main":
        train_gpt2.main(flags)
    else:  # as torch by itself does
        ddp_utils.init("gloo", "cpu")
        torch.distributed.destroy_process_group()
raise ZeroDivisionError("after the runs")
"""


@pytest.mark.parametrize("how, times", [("main", 0), ("torch", 3)])
def test_an_error_after_three_runs_does_not_name_the_rank_thrice(how, times, tmp_path, shards):
    """Each init_process_group of torch wraps sys.excepthook, and nothing of torch's takes that back."""
    (tmp_path / "script.py").write_text(THREE_TIMES)
    flags = GPT2.flags(shards, tmp_path / "run", steps=2)
    done = finish(start([sys.executable, tmp_path / "script.py", how, *flags], cwd=ROOT, PYTHONPATH=ROOT))
    assert done.code == 1, done.out
    assert done.out.splitlines()[-1] == "[rank0]: " * times + "ZeroDivisionError: after the runs", done.out


# -------------------------------------------------------------------------------------------------- terminals

def in_terminal(encoding: str, *command, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """A command whose arguments are bytes or text, where output has that encoding."""
    env = os.environ | {"PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}
    arguments = [argument if isinstance(argument, bytes) else str(argument) for argument in command]
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, input=stdin, timeout=200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.full  # nine processes that import torch
def test_output_that_is_not_utf_8(tmp_path):
    """What a terminal cannot show is replaced, in each command; so is a stray byte in a prompt."""
    text = "ñandú cigüeña façade 日本語のテキスト Привет — “quoted” …\n" * 400
    (tmp_path / "uni.txt").write_text(text, encoding="utf-8")
    shards, out = tmp_path / "shards", tmp_path / "läuft"
    done = in_terminal("ascii", "data.py", "prepare", "--dataset", f"text:{tmp_path}/uni.txt", "--tokenizer",
                       "bytes", "--out", shards)
    assert done.returncode == 0, done.stdout
    flags = GPT2.flags(shards, out, steps=2, eval_every=2, sample_prompt="ñandú 日本 \udce9")
    done = in_terminal("ascii", "train_gpt2.py", *map(os.fsencode, flags))
    assert done.returncode == 0 and b"training complete" in done.stdout, done.stdout
    assert len(list_checkpoints(out)) == 1
    stray = in_terminal("ascii", "train_gpt2.py", "--out", b"l\xe4uft")
    words = b"argument --out: invalid utf8_path value"
    assert stray.returncode == 2 and words in stray.stdout, stray.stdout
    used = in_terminal("latin-1", "train_gpt2.py", "--out", os.fsencode(out), "--prompt",
                       b"caf\xe9 \xe6\x97\xa5", "--max-new-tokens", "3")
    assert used.returncode == 0 and b"caf? ?" in used.stdout, used.stdout
    chat = in_terminal("utf-8", "train_gpt2.py", "--out", os.fsencode(out), "--chat", "--max-new-tokens", "3",
                       stdin=b"caf\xe9\n")
    assert chat.returncode == 0 and b"Traceback" not in chat.stdout, chat.stdout
    for command in (("data.py", "peek", shards), ("monitor.py", os.fsencode(out))):
        done = in_terminal("ascii", *command)
        assert done.returncode == 0 and b"Traceback" not in done.stdout, done.stdout


# ----------------------------------------------------------------------------------------------------- epochs

@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_epochs_are_counted_in_rows(tmp_path, shards, trainer):
    """Whatever the batch was before; with the same batch nothing changes."""
    flags = {"steps": None, "epochs": 0.02, "save_every": 5, "eval_every": 1000, "log_every": 1,
             "keep_last": 9}
    rows = 11869 * 0.02  # 237.38
    assert trainer.train(0, shards, tmp_path / "run", **flags).code == 0
    whole = read_checkpoint(list_checkpoints(tmp_path / "run")[0])
    assert (whole["step"], whole["samples"]) == (20, 240)
    first = list_checkpoints(tmp_path / "run")[-1]
    for global_batch, steps in ((12, 20), (24, 13), (48, 9), (6, 35)):  # of which 5 are done, 60 rows
        out = tmp_path / str(global_batch)
        done = trainer.train(0, shards, out, resume=first, **flags | {"global_batch": global_batch})
        assert done.code == 0, done.out
        saved = read_checkpoint(list_checkpoints(out)[0])
        assert (saved["step"], saved["settings"]["steps"]) == (steps, steps)
        assert rows <= saved["samples"] < rows + global_batch
        assert steps_of(out)[-1]["lr"] < 2e-4  # the rate has fallen
    ours, theirs = (tensors_of(tmp_path / name) for name in ("run", "12"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    done = trainer.train(0, shards, tmp_path / "run", **flags | {"global_batch": 60})
    assert done.code == 0 and "this run is complete after 20 steps" in done.out, done.out
    less = trainer.train(0, shards, tmp_path / "run", **flags | {"epochs": 0.01})
    assert less.code == 0 and "this run is complete after 20 steps" in less.out, less.out


# --------------------------------------------------------------------------------------------- rows and flags

OURS = {
    "steps": "max-steps max_steps max-iters num-steps iters step",
    "epochs": "num-epochs num-train-epochs epoch",
    "batch": "batch-size per_device_train_batch_size",
    "global-batch": "train-batch-size global-batch-size",
    "lr": "learning-rate learning_rate",
    "schedule": "lr-scheduler lr-scheduler-type",
    "min-lr": "min_lr min-lr-ratio",
    "decay": "warmdown-ratio decay-frac",
    "out": "output-dir out_dir",
    "grad-accum": "gradient-accumulation-steps",
    "warmup": "warmup-steps lr-warmup",
    "seq-len": "block_size max-seq-len",
    "grad-clip": "max-grad-norm gradient-clip",
    "precision": "dtype mixed-precision bf16",
    "weight-decay": "wd",
    "d-model": "n_embd hidden-size",
    "n-head": "num-heads",
    "n-layer": "num-layers",
    "data": "dataset",
    "eval-every": "eval-interval",
    "log-every": "logging-steps",
    "init-from": "model-name-or-path",
}


@pytest.mark.parametrize("module", [train_gpt2, train_hrm, train_mlm])
def test_spellings_of_other_programs_lead_to_our_flags(module):
    for ours, others in OURS.items():
        for other in others.split():
            with pytest.raises(UserError, match=rf": --{other} \(use --{ours}\b"):
                module.parse_args(["--lr", "1", f"--{other}=3"])
    for far in ("--zebra", "two", "-x"):
        with pytest.raises(UserError, match=f"unrecognized arguments: {far}; --help-all"):
            module.parse_args([far])


@pytest.mark.parametrize("module", [train_gpt2, train_hrm, train_mlm])
def test_a_row_with_an_unknown_key_is_refused_by_name(module, monkeypatch):
    for key in ("weight-decay", "grad_clipp"):
        monkeypatch.setitem(module.SIZES, "mine", module.SIZES["tiny"] | {key: 1.0})
        if module is train_mlm:
            monkeypatch.setattr(module, "RECIPES", module.RECIPES | {"mine": module.SIZES["mine"]})
        with pytest.raises(UserError, match=f"mine .* {key}"):
            flags_of(module, ["--size", "mine"])
    nested = {"weight_decay": 0.05}
    monkeypatch.setitem(getattr(module, "RECIPES", module.SIZES), "mine", module.SIZES["tiny"] | nested)
    monkeypatch.setitem(module.SIZES, "mine", module.SIZES["tiny"] | nested)
    assert flags_of(module, ["--size", "mine"]).weight_decay == 0.05
    assert flags_of(module, ["--size", "mine", "--weight-decay", "0.01"]).weight_decay == 0.01
    assert flags_of(module, []).weight_decay == 0.1


@pytest.mark.full
def test_weight_decay_is_a_flag(tmp_path, shards):
    """It reaches the optimizer, and a resume prints a change and takes it."""
    for name, decay in (("none", 0), ("much", 50)):
        assert GPT2.train(0, shards, tmp_path / name, steps=3, weight_decay=decay).code == 0
    none, much = (read_checkpoint(list_checkpoints(tmp_path / name)[0])["tensors"]["model"]["embed.weight"]
                  for name in ("none", "much"))
    assert much.norm() < 0.99 * none.norm()
    done = GPT2.train(0, shards, tmp_path / "none", steps=6, weight_decay=50)
    assert "resuming with weight_decay 50.0 (was 0.0)" in done.out, done.out
    after = read_checkpoint(list_checkpoints(tmp_path / "none")[0])["tensors"]["model"]["embed.weight"]
    assert after.norm() < 0.99 * none.norm()


@pytest.mark.full  # check_fp16_shards of ddp_worker.py has one step of each
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "zero3-offload"])
def test_fp16_in_shards(tmp_path, shards, strategy):
    """The losses of ddp, its scale, and a resume bit for bit."""
    flags = {"precision": "fp16", "steps": 8, "save_every": 4, "eval_every": 8, "batch": 2}
    trainer = Trainer("train_gpt2.py", max_new_tokens=5)
    names = {"ddp": "ddp", strategy: strategy}
    for name in names:
        assert trainer.fork(2, shards, tmp_path / name, strategy=name, **flags).code == 0
    assert_close_runs(tmp_path / "ddp", tmp_path / strategy, 2e-3)
    ours, theirs = (read_checkpoint(list_checkpoints(tmp_path / name)[0]) for name in names)
    assert ours["scaler"] == theirs["scaler"] and ours["scaler"]["scale"] > 0
    copy_of_the_first_half(tmp_path / strategy, tmp_path / "again")
    assert trainer.fork(2, shards, tmp_path / "again", strategy=strategy, **flags).code == 0
    assert_same_run(tmp_path / strategy, tmp_path / "again")


# -------------------------------------------------------------------------------------- memory that is freed

PAGE_FAULTS = """
import resource, sys
import torch
import ddp_utils
if sys.argv[1] == "kept":
    ddp_utils.init(device="cpu")
for i in range(60):
    if i == 50:  # until then small blocks can take what a tensor has freed
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10**7)  # 40 MB, freed at once; glibc itself keeps blocks up to 32 MiB
print("faults:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_kept_for_the_next_tensors():
    def page_faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PAGE_FAULTS, how], cwd=ROOT, timeout=200,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split("faults: ")[1])

    assert 10 * page_faults("kept") < page_faults("as glibc does")


# --------------------------------------------------------------------------- values that no machine can serve

@pytest.mark.parametrize("module, flags", [
    (train_hrm, ("--h-cycles", "100000000")), (train_hrm, ("--h-cycles", "4:100000000")),
    (train_hrm, ("--l-cycles", "100000000")), (train_hrm, ("--eval-cycles", "100000000")),
    (train_hrm, ("--n-layer", "100000000")), (train_gpt2, ("--n-layer", "100000000")),
    (train_mlm, ("--n-layer", "100000000"))])
def test_a_depth_that_takes_hours_is_refused_at_once(module, flags, shards, tmp_path):
    with pytest.raises(ConfigError, match="[0-9,]+ blocks.*--n-layer.*100,000"):
        module.main([*flags, "--data", str(shards), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


ODD = """class GPT2(GPT2):
    def __init__(self, config):
        raise ValueError("an odd number")

"""


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_config_that_cannot_work_is_one_sentence_and_another_value_error_is_not(ranks, shards, tmp_path):
    done = GPT2.fork(ranks, shards, tmp_path / "run", d_model=33)
    lines = {*done.out.splitlines()}  # each process may say it
    assert done.code == 2 and len(lines) == 1 and lines.pop().startswith("error: --d-model 33 "), done.out
    odd = changed(tmp_path / "train_odd.py", (ODD, "BETAS = "))
    done = odd.fork(ranks, shards, tmp_path / "run")
    assert done.code == 1 and "Traceback" in done.out and "ValueError: an odd number" in done.out, done.out
    assert "error: an odd number" not in done.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [
    {"global_batch": 10**8}, {"global_batch": None, "batch": 4, "grad_accum": 10**8},
    {"global_batch": 10**12, "batch": 10**12}])
def test_a_step_that_takes_hours_is_refused_at_once(changes, shards, tmp_path):
    done = GPT2.train(0, shards, tmp_path / "run", **changes)
    assert done.code == 2 and "sequences of 32 tokens takes hours: lower" in done.out, done.out
