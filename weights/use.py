"""Uses a trained run: --prompt, --chat, --fill, --export, --eval-only, and load_run for your own scripts."""

import json
import os
import random
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import monitor
from cli.errors import PACKAGE_ERRORS, RetryableError, UserError, first_line, needed, say
from ddp_utils import (
    Run,
    StopVote,
    World,
    assert_same_parameters,
    config_of,
    load_checkpoint,
    run_and_wait,
)
from model import GPT2, MLM, num_params, use_device
from ops.device import compute_dtype
from prepare.pipeline import HOLD_OUT_MORE
from training.evaluation import evaluate
from training.strategies import build_model, copy_weights, set_modes
from vocab.tokenizer import load_tokenizer
from weights.card import write_card
from weights.huggingface import logits_of_hf, to_hf
from weights.init_from import assert_tokenizer
from weights.llama_cpp import logits_of_gguf, to_gguf
from weights.sampling import contradiction, fill_masks, samples_of

MODES = ("--eval-only", "--export", "--prompt", "--chat", "--fill")
ROW = 1024  # an export is compared on at most this many tokens
# How much an export may differ from the model, relative to the largest logit. Correct exports differed by at
# most 4e-6 (an untrained HRM with 32 cycles by 9e-4), and in llama.cpp, which takes GELU from a table in half
# precision, by 3e-3. Most wrong exports differed by at least 3e-3, in llama.cpp by 1e-2.
BOUNDS = {"": 1e-3, ".gguf": 5e-3}
# The same for the mean difference in half precision, where other programs round differently. Correct exports
# of trained models differed by at most 3e-3 (untrained HRMs with 16 cycles by 0.017). With exchanged heads,
# they differed by 0.04 to 0.6 in bfloat16.
ROUNDED = 0.02
EDITED = ("other programs do not compute what model.py does, so nothing is exported, and an earlier export "
          "is kept: undo that change and train again, or use this model with --prompt or load_run.")


def load_model(model_class: type, saved: dict, world: World, strategy: str = "ddp", **changes) -> nn.Module:
    """Loads the model of a checkpoint, with averaged weights if there are any. `changes` replaces fields of
    its configuration, which must not affect the parameters. Raises UserError if the model class is another.
    """
    config = config_of(model_class.Config, saved["model_config"] | changes, saved["path"])
    model = build_model(model_class, config, world, strategy)
    assert_same_parameters(model, saved)
    copy_weights(model, saved["tensors"]["model"] | saved["tensors"]["ema"], world)
    return model


def load_run(model_class: type, run: str | Path, device: str = "cpu", precision: str | None = None) -> tuple:
    """Loads a trained model for your own script. Returns (model, tokenizer).

    `run` is a run directory, which gives its newest intact checkpoint, or a checkpoint file. Averaged weights
    are used if there are any. `precision` is a --precision (default: the run's). No process group is needed.
    Raises UserError if there is no checkpoint that can be read.
    """
    saved = load_checkpoint(run, say, or_best=True, share=lambda read: read())  # each process for itself
    model = model_class(config_of(model_class.Config, saved["model_config"], saved["path"]))
    assert_same_parameters(model, saved)
    model.load_state_dict(saved["tensors"]["model"] | saved["tensors"]["ema"])
    where = torch.device(device)
    use_device(model.to(where), where, compute_dtype(precision or saved["settings"]["precision"], where))
    return model.eval(), tokenizer_of(saved, Path(saved["path"]).parent.parent)


def tokenizer_of(saved: dict, directory: Path):
    """The tokenizer of a checkpoint: the one in `directory`, the run's. Its end of text is the id that the
    model was trained with. Raises UserError if there is none.
    """
    if not (directory / "tokenizer.json").exists():
        raise UserError(f"{directory} holds no tokenizer.json: copy it there from the run's directory, or "
                        "give that directory as --out.")
    tokenizer, config = load_tokenizer(str(directory)), saved["model_config"]
    eot = config.get("eot", config.get("start"))
    if eot in tokenizer.specials.values():
        tokenizer.eot = eot
    return tokenizer


