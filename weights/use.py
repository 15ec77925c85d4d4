"""Uses a run: --prompt, --chat, --fill, --export and --eval-only, and load_run for a script of
one's own.
"""

import functools
import json
import os
import random
import select
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
from cli.errors import FAULTS, RetryableError, RunError, UserError, first_line, say
from ddp_utils import (
    Run,
    StopVote,
    World,
    apply_modes,
    assert_same_parameters,
    build_model,
    config_of,
    copy_weights,
    evaluate,
    list_checkpoints,
    read_checkpoint,
    run_and_wait,
)
from loggers.start import too_short
from model import GPT2, MLM, compute_dtype, num_params, use_device
from prepare.packages import needed
from prepare.pipeline import LARGER_SPLIT
from prepare.tokenizer import TIKTOKEN_IDS, load_tokenizer, with_markers
from weights.card import write_card
from weights.huggingface import logits_of_hf, to_hf
from weights.init_from import assert_tokenizer
from weights.llama_cpp import logits_of_gguf, to_gguf
from weights.sampling import contradiction, fill_masks, samples_of

MODES = ("--eval-only", "--export", "--prompt", "--chat", "--fill")
ROW = 1024  # tokens of an export that are compared at most
# of the largest logit. Right exports differed by 4e-6 of it at most (an untrained HRM of 32 cycles by 9e-4),
# in llama.cpp, whose GELU is a table in half precision, by 3e-3; most wrong ones by 3e-3, there by 1e-2.
BOUNDS = {"": 1e-3, ".gguf": 5e-3}
# On average in half precision, where other programs round otherwise. Right exports of trained models differed
# by 3e-3 at most (untrained HRMs of 16 cycles by 0.017), with exchanged heads in bfloat16 by 0.04 to 0.6.
ROUNDED = 0.02
EDITED = ("other programs do not compute what model.py does, so nothing is exported, and an earlier export "
          "is as it was: undo that change and train again, or use this model with --prompt or load_run.")


def load_model(model_class: type, saved: dict, world: World, strategy: str = "ddp", **changes) -> nn.Module:
    """The model of a checkpoint, with averaged weights if there are any. `changes` replaces fields of the
    configuration that do not affect the parameters.
    """
    config = config_of(model_class.Config, saved["model_config"] | changes, saved["path"])
    model = build_model(model_class, config, world, strategy)
    assert_same_parameters(model, saved)
    copy_weights(model, saved["tensors"]["model"] | saved["tensors"]["ema"], world)
    return model


def load_run(model_class: type, run: str | Path, device: str = "cpu", precision: str | None = None) -> tuple:
    """The model of a run directory (its newest checkpoint) or of a checkpoint file, and its tokenizer, for
    use in a script of one's own: with averaged weights if there are any, on a device, in a --precision
    (default: that of the run), without a World. Raises RunError, or UserError for a checkpoint of another
    format.
    """
    path = next(iter(list_checkpoints(run)), Path(run))
    if path.is_dir():
        raise RunError(f"{run} holds no checkpoint: name another run directory, or train first.")
    saved = read_checkpoint(path)
    model = model_class(config_of(model_class.Config, saved["model_config"], path))
    assert_same_parameters(model, saved | {"path": path})
    model.load_state_dict(saved["tensors"]["model"] | saved["tensors"]["ema"])
    where = torch.device(device)
    use_device(model.to(where), where, compute_dtype(precision or saved["settings"]["precision"], where))
    return model.eval(), tokenizer_of(saved, path.parent.parent)


def tokenizer_of(saved: dict, directory: Path):
    """The tokenizer of a checkpoint, with the end of text that its model was trained with: the one in the
    directory of its run or, if there is none, one that its name alone gives. Raises UserError.
    """
    name, config = saved["tokenizer"].split()[0], saved["model_config"]
    if (directory / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(directory))
    elif name in ("bytes", *TIKTOKEN_IDS):
        tokenizer = load_tokenizer(name)
        if config.get("response", -1) >= 0:
            tokenizer = with_markers(tokenizer)
    else:
        raise UserError(f"{directory} holds no tokenizer.json: copy it there from that run, or name the "
                        "directory of the run with --out.")
    eot = config.get("eot", config.get("start"))
    if eot in tokenizer.specials.values():
        tokenizer.eot = eot
    return tokenizer


