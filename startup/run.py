"""Which run a command means: its flags, directory, checkpoint, data, batches and model.

A resumed run stays what it was. The value of a flag comes from the last of these that sets it: the parser's
default, the row of the size, the weights of --init-from, the saved run, this command. resume.py says which
flags may change.

- A run that was killed before its first checkpoint starts over with the same command, and refuses another.
- A run that resumes doesn't read the weights of --init-from again.
- New --data drops the limits and the tokenizer of the old data.
- --resume FILE with --prompt, --export or --eval-only uses that file.
- In training, --resume X continues from a later checkpoint of the same branch, if --out has one.

How a run saves and stops (Ctrl-C) is in ddp_utils.py, how it trains in the trainer and training/.
"""

import functools
import json
import math
import os
import shlex
import signal
import sys
import time
import zlib
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import monitor
from cli.errors import HOST, PACKAGE_ERRORS, RunError, UserError, say, set_handler
from cli.files import to_json
from cli.flags import SHARDED, Command, flags_of_model, uses_model
from cluster.diagnosis import refuse_lone_tasks
from data import Dataset, packed_row_length, sources_of, unigram_entropy
from ddp_utils import (
    Checkpoints,
    Run,
    StopVote,
    World,
    all_gather,
    assert_family,
    assert_in_sync,
    assert_same,
    config_of,
    connect,
    find_mismatch,
    init,
    is_in,
    leave_at_once,
    list_checkpoints,
    load_checkpoint,
    on_rank0,
    process,
    run_and_wait,
    say_elsewhere,
    step_of,
    sync_of,
)
from loggers.machine import hardware, memory_gb
from loggers.mfu import MFU
from loggers.wandb import require_wandb
from model import ConfigError, num_params, pad_vocab
from ops.device import compiles, compute_dtype
from prepare.pipeline import LIMITS, directory_of, locate
from startup.directory import RunLock, project_files, run_directory, run_files, say_changes
from startup.dry_run import before_data, uses_gpus
from startup.plan import loggers_of, plan_batch, say_plan, what_next
from startup.resume import FREE_FIELDS, NEW, PLANNED, RECORDED, compare_with_saved, shape_from_record
from training.step import TrainState
from training.strategies import build_model, copy_weights, refuse_together
from vocab.vocabulary import tokenizer_id
from weights.init_from import (
    assert_context,
    attention_fields,
    finetuning_defaults,
    nearest_size,
    trained_model,
    weights_of,
)
from weights.sampling import contradiction, sample_prompt, samples_of
from weights.use import use_model


def start(args: Namespace) -> World:
    """Joins the process group of a trainer. Raises UserError on all ranks if their flags differ."""
    world = init(args.backend, args.device, args.timeout, fast=args.fast)
    # GPUs call collectives that CPUs don't: sync_of, for example
    flags = [("device", world.device.type), *vars(args).items()]

    def compare():
        if odd := find_mismatch([*map(str, flags)]):
            name = flags[odd[0]][0].replace("_", "-")
            raise UserError(f"--{name} on rank {odd[1]} differs from the other ranks: name the same one on "
                            "every node, with the same prepared data.")

    connect(world.backend, compare)
    return world


