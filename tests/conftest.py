"""What all tests share: the three tiers, processes under torchrun, and a small corpus as shards."""

import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
# real texts, if this machine has them
SHARED = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
os.environ["OMP_NUM_THREADS"] = "1"  # with two tests at a time, more threads would wait for each other
# Processes inherit ignored signals. A shell that starts pytest in the background ignores SIGINT, and nohup
# ignores SIGHUP, so restore both for the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests marked full as well, as CI does")
    parser.addoption("--long", action="store_true", help="run all tests, also those marked long")
    parser.addoption("--trainer", action="append", help="a trainer for test_trainer.py, not those here")


def pytest_configure(config):
    global LONG  # test modules are imported later and read it
    LONG = config.getoption("--long")
    if not any(Path(argument.partition("::")[0]).name == "test_cuda.py" for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests start more processes than the machine has GPUs


def pytest_collection_modifyitems(config, items):
    """Selects the tier. A test without a marker is in the first tier; one that is both full and long is in
    the last. With --trainer, tests up to full run. Other tests are deselected, because a skipped test looks
    as if something were missing.
    """
    full, long = config.getoption("--full") or config.getoption("--trainer"), config.getoption("--long")
    left_out = [] if long else ["long"] if full else ["long", "full"]
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]


def pytest_pycollect_makeitem(collector, name, obj):
    """Refuses two tests of the same name in a module: the second would replace the first."""
    if name.startswith("test") and inspect.isfunction(obj):
        definitions = re.findall(rf"^def {name}\(", collector.path.read_text(), re.M)
        if len(definitions) > 1:
            raise collector.CollectError(f"{collector.path} defines {name} {len(definitions)} times")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        from cluster.diagnosis import lacks_compiler
        if lacks_compiler(error):
            pytest.skip("needs a C++ compiler and Python's headers: sudo apt install g++ python3-dev")
        raise


PACKAGES = {"pynvml": "nvidia-ml-py", "yaml": "pyyaml"}  # modules from packages with other names


def pytest_terminal_summary(terminalreporter):
    """Prints in one line how many tests (or whole files) were skipped, and which packages they need."""
    reasons = [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", ())]
    missing = {}
    for reason in reasons:
        found = re.search(r"could not import '(\w+)|module '(\w+)' has|pip install ([\w -]+)", reason)
        if found:
            names = next(filter(None, found.groups()))
            missing[names] = missing.get(names, 0) + 1
    if reasons:
        names = sorted({PACKAGES.get(name, name) for name in " ".join(missing).split()})
        install = f", {sum(missing.values())} of them need packages: pip install {' '.join(names)}"
        terminalreporter.write_line(f"{len(reasons)} skipped{install if names else ''}; pytest -rs says why")


at_end = []  # functions that end what a test has started, in case it fails before it does so


@pytest.fixture(autouse=True)
def nothing_outlives_its_test():
    yield
    while at_end:
        at_end.pop()()


@dataclass
class Finished:
    code: int
    out: str  # standard output and standard error together


def start(command, cwd=None, **env) -> subprocess.Popen:
    """Starts a command in its own session, with `env` added to the environment. None removes a variable."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    environment = {k: str(v) for k, v in environment.items() if v is not None}
    process = subprocess.Popen([str(part) for part in command], cwd=cwd, env=environment, text=True,
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    at_end.append(lambda: process.poll() is None and kill(process))
    return process


def children(pid: int) -> list[int]:
    """The processes that a process has started. Use it to find the workers of torchrun: each of them has its
    own session.
    """
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((task / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue
        if parent == pid:
            found.append(int(task.name))
    return found


def kill(process: subprocess.Popen) -> str:
    """Kills a process and its children with SIGKILL. Returns what they have printed."""
    for pid in [process.pid, *children(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return process.communicate()[0]


def finish(process: subprocess.Popen, timeout: float = 240) -> Finished:
    """Waits for a process to end. After `timeout` seconds, kills it and its children and fails the test."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out = kill(process)
        pytest.fail(f"still running after {timeout} s: {process.args}\n{out}")
    return Finished(process.returncode, out)


def place(rank: int, world_size: int) -> SimpleNamespace:
    """A stand-in for a World on the CPU, with the attributes that Loader needs."""
    import torch
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


def torchrun(ranks: int, script, *args) -> list:
    """The command line that runs a script of this repository on `ranks` processes (0: without torchrun)."""
    script = ROOT / script
    if ranks == 0:
        return [sys.executable, script, *args]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}", script, *args]


def run(ranks: int, script, *args, timeout: float = 240, cwd=None, **env) -> Finished:
    return finish(start(torchrun(ranks, script, *args), cwd=cwd, **env), timeout)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A text of about 150 kB with some structure: Python sources from the standard library."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:12]
    path.write_text("\n".join(f.read_text(encoding="utf-8") for f in files), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shards(corpus, tmp_path_factory) -> Path:
    """The corpus as shards of bytes (258 ids), a tenth of it for validation."""
    from prepare.pipeline import prepare
    return prepare(f"text:{corpus}", tmp_path_factory.mktemp("shards") / "bytes", "bytes", workers=1)
