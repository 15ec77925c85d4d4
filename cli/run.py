"""Which run a command means: its flags, directory, checkpoint, data, batches and model."""

import functools
import json
import math
import os
import shlex
import sys
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

import ddp_utils
import monitor
from cli.errors import HOST, UserError, say
from cli.flags import (
    ANEW,
    CHOSEN,
    FLAGS,
    OF_DATA,
    OF_MODEL,
    PLANNED,
    SHARDED,
    Command,
    flag_fields,
    flags_of_model,
    uses_model,
)
from cluster.diagnosis import refuse_lone_tasks
from cluster.memory import before_data
from data import Dataset, directory_of, plan_batch, row_of, sources_of
from ddp_utils import (
    ANOTHER_OUT,
    BEGUN,
    Asked,
    Checkpoints,
    Run,
    RunLock,
    Settled,
    World,
    all_gather,
    assert_family,
    assert_same,
    bit_sum,
    build_model,
    code_trained_with,
    compute_dtype,
    config_of,
    connect,
    copy_weights,
    find_mismatch,
    init,
    is_in,
    list_checkpoints,
    load_checkpoint,
    local_shard,
    on_rank0,
    step_of,
    with_barrier,
)
from model import num_params, pad_vocab
from prepare.llm_c import manifest_of_plain_shards
from prepare.pipeline import locate
from prepare.vocabulary import tokenizer_id, tokenizer_of_run, without_surrogates
from weights.init_from import assert_context, gentler, nearest_size, reading_of, trained_model, weights_of
from weights.sampling import sample_prompt

TRAINERS = ("train_hrm", "train_mlm", "train_gpt2")


def start(command: "Command") -> World:
    """Joins the process group of a trainer. Raises UserError on all ranks if their flags differ."""
    args = settle(command).args
    world = init(args.backend, args.device, args.timeout, fast=args.fast)
    flags = [*vars(args).items()]

    def compare():
        if odd := find_mismatch([*map(str, flags)]):
            name = flags[odd[0]][0].replace("_", "-")
            raise UserError(f"--{name} on rank {odd[1]} differs from the other ranks: start every node with "
                            "the same flags; prepared pairs need the same files everywhere.")

    connect(world.backend, compare)
    return world


def settled(given: dict, saved: dict, weights: dict, row: dict, defaults: dict) -> dict:
    """The flags of a run. What the command gives wins over what the resumed run had, that over what the
    weights of --init-from say, that over the row of the size, and that over the defaults.
    """
    return defaults | row | weights | saved | given


def settle(command: Command, saved: dict | None = None, weights: dict | None = None) -> Settled:
    """The flags of the run that a command begins or, if `saved` is its checkpoint or what its config.json
    says, goes on with. `weights` is what is known of those of --init-from. Raises UserError for flags that
    contradict either.
    """
    given, rows = command.given, command.rows
    record = saved or weights or {"model_config": {}, "settings": {}}
    size = saved["settings"]["size"] if saved else given.get("size") or record.get("size") or next(iter(rows))
    row = rows.get(size, {})  # a run goes on where its size is gone
    command.parser.check_row(size, row)
    shape = shape_of(command, record, bool(saved)) if record["model_config"] else {}
    kept = flags_of_run(saved, command) | shape if saved else {}
    tuned = {}
    if "init_from" in given and not saved:
        tuned = gentler(row) | shape
    flags = settled(given, kept, tuned, row | {"size": size}, command.defaults)
    for action in command.parser._actions:
        value = (kept | given).get(action.dest)
        named = action.choices and action.dest not in ("size", "precision")  # which have names beside these
        if named and value not in (None, *action.choices):
            raise UserError(f"{saved['path']} says {action.dest} {value}, which is gone: use "
                            f"{code_trained_with(saved['path'])}, or train again in another --out.")
    recipe = row | tuned | kept
    flags |= {name: given.get(name) for name, kind in FLAGS.items() if kind == PLANNED}
    sources = sources_of(flags["data"])
    own_data = saved and flags["data"] == saved["settings"]["data"]  # what the run was trained on
    length = None if own_data else row_of(directory_of(sources[0], flags["tokenizer"]))
    flags["seq_len"] = given.get("seq_len") or length or record.get("seq_len") or flags["seq_len"]
    if own_data:
        flags["tokenizer"] = flags["tokenizer"] or saved["tokenizer_flag"]
    elif not any(Path(source).is_dir() for source in sources):  # whose ids the weights know
        flags["tokenizer"] = (flags["tokenizer"] or record.get("tokenizer_flag")
                              or record.get("tokenizer_file"))
    wanted = recipe["global_batch"]
    usual_batch = wanted if saved else row["global_batch"]
    of_size = {"usual_steps": recipe.get("steps"), "usual_warmup": flags["warmup"]}
    before = saved["settings"] if saved else of_size
    usual_steps = None if "warmup" in given else before.get("usual_steps")
    if saved and saved.get("begun") and usual_steps:  # the run begins again, perhaps with other steps
        flags["warmup"] = before["usual_warmup"]
    return Settled(Namespace(**flags), row, wanted, recipe.get("largest_batch", recipe["batch"]),
                   recipe.get("eval_batch", usual_batch), usual_steps, before.get("usual_warmup"))