def resolve_flags(command: Command, saved: dict | None = None, weights: dict | None = None) -> Namespace:
    """The flags of a run: a new one, or the one that resumes from the checkpoint `saved`. `weights` describes
    the weights of --init-from. Raises UserError for flags that contradict `saved` or `weights`.

    Adds the sequences per batch that the command may leave out: `wanted_batch` per step, `largest_batch` per
    micro-batch at most, `eval_batch` for --eval-batches.
    """
    given, sizes = command.given, command.sizes
    record = saved or weights or {}
    settings = saved["settings"] if saved else {}
    size = settings.get("size") or given.get("size") or record.get("size") or next(iter(sizes))
    row = sizes.get(size, {})  # a run resumes even if its size has been removed
    if saved:
        names = command.defaults.keys() - NEW | {"largest_batch", "eval_batch"}
        recipe = row | {name: value for name, value in settings.items() if name in names}
        if {"prompt", "chat", "fill"} & given.keys():
            recipe["precision"] = "auto"  # what is fast on this machine
    else:
        recipe = row | {"largest_batch": row["batch"], "eval_batch": row["global_batch"]}
        recipe |= finetuning_defaults(row) if "init_from" in given else {}
    if record:
        recipe |= shape_from_record(command, record, bool(saved))
    flags = command.defaults | {"size": size} | recipe | given
    own_data = saved and flags["data"] == settings["data"]  # the data that the run was trained on
    flags |= dict.fromkeys(PLANNED + LIMITS if saved and not own_data else PLANNED) | given
    flags["wanted_batch"] = recipe["global_batch"]
    sources = sources_of(flags["data"])
    length = None if own_data else packed_row_length(directory_of(sources[0], flags))
    flags["seq_len"] = given.get("seq_len") or length or record.get("seq_len") or flags["seq_len"]
    if own_data:
        flags["tokenizer"] = flags["tokenizer"] or saved["tokenizer_flag"]
    elif not any(Path(source).is_dir() for source in sources):  # then the weights know the ids
        flags["tokenizer"] = (flags["tokenizer"] or record.get("tokenizer_flag")
                              or record.get("tokenizer_file"))
    args = Namespace(**flags)
    if given.get("checkpoint_activations", "auto") == "auto":  # before_data chooses on GPUs
        of_size = "auto" if uses_gpus(args) else row.get("checkpoint_activations", "none")
        args.checkpoint_activations = settings.get("checkpoint_activations", of_size)
    return args


def find_checkpoint(out: Path, args: Namespace, world: World) -> dict | None:
    """The checkpoint that --resume names, or with `auto` the newest of a run directory; None if a run begins.
    Raises UserError on all ranks if another node has a later one than rank 0, because the nodes were numbered
    differently.
    """
    reads = uses_model(args)
    tell = functools.partial(say, file=sys.stderr if reads else None)  # stdout is for the model's text
    load = functools.partial(load_checkpoint, say=tell, or_best=reads)
    if args.resume not in ("auto", "none"):
        return load(args.resume)
    # a run that went back may leave a later best.pt: that alone doesn't count
    newest = run_and_wait(lambda: max(
        ((path.name != "best.pt", step_of(path)) for path in list_checkpoints(out)), default=(False, 0)))
    by_rank = all_gather((newest, f"{world.node} ({HOST})"))
    ours, _ = by_rank[0]
    theirs, where = max(by_rank)
    if theirs > ours:
        raise UserError(f"{where} holds step {theirs[1]} of {out}, but node0 only step {ours[1]}: start that "
                        f"machine as node 0, or copy its {out} to node 0. To go back, delete its later "
                        "checkpoints.")
    if not reads and (args.resume == "none" or not ours[1]):
        return None
    if world.is_rank0 and ours[1]:
        tell(f"reading the checkpoint of step {ours[1]} in {out}")  # which can take a while
    return load(out)


def command_line(trainer: Path, world: World, argv: list[str] | None) -> str:
    """The command of this start, to paste into a shell in the same directory. On several nodes: node 0's."""
    env = os.environ
    words = sys.argv if argv is None else [trainer, *argv]
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = f"torchrun --nproc_per_node={env['LOCAL_WORLD_SIZE']}"
        if world.nodes > 1:
            launcher += (f" --nnodes={world.nodes} --node_rank={env['GROUP_RANK']} "
                         f"--master_addr={env['MASTER_ADDR']} --master_port={env['MASTER_PORT']}")
    return f"{launcher} {shlex.join(map(str, words))}"