def use_model(run: Run):
    """--eval-only, --export, --prompt, --chat and --fill: uses the newest checkpoint of a run, or that of
    --resume.
    """
    model_class, args, world, saved = run.model_class, run.args, run.world, run.saved
    modes = [word.partition("=")[0] for word in shlex.split(run.command) if word.startswith(MODES)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} do not go together: give one of them.")
    if args.export == "gguf":
        with needed("gguf", "--export gguf"):
            import gguf  # noqa: F401
    changes = {"eval_cycles": args.eval_cycles} if vars(args).get("eval_cycles") else {}
    model = load_model(model_class, saved, world, args.strategy if args.eval_only else "ddp", **changes)
    args.compile = False  # which takes longer than an answer
    apply_modes(model, args, world)
    model.eval()
    if world.is_rank0:
        monitor.say_changes(run, functools.partial(print, file=sys.stderr, flush=True))
    with suppress(BrokenPipeError):  # nobody reads on, as after `--prompt … | head`
        if args.eval_only:
            return evaluate_only(model, run)
        if args.export:  # where it is refused, all processes end alike
            return run_and_wait(use_on_rank0, model, run)
        use_on_rank0(model, run)


def use_on_rank0(model: nn.Module, run: Run):
    """All that use_model does, but for --eval-only."""
    args, world, saved = run.args, run.world, run.saved
    if not world.is_rank0:
        return
    out = args.out or Path(saved["path"]).parent.parent
    tokenizer = tokenizer_of(saved, out)
    assert_tokenizer(saved, tokenizer, "name the directory of that run with --out")
    print(f"step {saved['step']} from {saved['path']}", file=sys.stderr)
    if args.export == "gguf":
        path, modern = out / "model.gguf", vars(model.config).get("modern")
        export(model, path, tokenizer, to_gguf, logits_of_gguf)
        say(f"{path} is ready for llama-cli -m, {'' if modern else 'Ollama '}and LM Studio")
    if args.export == "hf":
        export(model, out / "hf", tokenizer, to_hf, logits_of_hf)
        say(f"{out / 'hf'} is ready for from_pretrained of transformers")
        try:
            write_card(out / "hf" / "README.md", saved)
        except FAULTS as error:  # as of a config.json that was edited
            say(f"WARNING: the model card README.md was not written ({first_line(error)})")
        prefix = vars(model.config).get("attention") == "prefix"
        if prefix and run.model_class is GPT2:
            print("but transformers has no prefix mask for GPT-2: there a prompt sees only what comes before")
        elif prefix:
            print("its tokenizer takes one text for a question: to train on answers there, give each as the "
                  "second, tokenizer(question, answer), or it would see itself")
    if vars(args).get("fill") is not None:
        print(*fill_masks(model, tokenizer, args.fill), sep="\n")

    def answer(prompt: str, echo: bool = False):
        if saved["settings"]["data"] == "task:addition" and len(prompt) != 25:
            print("note: the model was trained on sums of two numbers of twelve digits alone, such as "
                  "400123456789+400876543211", file=sys.stderr)
        texts = samples_of(model, tokenizer, world.device, prompt, args, True, args.num_samples)
        if echo:
            print(prompt, end="\n" * (model.config.response >= 0))
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
        print("note: each line is asked alone, without what was said before: to go on with a conversation, "
              "paste that as lines before the next question", file=sys.stderr)
    with suppress(EOFError, KeyboardInterrupt):
        while chat:
            text = typed()
            try:
                answer(text)
            except UserError as error:  # the prompt is too long
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # ends the answer, the next one at the prompt the chat
                print()
            args.seed += 1  # or like prompts would get the same text