def flags_of_run(saved: dict, command: Command) -> dict:
    """What a resumed run keeps of its settings."""
    given, settings = command.given, saved["settings"]
    names = command.defaults.keys() | {"largest_batch", "eval_batch"}
    kept = {name: value for name, value in settings.items()
            if name in names and (name == "largest_batch" or FLAGS.get(name) != ANEW)}
    if given.get("data", settings["data"]) != settings["data"]:
        kept |= {name: None for name, kind in FLAGS.items() if kind == OF_DATA}
    if uses_model(Namespace(**given)) and not given.get("eval_only"):
        kept["precision"] = "auto"  # whatever this machine computes fast
    return kept


def shape_of(command: Command, record: dict, resumed: bool) -> dict:
    """The model's flags as in a record of a run, or of weights to start from, but for those that may change.
    Raises UserError for a flag that is given and contradicts.
    """
    known = config_of(command.config_class, record["model_config"], record["path"])
    names = [option.name for option in flag_fields(command.config_class)]
    free = {name for name in names if FLAGS.get(name) == OF_MODEL}
    free.add("seq_len")  # rows may be shorter, see check_resumable and find_run
    if not resumed:
        free |= {name for name in names if FLAGS.get(name) == CHOSEN or name not in record["model_config"]}
    shape = {name: getattr(known, name) for name in names if name not in free}
    for name, value in shape.items():
        asked = command.given.get(name)
        if asked is None or replace(known, **{name: asked}) == known:
            continue
        flag = f"--{'no-' * (asked is False)}{name.replace('_', '-')}"
        if record.get("begun"):
            raise UserError(f"{record['path']}, {BEGUN} {name} {value}, but the flags say {name} {asked}: "
                            f"leave out {flag}, {ANOTHER_OUT}.")
        raise UserError(f"{record['path']} was trained with {name} {value}, but the flags say {name} "
                        f"{asked}: leave out {flag}, or start a new run with another --out and without "
                        "--init-from.")
    return shape


def find_checkpoint(out: Path, args: Namespace, world: World, family: str) -> dict | None:
    """The checkpoint that --resume names, or with `auto` the newest of a run directory; None if a run begins.
    Raises UserError on all ranks if another node holds a later one than rank 0 does, which happens where the
    nodes are numbered anew.
    """
    tell = functools.partial(say, file=sys.stderr if uses_model(args) else None)  # apart from a model's text
    if args.resume not in ("auto", "none"):
        return load_checkpoint(args.resume, tell, family=family)
    # a best.pt that alone is left of a run that went back is no reason to refuse the others
    newest = with_barrier(lambda: max(
        ((path.name != "best.pt", step_of(path)) for path in list_checkpoints(out)), default=(False, 0)))
    found = all_gather((newest, f"{world.node} ({HOST})"))
    ours, _ = found[0]
    theirs, where = max(found)
    first = ours[1]
    if theirs > ours:
        raise UserError(f"{where} holds step {theirs[1]} of {out}, node0 only step {first}: start that "
                        f"machine as node 0, copy its {out} to node 0, or, to go back, delete its later "
                        "checkpoints.")
    if not uses_model(args) and (args.resume == "none" or not first):
        return None
    if world.is_rank0 and first:
        tell(f"reading the checkpoint of step {first} in {out}")  # which can take a while
    return load_checkpoint(out, tell, family=family)


def run_directory(args: Namespace, trainer: str) -> Path:
    """--out, or a name such as runs/hrm-tiny-stdlib-bpe4096. A copy of a trainer has runs of its own, such as
    runs/train_mine-tiny-stdlib-bpe4096 of train_mine.py.
    """
    family = trainer.removeprefix("train_") if trainer in TRAINERS else trainer
    names = [args.size if args.size.startswith(family) else f"{family}-{args.size}"]
    names += [directory_of(source, args.tokenizer).name for source in sources_of(args.data)]
    return args.out or Path("runs", "-".join(names))