def use_model(run: Run):
    """Does what --eval-only, --export, --prompt, --chat or --fill asks for, with the checkpoint of --resume
    (default: the run's newest). Every rank calls this.
    """
    model_class, args, world, saved = run.model_class, run.args, run.world, run.saved
    modes = [word.partition("=")[0] for word in shlex.split(run.command) if word.startswith(MODES)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} cannot be used together: give one of them.")
    if args.export == "gguf":
        with needed("gguf", "--export gguf"):
            import gguf  # noqa: F401
    changes = {"eval_cycles": args.eval_cycles} if vars(args).get("eval_cycles") else {}
    model = load_model(model_class, saved, world, args.strategy if args.eval_only else "ddp", **changes)
    args.compile = False  # compiling takes longer than an answer
    set_modes(model, args, world)
    model.eval()
    with suppress(BrokenPipeError):  # from `--prompt … | head`
        if args.eval_only:
            return evaluate_only(model, run)
        if args.export:  # run_and_wait, so that all processes end with the same error
            return run_and_wait(use_on_rank0, model, run)
        use_on_rank0(model, run)


def use_on_rank0(model: nn.Module, run: Run):
    """Does all of use_model except --eval-only."""
    args, world, saved = run.args, run.world, run.saved
    if not world.is_rank0:
        return
    out = args.out or Path(saved["path"]).parent.parent
    tokenizer = tokenizer_of(saved, out)
    assert_tokenizer(saved, tokenizer, "give the directory of that run as --out")
    print(f"step {saved['step']} from {saved['path']}", file=sys.stderr)
    # the ids aren't text, or a model from elsewhere has spare ones
    note = (f", but its tokenizer knows only {tokenizer.num_ids} of the {model.config.vocab_size} ids"
            if tokenizer.num_ids < model.config.vocab_size else "")
    if args.export == "gguf":
        path = out / "model.gguf"
        export(model, path, tokenizer, to_gguf, logits_of_gguf)
        say(f"{path} is ready for llama-cli -m{note}")
    if args.export == "hf":
        export(model, out / "hf", tokenizer, to_hf, logits_of_hf)
        say(f"{out / 'hf'} is ready for from_pretrained of transformers{note}")
        try:
            write_card(out / "hf" / "README.md", saved)
        except PACKAGE_ERRORS as error:  # such as an edited config.json
            say(f"WARNING: the model card README.md was not written ({first_line(error)})")
        prefix = vars(model.config).get("attention") == "prefix"
        if prefix and run.model_class is GPT2:
            print("note: transformers has no prefix mask for GPT-2: there, a token sees only those before it")
        elif prefix:
            print("note: the exported tokenizer takes one text for a question: to train on answers, pass "
                  "two texts, tokenizer(question, answer), or the answers see themselves")
    if vars(args).get("fill") is not None:
        print(*fill_masks(model, tokenizer, args.fill), sep="\n")

    def answer(prompt: str, echo: bool = False):
        texts = samples_of(model, tokenizer, world.device, prompt, args, True, args.num_samples)
        if echo:
            print(prompt, end="\n" if model.config.response >= 0 else "")
        for text in texts:
            for piece in text:
                print(piece, end="", flush=True)
            print()

    chat, prompt = (vars(args).get(name) for name in ("chat", "prompt"))
    if (chat or prompt is not None) and (why_not := contradiction(model, world.device)):
        raise UserError(why_not)
    if prompt is not None:
        answer(prompt, echo=args.num_samples == 1)
    if chat:
        print("note: the model sees only the line that you type, not what was said before: to continue a "
              "conversation, give its messages as the lines of one --prompt", file=sys.stderr)
        with suppress(*PACKAGE_ERRORS):  # not every Python has readline
            import readline  # noqa: F401, lets `input` edit lines, and take very long ones
    with suppress(EOFError, KeyboardInterrupt):
        while chat:
            text = input("> " if sys.stdin.isatty() else "")
            try:
                answer(text)
            except UserError as error:  # the prompt is too long
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # ends the answer; Ctrl-C at the prompt ends the chat
                print()
            args.seed += 1  # so that asking again gives another text