def find_run(model_class: type, command: Command, constants: dict) -> Run:
    """Joins the process group. Finds the run directory and the checkpoint to resume from or to use. All ranks
    call this.

    `constants` is the trainer's globals(). Names in capitals are recorded if they are numbers, texts or
    tuples. Nothing is written or locked. Raises UserError on all ranks.
    """
    resolve = functools.partial(resolve_flags, command)
    args = resolve()
    world = start(args)
    trainer = Path(constants.get("__file__", "notebook"))
    code = [zlib.crc32(path.read_bytes()) for path in project_files(trainer).values()]
    assert_same("torch or the code", f"{torch.__version__} {code}",
                "install the same torch and copy the same files to every node")
    weights = missing = None
    try:
        if args.init_from:
            weights = weights_of(model_class, args.init_from, complete=False)
            weights["size"] = nearest_size(command.sizes, weights)
    except (UserError, ConfigError) as error:  # doesn't matter to a run that resumes
        missing = error
    if weights:
        args = resolve(weights=weights)
    out = run_directory(args, trainer.stem)
    saved = find_checkpoint(out, args, world)
    if saved:
        assert_family(saved, model_class)
        args = resolve(saved)
    elif missing:
        raise missing
    else:
        on_rank0(refuse_unlike_begun_run, out, args, trainer.name, command.given)
    if args.resume != "auto":  # the directory depends on the flags in the checkpoint
        out = run_directory(args, trainer.stem)
        if saved and not uses_model(args) and not on_rank0(is_in, saved, out):  # a branch
            if on_rank0(list_checkpoints, out):
                saved = newest_of_branch(out, saved, args)
                args = resolve(saved)
            else:
                on_rank0(refuse_unlike_begun_run, out, args, trainer.name, command.given)
    assert_same("the precision", str(compute_dtype(args.precision, world.device)),
                "give --precision fp32 or bf16, because auto depends on the processor")
    refuse_together(args, world)
    if args.wandb and not uses_model(args):  # before data is prepared and the directory is claimed
        on_rank0(require_wandb)
    if weights and not saved:
        assert_context(model_class, weights, args.seq_len)
    constants = {name: value for name, value in constants.items()
                 if name.isupper() and isinstance(value, int | float | str | tuple)}
    began = saved["settings"]["began"] if saved else f"{time.strftime('%F %T')} {os.urandom(4).hex()}"
    given = {name: value for name, value in command.given.items()
             if name not in NEW or name in RECORDED}
    return Run(model_class, world, trainer, command_line(trainer, world, command.argv), constants, args,
               command.sizes.get(args.size, {}), given, out, saved, began,
               monitor.TrainLog(world.prefix, world.is_rank0))


def refuse_unlike_begun_run(out: Path, args: Namespace, trainer: str, given: dict):
    """Raises UserError if a new run would overwrite something of an earlier one, or if a run or a branch
    without a checkpoint was begun there with other flags than `given`. Batches and the kind NEW don't count.
    """
    if any(out.glob("checkpoints/step_*.pt")):  # with --resume none; Checkpoints.load refuses that
        return
    for name in ("checkpoints/best.pt", "hf", "model.gguf"):
        if (out / name).exists():
            way = f", --resume {out / name} to go on from it" if name.endswith(".pt") else ""
            raise UserError(f"{out} has no checkpoint to resume from, but holds {name}, which a new run "
                            f"would overwrite: give another --out{way}, or move {name} away.")
    if args.resume == "none":
        return
    config = monitor.read_config(out)
    with suppress(TypeError, LookupError, AttributeError):  # config.json is missing or damaged
        earlier, now = (
            {name: value for name, value in flags.items()
             if name not in NEW + PLANNED or name in RECORDED and value not in ("auto", "none")}
            for flags in (config["given"], json.loads(to_json(given))))
        if earlier != now or config["settings"]["trainer"] != trainer:
            command = config["commands"] or ["see config.json"]  # none in a notebook
            raise UserError(f"{out} was begun by another command and has no checkpoint yet: give another "
                            f"--out{', --resume none to start over' if args.resume == 'auto' else ''}, "
                            f"or that command again: {command[-1]}")
        say(f"{out} has no checkpoint yet: starting over")


def newest_of_branch(out: Path, saved: dict, args: Namespace) -> dict:
    """The checkpoint to resume from if --resume branches off from `saved`: a later one of this branch if the
    directory has one, else `saved`. Raises UserError if it has those of another run.
    """
    newest = load_checkpoint(out, print)
    settings = newest["settings"]
    if settings["began"] != saved["settings"]["began"]:
        raise UserError(f"{out} holds a different run than {args.resume}: give another --out, or leave out "
                        f"--resume to go on with the run in {out}.")
    return newest if settings["resume"] == args.resume and newest["step"] > saved["step"] else saved