def command_line(trainer: Path, world: World, argv: list[str] | None) -> str:
    """This start's command, to be pasted into a shell in the same directory (on several nodes: of node 0)."""
    env = os.environ
    words = sys.argv if argv is None else [trainer, *argv]
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = f"torchrun --nproc_per_node={env['LOCAL_WORLD_SIZE']}"
        if world.nodes > 1:
            launcher += (f" --nnodes={world.nodes} --node_rank={env['GROUP_RANK']} "
                         f"--master_addr={env['MASTER_ADDR']} --master_port={env['MASTER_PORT']}")
    return f"{launcher} {shlex.join(map(str, words))}"


def find_run(model_class: type, command: Command, world: World, constants: dict) -> Asked:
    """Finds the run directory and the checkpoint to resume from or to use. All ranks call this.

    A resumed run is what it was: see `settled`. So is one that was killed before its first checkpoint, which
    begins again. `constants` is the trainer's globals(), of which names in capitals that are numbers, texts
    or tuples are recorded. Nothing is written or locked. Raises UserError on all ranks.
    """
    trainer = Path(constants.get("__file__", "notebook"))
    weights = missing = None
    if "init_from" in command.given:
        try:
            weights = weights_of(model_class, command.given["init_from"], complete=False)
            weights["size"] = nearest_size(command.rows, weights)
        except UserError as error:  # does not matter to a run that has begun
            missing = error
    flags = settle(command, weights=weights)
    out = run_directory(flags.args, trainer.stem)
    saved = find_checkpoint(out, flags.args, world, model_class.__name__)
    begun = None if saved else on_rank0(run_without_checkpoint, out, flags.args)
    record = saved or begun
    if record:
        assert_family(record, model_class)
        flags = settle(command, record)
    elif missing:
        raise missing
    elif command.given.keys() == {"out"} and world.is_rank0 and (out / "checkpoints").is_dir():
        say(f"WARNING: {out} does not say how its run was begun, so this one has the default flags")
    if flags.args.resume != "auto":  # the checkpoint says what it is of
        out = run_directory(flags.args, trainer.stem)
        if saved and (later := later_of_branch(out, saved, flags.args)):
            saved = later
            flags = settle(command, saved)
    args = flags.args
    assert_same("the precision", str(compute_dtype(args.precision, world.device)),
                "give --precision fp32 or bf16, because auto depends on the processor")
    refuse_gloo(args, world)
    if not uses_model(args):
        refuse_together(args, world)
    if weights and not record:
        assert_context(model_class, weights, args.seq_len)
    began = f"{time.strftime('%F %T')} {os.urandom(4).hex()}"
    constants = {name: value for name, value in constants.items()
                 if name.isupper() and isinstance(value, int | float | str | tuple)}
    return Asked(model_class, args, flags, world, constants, trainer,
                 command_line(trainer, world, command.argv), out, saved, begun,
                 record["settings"].get("began", began) if record else began)


def run_without_checkpoint(out: Path, args: Namespace) -> dict | None:
    """What config.json says of a run that was killed before its first checkpoint, as a checkpoint would, if
    there is one. Raises UserError if it branched off, or if something of an earlier run should stay.
    """
    for name in ("checkpoints/best.pt", "hf", "model.gguf"):
        if (out / name).exists():
            way = f", --resume {out / name} to go on from it" if name.endswith(".pt") else ""
            raise UserError(f"{out} has no checkpoint to go on from, but {name}, which should stay: give "
                            f"another --out{way}, or move it away.")
    if args.resume != "auto":
        return None
    config = monitor.read_config(out)
    settings = config.get("settings")
    if not isinstance(settings, dict) or not {"size", "data", "global_batch", "batch"} <= settings.keys():
        return None
    if not {"family", "model_config", "seq_len", "tokenizer"} <= config.keys():
        return None
    if (branch := settings.get("resume", "auto")) not in ("auto", "none"):
        raise UserError(f"{out} branches off from {branch}, and has no checkpoint yet: give --resume "
                        f"{branch} again, or begin anew there with --resume none.")
    return config | {"path": str(out), "begun": True} | tokenizer_of_run(out, settings)


def refuse_gloo(args: Namespace, world: World):
    """Raises UserError where the process would crash: gloo cannot exchange shards that are on GPUs."""
    shards = args.strategy in SHARDED and (args.eval_only or not uses_model(args))
    if shards and world.backend == "gloo" and world.device.type == "cuda":
        raise UserError(f"--strategy {args.strategy} on GPUs needs NCCL, and the backend is gloo: give "
                        "--strategy ddp or zero1, or --backend nccl.")