def typed() -> str:
    """What is typed in at a prompt; of a terminal all lines that are there, as of a text that is pasted."""
    with suppress(*FAULTS):  # not every Python has it
        import readline  # with which `input` edits lines, and long ones are whole
        readline.parse_and_bind("set enable-bracketed-paste on")
    text = input("> " * sys.stdin.isatty())
    while sys.stdin.isatty() and select.select([sys.stdin], [], [], 0.05)[0]:
        text += f"\n{input()}"
    return text


def export(model: nn.Module, path: Path, tokenizer, write: Callable, load: Callable):
    """Writes an export beside `path`, where it is compared with the model before it takes its place. If
    something is wrong, an earlier one stays.
    """
    beside = path.with_name(f".tmp-{path.stem}")
    new = beside / path.name
    shutil.rmtree(beside, ignore_errors=True)  # of an export that was killed
    try:
        beside.mkdir()
        write(model, new, tokenizer)
        compare(model, new, tokenizer, load)
        if new.is_dir():  # file by file, so there is one at each moment
            path.mkdir(exist_ok=True)
            for file in new.iterdir():
                file.replace(path / file.name)
        else:
            os.replace(new, path)
    except OSError as error:
        raise RetryableError(f"{path} cannot be written ({error.strerror or error}): free some space, or "
                             "move away what is there.")
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@torch.no_grad()
def compare(model: nn.Module, new: Path, tokenizer, load: Callable):
    """Raises UserError if another program has other logits for a row, or cannot load the new export. Says so
    if it cannot be asked. load(new, row) are its logits or log-probabilities for the last ids of the row.
    """
    c = model.config
    ordinary = sorted({*range(c.vocab_size)} - {*tokenizer.specials.values()})
    # llama.cpp wants room for one more; ids that were rare in training tell models apart best
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
        # the package, the memory, or a file system that can map files is missing; or it wants another model
        if isinstance(error, (ImportError, MemoryError, OSError)) or "mmap" in why:
            return say(f"WARNING: the export was not compared with the model ({why}): once that is there, "
                       "export it again")
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
        if not off <= bound * ours.abs().max():  # or it is no number
            raise UserError(f"the export has other logits than the model, by {off:.2g}: in {precision} "
                            f"{EDITED}")


def evaluate_only(model: nn.Module, run: Run):
    """Evaluates the model of a checkpoint on the validation sets of `run.dataset`. Takes no lock and writes
    nothing into the run, so it can be called beside a training. Prints the results as a line, and as JSON for
    a script. Every rank calls this. With the run's number of processes the losses are those of its log, up to
    rounding if blocks were compiled or attention was FlashAttention 4.
    """
    args, world, saved, dataset = run.args, run.world, run.saved, run.dataset
    assert_tokenizer(saved, dataset.tokenizer, f"prepare the data with --tokenizer {saved['tokenizer_file']}")
    if not dataset.val:
        raise UserError(f"{too_short(dataset)}." if dataset.short else
                        f"{dataset.name} has no validation set: prepare it again {LARGER_SPLIT}.")
    masker = None
    if isinstance(model, MLM):
        rate = saved["settings"].get("EVAL_RATE", 0.15)
        masker = dataset.masker_class(dataset.tokenizer, args.seq_len, rate, 0)
    state = SimpleNamespace(model=model, world=world, averaged_weights=nullcontext)
    run.batch = args.batch or saved["settings"]["batch"]
    results = evaluate(state, run, StopVote(world), masker)
    if results is None:  # a signal has cut it short
        raise KeyboardInterrupt
    if world.is_rank0:
        if not {"val_exact", "val_bits_per_byte"} & results.keys():
            print(monitor.NO_BYTES)
        where = f"step {saved['step']} from {saved['path']} on {dataset.name}"
        print(" | ".join([where, *monitor.results(results)]))
        record = {"step": saved["step"], "data": dataset.name} | results
        print(json.dumps(monitor.without_nan(record)), flush=True)