def load_data(run: Run, **more) -> Dataset:
    """The data set of --data, prepared first if necessary, with 20 tokens per parameter or --max-tokens from
    the hub. A trainer's own function `run.change_data` may then replace its `train`, `val` and
    `masker_class`, for training and for --eval-only. `more` is passed to the model's `dummy_inputs`.
    """
    args = run.args
    refuse_lone_tasks()
    device = run.world.device
    free = min(all_gather(torch.cuda.mem_get_info(device)[0])) / 1e9 if device.type == "cuda" else 0
    useful, args.checkpoint_activations, run.needs = on_rank0(before_data, run, more, free)

    def read():
        handler = signal.getsignal(signal.SIGINT)
        set_handler(signal.SIGINT, leave_at_once)  # see `stop` in prepare/command.py
        limits = {name: getattr(args, name) for name in LIMITS}
        watch = process.heartbeat.raise_if_lost if process.heartbeat else lambda: None
        directories = [locate(source, args.tokenizer, useful, run.world.local_rank, watch, args.seq_len,
                              run.say, **limits) for source in sources_of(args.data)]
        set_handler(signal.SIGINT, handler)
        dataset = Dataset(directories, args.seq_len, args.tokenizer, vars(args).get("loss", "all"))
        if run.change_data:
            run.change_data(dataset)
            dataset.check_sets()
        return dataset

    run.dataset = dataset = run_and_wait(read)
    sizes = [shards.rows for shards in (dataset.train, *dataset.val.values())]  # change_data may change them
    assert_same("the data", f"{dataset.fingerprint} {sizes}",
                "copy the same files to every node, or prepare them there with the same command")
    return dataset


def open_run(run: Run):
    """Locks the run directory, opens its train.log and plans the steps and batches. Takes a newer checkpoint
    if one was written before the lock. Raises UserError on all ranks.
    """
    args, world, out = run.args, run.world, run.out
    lock = RunLock(out)
    on_rank0(lock.acquire)
    run.text.open(out / "train.log")
    run.checkpoints = Checkpoints(out, world, args.keep_last, run.say, lock.lost)
    run.saved = saved = run.checkpoints.load(args.resume, run.saved)
    wanted = args.wanted_batch
    run.global_batch, run.batch, run.grad_accum = plan_batch(
        world.world_size, args.global_batch, args.batch, args.grad_accum, wanted, args.largest_batch)
    if args.batch or args.grad_accum:
        args.largest_batch = run.batch  # also after a resume
    if run.global_batch * args.seq_len > 1e9:
        raise UserError(f"a step of {run.global_batch:,} sequences of {args.seq_len} tokens takes hours: "
                        "lower --global-batch, or --batch and --grad-accum.")
    if not (args.global_batch or args.batch and args.grad_accum) and run.global_batch != wanted:
        run.say(f"{wanted} sequences per step don't divide among {world.world_size} processes: taking "
                f"{run.global_batch}")
        if abs(run.global_batch / wanted - 1) > 0.05:
            run.say(f"WARNING: {run.global_batch} instead of {wanted} sequences per step may need another "
                    "--lr; --global-batch changes the number")
    run.steps = args.steps
    if args.epochs:  # a resumed run has already done some
        done, samples = (saved["step"], saved["samples"]) if saved else (0, 0)
        left = math.ceil(args.epochs * run.dataset.train.rows) - samples
        run.steps = done + max(0, math.ceil(left / run.global_batch))
    usual = run.size_defaults.get("steps") or 0
    if not saved and "warmup" not in run.given and run.steps < usual and args.warmup >= 1:
        of_size, args.warmup = args.warmup, round(args.warmup * run.steps / usual)
        run.say(f"warm-up takes {args.warmup} steps: this size's {of_size} are for {usual} steps, and this "
                f"run has {run.steps} (--warmup changes it)")