def later_of_branch(out: Path, saved: dict, args: Namespace) -> dict | None:
    """The checkpoint to go on with where --resume branches off from `saved` into a directory that holds later
    ones of that branch: the same command resumes. Raises UserError if they are of another run.
    """
    if uses_model(args) or on_rank0(lambda: is_in(saved, out) or not list_checkpoints(out)):
        return None
    newest = load_checkpoint(out, print)
    settings = newest["settings"]
    if settings["began"] != saved["settings"]["began"]:
        raise UserError(f"{out} holds another run than {args.resume}: give another --out, or leave out "
                        "--resume to go on with that.")
    return newest if settings.get("resume") == args.resume and newest["step"] > saved["step"] else None


def refuse_together(args: Namespace, world: World):
    """Raises UserError for flags that cannot train together."""
    if args.strategy in SHARDED and args.optimizer == "muon":
        raise UserError("--optimizer muon needs full matrices: use --strategy ddp or zero1, or start a new "
                        "run with --optimizer adamw.")
    dtype = compute_dtype(args.precision, world.device)
    if args.comm == "bf16" and args.strategy == "zero1":
        raise UserError("--comm bf16 is for --strategy ddp, zero2 and zero3: give one of them, or --comm "
                        "fp32.")
    if args.comm == "bf16" and args.strategy != "ddp" and dtype != torch.bfloat16:
        raise UserError("--comm bf16 with shards needs bfloat16 activations: give --precision bf16, or "
                        "--comm fp32.")
    if args.comm == "late" and (args.strategy != "ddp" or dtype == torch.float16):
        raise UserError("--comm late needs --strategy ddp, and --precision bf16 or fp32: give those, or "
                        "--comm fp32.")


def located(source: str, args: Namespace, useful: int, local_rank: int) -> Path:
    """The directory of a source of --data, prepared if necessary, see locate in prepare/pipeline.py."""
    limits = {name: getattr(args, name) for name in ("max_tokens", "max_samples", "min_words")}
    directory = directory_of(source, args.tokenizer)
    if directory == Path(source) and not any(limits.values()):
        return directory
    watch = ddp_utils.heartbeat.raise_if_lost if ddp_utils.heartbeat else lambda: None
    return locate(source, args.tokenizer, useful, local_rank, watch, args.seq_len, **limits)


def load_data(asked: Asked, **example) -> Dataset:
    """The data set of --data, prepared first if necessary. From the hub it takes 20 tokens per parameter, or
    --max-tokens. `asked.change_data`, a trainer's own function, may then replace its `train`, `val` and
    `masker_class`, for training and --eval-only alike. `example` has what the model's `example` takes more.
    """
    args = asked.args
    refuse_lone_tasks()
    useful = with_barrier(before_data, asked, example)  # with the vocabulary that --tokenizer will have

    def read():
        directories = [located(source, args, useful, asked.world.local_rank)
                       for source in sources_of(args.data)]
        dataset = Dataset(directories, args.seq_len, args.tokenizer, vars(args).get("loss", "all"),
                          manifest_of_plain_shards)
        if asked.change_data:
            asked.change_data(dataset)
            dataset.check_sets()
        return dataset

    dataset = with_barrier(read)
    sizes = [shards.rows for shards in (dataset.train, *dataset.val.values())]  # which change_data may change
    assert_same("the data", f"{dataset.fingerprint} {sizes}",
                "copy the same files to every node, or prepare them there with the same command")
    return dataset


