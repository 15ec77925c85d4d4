"""The code that a run was trained with, kept in its directory."""

import itertools

from data import access


def source_files(run) -> dict[str, str]:
    """trainer.py: the text of the trainer that began the run, or that of today if there is none yet. Says
    where the trainer has changed since.
    """
    path = run.out / "trainer.py"
    try:
        now = run.trainer.read_text(encoding="utf-8", errors="replace")
    except OSError:  # a notebook has no such file
        return {}
    if not run.saved or not path.exists():
        return {path.name: now}
    with access(path):
        began = path.read_text(encoding="utf-8", errors="replace")
    pairs = itertools.zip_longest(began.splitlines(), now.splitlines())
    for number, (before, after) in enumerate(pairs, 1):
        if before != after:
            run.say(f"{run.trainer.name} has changed since it began this run, first in line {number} (see "
                    f"{path})")
            break
    return {path.name: began}