def new_model(run: Run, **config) -> nn.Module:
    """The model to train: random, from --init-from, or uninitialized if a checkpoint will be restored into
    it. `config` has the fields of the configuration that come from the data.
    """
    model_class, args, dataset, world = run.model_class, run.args, run.dataset, run.world
    saved = run.saved
    if dataset.vocab_size:
        config["vocab_size"] = dataset.vocab_size
    padded_vocab = args.vocab_size or pad_vocab(config["vocab_size"])
    config = model_class.Config(padded_vocab=padded_vocab, **flags_of_model(model_class.Config, args),
                                **config)
    if vars(config).get("attention") == "prefix" and dataset.loss == "all":
        raise UserError("--attention prefix needs pairs (--prompt-field and --response-field of data.py "
                        "prepare) and --loss response: give both, or --attention causal or isolated.")
    if vars(config).get("response", -1) >= 0:
        sample_prompt(args, dataset)  # raises UserError now instead of after hours
    # the checkpoint or the weights decide the rest of the configuration
    changes = {name: value for name, value in vars(config).items()
               if name in attention_fields(config) or name in FREE_FIELDS}
    if saved:
        config = config_of(model_class.Config, saved["model_config"] | changes, saved["path"])
    if args.init_from and not saved:
        model = trained_model(run, asdict(config), changes)
    else:
        model = build_model(model_class, config, world, args.strategy, args.comm)
    if not (args.init_from or saved):
        run.say(f"initializing {num_params(model):,} parameters")
        torch.manual_seed(args.seed)
        copy_weights(model, model_class(config).state_dict() if world.is_rank0 else {}, world)
    torch.manual_seed(args.seed)  # the same on all ranks, for what a trainer adds to the model or draws again
    return model


def metadata(model: nn.Module, run: Run, **settings) -> dict:
    """What a checkpoint and config.json say about a run: values that must not change on a resume, and the
    settings: flags, plan, the trainer's constants, and `settings`, such as the precision.
    """
    args, dataset = run.args, run.dataset
    plan = {"steps": run.steps, "epoch_tokens": dataset.train.rows * args.seq_len,
            "global_batch": run.global_batch, "batch": run.batch, "grad_accum": run.grad_accum,
            "world_size": run.world.world_size, "threads": torch.get_num_threads(),
            "trainer": run.trainer.name, "began": run.began}
    shape = flags_of_model(run.model_class.Config, model.config)
    settings = vars(args) | run.constants | shape | plan | settings
    now = {"family": run.model_class.__name__, "model_config": asdict(model.config), "seq_len": args.seq_len,
           "tokenizer": tokenizer_id(dataset.tokenizer), "data": dataset.fingerprint,
           "loss_on": dataset.loss, "seed": args.seed, "torch": str(torch.__version__),
           "settings": json.loads(to_json(settings))}
    if run.saved:
        compare_with_saved(run.saved, now, not on_rank0(is_in, run.saved, run.out), run.say, run.given)
    return now


def use_run(run: Run):
    """Uses a run instead of training it: --eval-only, --export, --prompt, --chat or --fill."""
    if run.world.is_rank0:
        say_changes(run, functools.partial(print, file=sys.stderr, flush=True))
    if run.args.eval_only:
        load_data(run)
    use_model(run)


def start_run(run: Run, state: TrainState, **settings) -> tuple[monitor.RunLog, dict, int, int]:
    """Restores the checkpoint, if there is one, opens the log, writes the files of the run directory and
    prints the plan. Returns the log, the metadata of checkpoints, which record `settings`, and the steps and
    samples that are done.
    """
    set_handler(signal.SIGINT, leave_at_once)  # until StopVote, see warm_up
    world, dataset, model = run.world, run.dataset, state.model
    meta = metadata(model, run, precision=str(model.compute_dtype).removeprefix("torch."), **settings)
    run.state, run.meta = state, meta
    step, samples = run.checkpoints.resume(run.saved, state)
    model.in_sync_at = step  # warm_up compares it
    settings = meta["settings"]
    dataset.check_sets(model.config.vocab_size)  # a trainer may have added some without change_data
    val = [*dataset.val.values()]
    records = run_and_wait(lambda: monitor.records_until(run.out, step, run.say) if world.is_rank0 else [])
    evaluated = on_rank0(lambda: [record for record in records if "val_loss" in record])
    # other ranks have no records, and need only the evaluations
    log = monitor.RunLog(
        run.out, run.text, settings, records or evaluated,
        val_tokens=sum(shards.num_tokens for shards in val), entropy=unigram_entropy(val or [dataset.train]),
        sync=lambda step: "shards" if settings["strategy"] in SHARDED else sync_of(model, step, world))
    # A lower loss without a checkpoint is not the best: its save failed, or somebody deleted the file.
    gone = on_rank0(lambda: log.evaluations.keys() - run.checkpoints.files.keys())
    log.evaluations |= dict.fromkeys(gone, math.inf)
    run.checkpoints.log = log

    def begin():
        if all_done(run, log, step):  # the files would name flags of no step
            return
        log.loggers += loggers_of(run, log)
        log.mfu = MFU(run, model, settings)
        say_changes(run, run.say)
        log.begin(step, run_files(run, model, meta))

    on_rank0(begin)
    machines = Counter(all_gather(hardware(world.device)))
    resuming = f", resuming after step {step} from {run.saved['path']}" if run.saved else ""
    say_plan(run, state, log, f"run directory {log.out}{resuming}", machines,
             compiles(settings["compile"], world.device))
    say_elsewhere(world, f"{HOST}, {hardware(world.device)}, {world.backend}, torch {torch.__version__}")
    return log, meta, step, samples