def open_run(asked: Asked, dataset: Dataset) -> Run:
    """Locks the run directory, opens its train.log and sets the steps and batches. If a newer checkpoint was
    written before the directory was locked, that is taken. Raises UserError on all ranks.
    """
    args, world, out, flags = Namespace(**vars(asked.args)), asked.world, asked.out, asked.settled
    lock = RunLock(out)
    on_rank0(lock.acquire)
    text = monitor.TrainLog(out / "train.log", world.prefix, world.is_rank0)
    checkpoints = Checkpoints(out, world, args.keep_last, text.say, lock.lost)
    saved = checkpoints.load(args.resume, asked.saved)
    wanted = flags.wanted_batch
    global_batch, batch, grad_accum = plan_batch(world.world_size, args.global_batch, args.batch,
                                                 args.grad_accum, wanted, flags.largest_batch)
    if args.batch or args.grad_accum:
        flags = replace(flags, largest_batch=batch)  # also when the run is resumed
    if global_batch * args.seq_len > 1e9:
        raise UserError(f"a step of {global_batch:,} sequences of {args.seq_len} tokens takes hours: lower "
                        "--global-batch, or --batch and --grad-accum.")
    if not (args.global_batch or args.batch and args.grad_accum) and global_batch != wanted:
        text.say(f"{wanted} sequences a step do not divide among {world.world_size} processes: taking "
                 f"{global_batch}")
        if abs(global_batch / wanted - 1) > 0.05:
            text.say(f"WARNING: {global_batch} sequences a step, not {wanted}, may need another --lr: "
                     "--global-batch chooses another number")
    steps = args.steps
    if args.epochs:  # a resumed run has done some of them
        done, samples = (saved["step"], saved["samples"]) if saved else (0, 0)
        left = math.ceil(args.epochs * dataset.train.rows) - samples
        steps = done + max(0, math.ceil(left / global_batch))
    usual = flags.usual_steps
    if usual and steps < usual and args.warmup >= 1 and not saved:
        of_size, args.warmup = args.warmup, round(args.warmup * steps / usual)
        text.say(f"warm-up over {args.warmup} of {steps} steps, as over {of_size} of {usual}: --warmup "
                 "chooses another number")
    asked = replace(asked, args=args, settled=flags, saved=saved, begun=None if saved else asked.begun)
    return Run(**vars(asked), dataset=dataset, steps=steps, global_batch=global_batch, batch=batch,
               grad_accum=grad_accum, checkpoints=checkpoints, text=text)


def new_model(run: Run, **config) -> nn.Module:
    """The model to train: random or from --init-from, or uninitialized if a checkpoint will be restored into
    it. `config` has the fields of its configuration that come from the data.
    """
    model_class, args, dataset, world = run.model_class, run.args, run.dataset, run.world
    saved = run.saved
    padded_vocab = args.vocab_size or pad_vocab(config["vocab_size"])
    config = model_class.Config(padded_vocab=padded_vocab, **flags_of_model(model_class.Config, args),
                                **config)
    if vars(config).get("attention") == "prefix" and dataset.loss == "all":
        raise UserError("--attention prefix needs pairs and --loss response, else tokens would see what "
                        "they are to learn: use isolated or causal, or prepare the data with "
                        "--prompt-field and --response-field.")
    if vars(config).get("response", -1) >= 0:
        sample_prompt(args, dataset)  # raises UserError now, and not after hours
    # the rest of the configuration is that of the checkpoint or of the weights
    changes = {name: value for name, value in vars(config).items()
               if name in reading_of(config) or FLAGS.get(name) == OF_MODEL}
    if saved:
        config = config_of(model_class.Config, saved["model_config"] | changes, saved["path"])
        model = build_model(model_class, config, world, args.strategy, args.comm)
    elif args.init_from:
        model = trained_model(run, asdict(config), changes)
    else:
        model = build_model(model_class, config, world, args.strategy, args.comm)
        run.say(f"initializing {num_params(model):,} parameters")
        torch.manual_seed(args.seed)
        copy_weights(model, model_class(config).state_dict() if world.is_rank0 else {}, world)
    if args.strategy in SHARDED:  # for begin_log
        model.initial_sums = {name: int(bit_sum(local_shard(p))) for name, p in model.named_parameters()}
    torch.manual_seed(args.seed)  # alike on all ranks, for what a trainer adds to the model or draws again
    return model


def identity_of(model: nn.Module, run: Run, **settings) -> dict:
    """The description of a run in a checkpoint and config.json: values that must not change on a resume, and
    its settings: the flags, the plan, the trainer's constants, and `settings`, with what set_modes returns.
    """
    args, dataset, flags = run.args, run.dataset, run.settled
    plan = {"steps": run.steps, "global_batch": run.global_batch, "batch": run.batch,
            "grad_accum": run.grad_accum, "wanted_batch": flags.wanted_batch,
            "largest_batch": flags.largest_batch, "eval_batch": flags.eval_batch,
            "usual_steps": flags.usual_steps, "usual_warmup": flags.usual_warmup,
            "world_size": run.world.world_size, "threads": torch.get_num_threads(),
            "trainer": run.trainer.name, "began": run.began}
    shape = flags_of_model(run.model_class.Config, model.config)
    settings = vars(args) | run.constants | shape | plan | settings
    text = without_surrogates(json.dumps(settings, default=str, ensure_ascii=False))
    return {"family": run.model_class.__name__, "model_config": asdict(model.config), "seq_len": args.seq_len,
            "tokenizer": tokenizer_id(dataset.tokenizer), "data": dataset.fingerprint,
            "loss_on": dataset.loss, "seed": args.seed, "settings": json.loads(text)}