def export(model: nn.Module, path: Path, tokenizer, write: Callable, load: Callable):
    """Writes an export next to `path`, compares it with the model, and only then moves it to `path`. If
    something is wrong, an earlier export stays. Raises UserError.
    """
    say(f"writing {path}, then comparing it with the model", file=sys.stderr)
    temporary = path.with_name(f".tmp-{path.stem}")
    new = temporary / path.name
    shutil.rmtree(temporary, ignore_errors=True)  # left over from an export that was killed
    try:
        temporary.mkdir()
        write(model, new, tokenizer)
        compare(model, new, tokenizer, load)
        if new.is_dir():  # file by file, so that each file exists at every moment
            path.mkdir(exist_ok=True)
            for file in new.iterdir():
                file.replace(path / file.name)
        else:
            os.replace(new, path)
    except OSError as error:
        raise RetryableError(f"{path} cannot be written ({error.strerror or error}): free some space, or "
                             "move away what is in its place.")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@torch.no_grad()
def compare(model: nn.Module, new: Path, tokenizer, load: Callable):
    """Compares a new export in its own program with the model, on a row of random ids. load(new, row) returns
    that program's logits or log-probabilities for the last ids of the row. Raises UserError if they differ,
    or if the export cannot be loaded. Prints a warning if the program is missing or memory is short.
    """
    c = model.config
    ordinary = sorted({*range(c.vocab_size)} - {*tokenizer.specials.values()})
    # seq_len - 1, because llama.cpp needs room for one more; random, because rare ids show errors best
    ids = random.Random(0).choices(ordinary, k=max(1, min(c.seq_len - 1, ROW)))
    ids[:1] = tokenizer.encode("a")[:1].tolist() or ids[:1]
    row = torch.tensor([ids])
    try:
        import psutil
        numbers = num_params(model) + row.numel() * c.vocab_size
        if psutil.virtual_memory().available < 12 * numbers:
            raise MemoryError(f"{12e-9 * numbers:.1f} GB of memory are not free")
        theirs = load(new, row).log_softmax(-1)
    except Exception as error:
        why = first_line(error)
        # no package, not enough memory, a file system that cannot map files, or a package without this model
        if isinstance(error, (ImportError, MemoryError, OSError)) or "mmap" in why:
            return say(f"WARNING: the export was not compared with the model ({why}): fix that and export "
                       "again")
        raise UserError(f"the export cannot be loaded ({why}): {EDITED}")
    dtype = model.compute_dtype
    for precision in dict.fromkeys((torch.float32, dtype)):  # ops/attention.py is for bfloat16 only
        model.compute_dtype = precision
        try:
            ours = model(row.to(model.embed.weight.device))[0].float().cpu()
        finally:
            model.compute_dtype = dtype
        differences = (ours.log_softmax(-1)[-len(theirs):] - theirs).abs()
        off, bound = differences.max(), BOUNDS[new.suffix]
        if precision != torch.float32:
            off, bound = differences.mean(), ROUNDED
        if not off <= bound * ours.abs().max():  # also if it is NaN
            raise UserError(f"the export has other logits than the model, by {off:.2g}: in {precision} "
                            f"{EDITED}")


def evaluate_only(model: nn.Module, run: Run):
    """Evaluates the model of a checkpoint on the validation sets of `run.dataset`. Prints the results as a
    line for people and as JSON for scripts. Takes no lock and writes nothing into the run, so it can run
    while the run is training. Every rank calls this. With the run's number of processes, the losses are those
    of its log, up to rounding if blocks were compiled.
    """
    args, world, saved, dataset = run.args, run.world, run.saved, run.dataset
    assert_tokenizer(saved, dataset.tokenizer, f"prepare the data with --tokenizer {saved['tokenizer_file']}")
    if not dataset.val:
        raise UserError(f"{dataset.too_short()}." if dataset.short else
                        f"{dataset.name} has no validation set: prepare it again {HOLD_OUT_MORE}.")
    masker = None
    if isinstance(model, MLM):
        rate = saved["settings"].get("EVAL_RATE", 0.15)
        masker = dataset.masker_class(dataset.tokenizer, args.seq_len, rate, 0)
    state = SimpleNamespace(model=model, world=world, averaged_weights=nullcontext)
    run.batch = args.batch or saved["settings"]["batch"]
    results = evaluate(state, run, StopVote(world), masker)
    if results is None:  # stopped by a signal
        raise KeyboardInterrupt
    if world.is_rank0:
        where = f"step {saved['step']} from {saved['path']} on {dataset.name}"
        print(" | ".join([where, *monitor.format_results(results)]))
        record = {"step": saved["step"], "data": dataset.name} | results
        print(json.dumps(monitor.without_nan(record)), flush=True)
