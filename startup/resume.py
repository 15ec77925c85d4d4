"""What a run keeps when it resumes, what it takes from the new command, and what it refuses.

The kind of a flag decides:

    kind      a resume that leaves the flag out   a resume that gives another value
    NEW       has the default                     takes it
    PLANNED   plans it for its processes          takes it, and says so
    FIXED     keeps it                            is refused
    KEPT      keeps it                            takes it, and says so

A flag that isn't listed below is KEPT, or FIXED if it's a field of the model's configuration. These fields
are the model's shape, so --init-from keeps them, too, but accepts another --attention and --init. Of --data
and --tokenizer the content is FIXED, under any name.
"""

from dataclasses import replace

from cli.errors import UserError
from cli.flags import Command, flag_fields
from ddp_utils import config_of
from prepare.pipeline import LIMITS

NEW = ("out resume tokenizer device backend timeout compile dry_run eval_only export prompt chat fill "
       "num_samples list_presets wanted_batch largest_batch").split()
RECORDED = "tokenizer resume".split()  # NEW, but config.json has them among the flags of a command
PLANNED = "global_batch batch grad_accum".split()
FIXED = "seq_len loss_on seed size optimizer trainer ema init_from".split()  # see compare_with_saved
FREE_FIELDS = "dropout eval_cycles bp_cycles".split()  # of the model's configuration, but KEPT
# Another value of these changes no step, so it may be given when none is left
SHOWN = ("steps epochs batch grad_accum data tokenizer max_tokens max_samples min_words resume strategy "
         "fast checkpoint_activations log_every eval_every eval_batches eval_cycles save_every "
         "keep_last wandb sample_prompt sample_every condition max_new_tokens temperature top_k "
         "top_p").split()


def shape_from_record(command: Command, record: dict, resumed: bool) -> dict:
    """The fields of the model's configuration that a resume, or else --init-from, keeps from `record`. Raises
    UserError if a given flag contradicts them.
    """
    path, fields = record["path"], record["model_config"]
    known = config_of(command.config_class, fields, path)
    names = vars(known).keys() if resumed else fields.keys() - {"attention", "init"}
    free = {*FREE_FIELDS, "seq_len"}  # rows may be shorter, see compare_with_saved and find_run
    shape = {field.name: getattr(known, field.name) for field in flag_fields(command.config_class)
             if field.name in names - free}
    other = [name for name, value in command.given.items()
             if name in shape and replace(known, **{name: value}) != known]
    compare(path, shape, command.given, other,
            "leave that flag out, or start a new run with another --out and without --init-from")
    return shape


def compare(path, before: dict, now: dict, fixed: list[str], way_out: str) -> list[str]:
    """Compares values with those of a checkpoint. Returns a sentence for each change. Raises UserError, which
    ends with `way_out`, if a value in `fixed` has changed.
    """
    changes = []
    for name, value in now.items():
        was = before.get(name, value)
        if was != value and name in fixed:
            raise UserError(f"{path} was trained with {name} {was}, not {value}: {way_out}.")
        if was != value and name not in NEW:
            changes.append(f"resuming with {name} {value} (was {was})")
        elif name in LIMITS and value:
            changes.append(f"resuming with {name} {value}, as it was begun")
    return changes


def compare_with_saved(saved: dict, now: dict, branch: bool, say, given=()):
    """Raises UserError if something changed that must not change (shape_from_record checks the model's
    shape), and for a flag in `given` that no step is left for. Says what else changed. A `branch` continues
    in another directory, and may have another trainer.
    """
    path, way_out = saved["path"], "leave it as it was, or start a new run with another --out"
    if saved["tokenizer"].split()[-1] != now["tokenizer"].split()[-1]:  # compare the digests, not the names
        raise UserError(f"{path} was trained with the tokenizer {saved['tokenizer']}, not with "
                        f"{now['tokenizer']}: {way_out}.")
    way_out += f" (--init-from {path} starts it from these weights)"
    if saved["data"] != now["data"]:
        was, value = (f"{run['settings']['data']} ({run['data'][:12]})" for run in (saved, now))
        raise UserError(f"{path} was trained with the data {was}, not with {value}: {way_out}.")
    before, after = (run["settings"] | {name: run[name] for name in ("seq_len", "loss_on", "torch")}
                     for run in (saved, now))
    # --ema may change, but not end; --init-from may be written in another way
    free = {"trainer": branch, "ema": after["ema"], "init_from": before["init_from"]}
    if before["trainer"] != after["trainer"]:
        way_out += f", or branch off with --resume {path}"
    changes = compare(path, before, after, [name for name in FIXED if not free.get(name)], way_out)
    for name, value in after.items():
        if (name in given and name not in SHOWN and saved["step"] >= after["steps"]
                and before.get(name, value) != value):
            raise UserError(
                f"no step was left for --{name.replace('_', '-')} {value} ({path} had {before[name]} in its "
                f"{saved['step']} steps): give another --out{' and no --resume' if branch else ''} to start "
                f"a new run, or --steps {2 * saved['step']} to train on with it.")
    for text in changes:
        say(text)
