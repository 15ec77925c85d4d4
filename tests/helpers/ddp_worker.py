"""Runs on two processes what a test file has named check_…, one after the other in one process group. Each
check takes the World, and raises AssertionError on a rank where it fails.
"""

import importlib
import sys
from pathlib import Path

import torch
from processes import fork

import ddp_utils


def run_checks(file: str) -> None:
    """Runs all checks of a file, which takes one start. A test of that file calls this."""
    names = [name for name in vars(sys.modules[Path(file).stem]) if name.startswith("check_")]
    done = fork(2, "tests/helpers/ddp_worker.py", file, *names)
    failed = [name for name in names if f"{name} OK" not in done.out]
    assert names and not failed and done.code == 0, f"{failed[:1]} failed:\n{done.out}"


def main() -> None:
    world, file = ddp_utils.init(timeout=30), Path(sys.argv[1])
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    for name in sys.argv[2:]:
        getattr(module, name)(world)
        torch.distributed.barrier()  # rank 0 may be through with one that fails on rank 1
        if world.is_rank0:
            print(name, "OK", flush=True)


if __name__ == "__main__":
    ddp_utils.launch(main)