def all_done(run: Run, log: monitor.RunLog, step: int) -> bool:
    return step >= run.steps and (step in log.evaluations or not run.dataset.val)


def is_complete(run: Run, log: monitor.RunLog, step: int) -> bool:
    """Whether nothing is left to do after `step` steps. If so, prints how to go on."""
    if complete := all_done(run, log, step):
        log.say(f"this run is complete after {step} steps: give more to continue (--steps {2 * step} doubles "
                "them), give another --out to start from scratch, or use the run, such as with --eval-only")
    return complete


def sample(state: TrainState, run: Run, step: int, stop: StopVote | None = None):
    """Checks the model (see `contradiction`: three passes over a row) and logs a text that it writes, unless
    its ids aren't text. With `stop`, a signal cuts the text short. All ranks call this and generate the same,
    because parameters may be sharded, and a model may call collectives.
    """
    args, dataset, device = run.args, run.dataset, run.world.device
    if dataset.vocab_size:
        return
    prompt, expected = sample_prompt(args, dataset)

    def write() -> str:
        why_not = contradiction(state.model, device, everywhere=True)
        return f"(none: {why_not})" if why_not else "".join(samples_of(
            state.model, dataset.tokenizer, device, prompt, args, vote=stop.vote if stop else int)[0])

    run.text.bar.set_postfix_str("writing a sample")
    with state.averaged_weights():
        text = run_and_wait(write)
    run.text.bar.set_postfix_str("")
    if dataset.marker_ids["response"] < 0:
        return run.say(f"a sample after step {step}:\n{prompt}{text}\n")
    if expected:
        text += f"\nresponse in the data:\n{expected}"
    run.say(f"a sample after step {step}:\nprompt:\n{prompt}\nresponse:\n{text}\n")


def end_run(run: Run, log: monitor.RunLog, stop: StopVote, step: int, samples: int):
    """Saves the last step if the loop hasn't, as after a trainer's own stop. Waits for the last checkpoint
    and says how the run has ended. All ranks call this.
    """
    world, checkpoints = run.world, run.checkpoints
    stopping = not all_done(run, log, step) and stop.agreed  # a signal in the last sample changes nothing
    memory = max(all_gather(memory_gb(world.device)))
    stop.read()  # leaves no vote under way; a signal after the last step changes nothing
    if step > 0 and step != checkpoints.saved_step:
        checkpoints.save(step, run.state, run.meta | run.metrics.state_dict())
    # once more, because the trainer may have changed parameters since the last save
    ending = (f"training complete: {step} steps, {samples * run.args.seq_len:,} tokens, the parameters of "
              f"all ranks were {assert_in_sync(run.state.model)}; the run is in {log.out}")
    if stopping:
        ending = (f"stopped by {signal.Signals(stopping).name} after step {step}, with a checkpoint of "
                  f"step {checkpoints.saved_step}: the same command resumes it")

    def finish():
        checkpoints.close()
        log.finish(step, samples, memory, ending)
        with suppress(*PACKAGE_ERRORS):  # nothing may stop a run that is done
            log.say(what_next(run, stopping > 0))

    # After all collectives, because rank 0 may write for longer than --timeout. The others wait, because a
    # torchrun whose processes have ended waits for the others only for a while.
    try:
        run_and_wait(finish)
    except RunError:  # without torchrun there may be no store in which to wait, and all has been said
        if not stop.is_orphan():
            raise
        checkpoints.close()  # raises if that is the error
    say_elsewhere(world, f"{ending} on node 0")
