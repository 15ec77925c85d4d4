"""Which ranks are missing at the start, and which rank made a collective fail."""

import itertools
import os
import signal
import sys
import threading
import time
import traceback
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from cli.errors import (
    HOST,
    RetryableError,
    RunError,
    UserError,
    from_launcher,
    joined,
    oserror_as_retryable,
    set_handler,
)
from cluster import roll_call

OF_NODES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")  # torchrun sets these, too
_joins = itertools.count()  # this process may call main() again
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # otherwise torchrun shares its own with the processes
HOW_TO_RESUME = ("fix that and start the same command again on every node (ddp_launch.sh with a range of "
                 "nodes does it by itself); it resumes from the newest checkpoint")
SAME_COLLECTIVES = (
    "in an edited trainer, ranks have nearly always taken different branches, but all must call the same "
    "collectives in the same order, checkpoints.save and evaluate among them. If it was not edited, a rank "
    "was busy, suspended or cut off from others: look there, or raise --timeout.")


def join(timeout: float) -> tuple[int, int, dist.Store, "Heartbeat | None"]:
    """Returns rank, world size, the store at MASTER_ADDR, and this rank's heartbeat if there are others."""
    env = os.environ
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *OF_NODES):
        value = env.get(name) or ("1" if name in OF_NODES else "")
        if not value or name != "MASTER_ADDR" and not value.isdecimal():
            raise UserError(f"{name} is not {'a number' if value else 'set'}: start with torchrun, or give "
                            "each process RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. For a single one, "
                            "`unset RANK WORLD_SIZE`.")
    rank, world_size, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world_size:
        raise UserError(f"RANK={rank} is not below WORLD_SIZE={world_size}: count ranks from 0.")
    if port > 65535 or port == 0 and world_size > 1:
        raise UserError(f"MASTER_PORT={port} is not from 1 to 65535: choose one, the same for all processes.")
    where = f"{env['MASTER_ADDR']}:{port}"
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store
    hosts_store = rank == 0 and not shared
    try:
        store = dist.TCPStore(env["MASTER_ADDR"], port, None, hosts_store, timedelta(seconds=timeout),
                              wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the port of {where} is in use here: end what uses it, or choose another MASTER_PORT."
                       if "EADDRINUSE" in str(error) else
                       f"rank {rank} found no rank 0 at {where} within {timeout:g} s: read what rank 0 says. "
                       "If it says nothing, check MASTER_ADDR, MASTER_PORT and its firewall.") from None
    several_nodes = world_size > from_launcher("LOCAL_WORLD_SIZE", 1)
    if several_nodes and shared and from_launcher("TORCHELASTIC_MAX_RESTARTS"):
        raise UserError("--max-restarts on several nodes needs a store for each start: give torchrun "
                        f"--rdzv-backend=c10d, and export {OWN_STORE}=1 on every node before.")
    # torch counts restarts only on nodes whose own process failed
    attempt = 0 if several_nodes else env.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"attempt {attempt}, {next(_joins)}", store)
    heartbeat = None
    if world_size > 1:
        if store.add(f"rank {rank}", 1) > 1:
            raise UserError(f"RANK={rank} was given to two processes: give each its own."
                            if "TORCHELASTIC_RUN_ID" not in env else
                            "torchrun has started the processes again after a node came or went, but its "
                            f"store still holds the old ones: export {OWN_STORE}=1 on every node before "
                            "torchrun, then start again. The run resumes from its newest checkpoint.")
        address = address_towards(env["MASTER_ADDR"]) if several_nodes else None
        store.compare_set("a node's address", "", address or "")
        leaves_last = hosts_store or several_nodes and from_launcher("GROUP_RANK") == 0
        heartbeat = Heartbeat(store, rank, world_size, where, timeout, leaves_last, address)
    return rank, world_size, store, heartbeat


def address_towards(address: str) -> str:
    """The IPv4 address with which this machine reaches another one, "" if unknown or if it's a loopback."""
    own = ""
    with suppress(roll_call.Problem):  # with IPv6, for example
        own = roll_call.address_towards(address)
    return "" if own.startswith("127.") else own


def line_of(stack) -> str:
    """The innermost line in the file that was started, "" if there is none, of frames and their lines, the
    innermost first. Reads no file, which could stop the beats.
    """
    script = getattr(sys.modules["__main__"], "__file__", "")
    return next((f"at line {line} of {script}" for frame, line in stack
                 if frame.f_code.co_filename == script), "")


@dataclass
class Heartbeat:
    """Shows the other ranks that this one is alive, and finds the rank that made a collective fail.

    A thread writes `name|line|time|state` to the store every BEAT seconds. The line is where the trainer is,
    or where it failed. The state is empty, `failed` or `ended`. A rank that fails leaves its reason in the
    store. If a collective fails on a rank, it looks for that reason, then for ranks with a time that stands
    still, then for busy ranks, with a state other than `failed`. The first rank that finds the cause
    publishes it, so all ranks print the same sentence.

    A machine without power resets no connection, so a collective would wait for `--timeout`. The thread
    therefore watches the next rank, and calls `on_lost` if the main thread doesn't end the run by itself.
    """

    BEAT = 1.0  # seconds
    PATIENCE = 5.0  # seconds without a new beat after which a rank counts as lost once a collective fails
    LOST = 20.0  # and if none does: a process that is stopped for ten seconds isn't lost

    server: dist.Store  # stays open, because it may serve all ranks
    rank: int
    world_size: int
    where: str
    timeout: float
    leaves_last: bool  # because this process or machine hosts the store
    address: str | None  # with which this machine reaches node 0, if there are several nodes

    def __post_init__(self):
        self.store = dist.PrefixStore("heartbeat", self.server.clone())  # its own connection
        self.name = f"rank {self.rank} on node{os.environ.get('GROUP_RANK') or 0} ({HOST})"
        self.keys = [str(r) for r in range(self.world_size)]
        self.cause = self._own_cause = ""  # the store's sentence, and this rank's proposal
        self._state = self._place = self.line = ""  # `diagnose` sets the line of a failure
        self._waits = itertools.count()  # numbers the calls of run_and_wait, the same on all ranks
        self._seen = {}
        self._next_look = 0.0
        self._stopped = threading.Event()
        self.on_lost = lambda cause: None  # ddp_utils.init sets it
        self._beat()
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def wait_for_all(self):
        """Waits for all ranks, then chooses gloo's network card. Raises RunError if a rank does not come
        within the timeout, and UserError if WORLD_SIZE differs from the first rank's.
        """
        size = self.store.compare_set("world size", "", f"{self.world_size}").decode()
        if size != f"{self.world_size}":
            raise UserError(f"WORLD_SIZE is {self.world_size} here and {size} on another rank: give all "
                            "processes the same.")
        deadline = time.monotonic() + self.timeout
        while not self.call(self.store.check, self.keys):
            if time.monotonic() > deadline:
                missing = self.call(lambda: [f"rank {k}" for k in self.keys if not self.store.check([k])])
                raise RunError(f"{joined(missing)} of {self.world_size} did not come to {self.where} within "
                               f"{self.timeout:g} s: start the same command there, with its own node "
                               "rank and the same folders.")
            if self.cause:
                raise RunError(self.cause)
            time.sleep(0.05)
        if self.address is None:
            return
        # By default gloo takes the interface of this machine's name, which is 127.0.1.1 on Debian and Ubuntu.
        # `address` is "" if MASTER_ADDR is this machine's name: take the interface towards another node.
        own = self.address or address_towards(self.server.get("a node's address").decode())
        if interface := roll_call.interface_of(own):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def refuse_other_backends(self, backend: str):
        """Raises UserError on all ranks if they have chosen different backends, because they would hang."""
        self.run_and_wait(self.add, backend, 1)
        if (same := self.add(backend, 0)) < self.world_size:
            raise UserError(f"rank {self.rank} is one of {same} among {self.world_size} that use {backend}: "
                            "find the nodes without a GPU with nvidia-smi, or give all of them --device cpu.")

    def run_and_wait(self, function, *args):
        """See ddp_utils.run_and_wait."""
        what = f"wait {next(self._waits)}"
        try:
            with oserror_as_retryable():
                result = function(*args)
        except BaseException as error:
            reason = f"{getattr(error, 'exit_code', 1)} {str(error) or type(error).__name__}"
            with suppress(RunError):
                self.call(self.store.set, f"{what} failed", reason)
            raise
        self.add(what, 1)
        while self.add(what, 0) < self.world_size:
            # "" where none has failed
            if failed := self.call(self.store.compare_set, f"{what} failed", "", ""):
                code, _, reason = failed.decode().partition(" ")
                raise (UserError if code == "2" else RetryableError)(reason)
            self.raise_if_lost()
            time.sleep(0.05)
        return result

    def watch(self, function):
        """Returns function(). Raises RunError as soon as another rank fails."""
        running = futures.ThreadPoolExecutor(1).submit(function)
        while not running.done():
            self.raise_if_lost()
            time.sleep(0.05)
        return running.result()

    def raise_if_lost(self):
        """Raises RunError if a rank failed or was silent for `timeout`. For loops without a collective."""
        now = time.monotonic()
        if self.cause:
            raise RunError(self.cause)
        if now < self._next_look:
            return
        self._next_look = now + self.PATIENCE
        beats = self.call(self.store.multi_get, self.keys)
        self._seen = {beat: self._seen.get(beat, now) for beat in beats}
        if silent := [beat for beat, since in self._seen.items() if now - since > self.timeout]:
            raise RunError(self._lost(silent))

    def find_cause(self) -> str:
        """Says in one sentence why a collective failed, "" if unknown. Takes some seconds."""
        set_handler(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another process here failed
        try:
            self.call(self._look_for_cause, timeout=self.PATIENCE + 3 * self.BEAT)
            return self.cause
        except RunError as error:
            return str(error)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter in the store and returns the sum."""
        return self.call(self.store.add, key, amount)

    def call(self, function, *args, timeout: float = 0):
        """Returns function(*args), which calls the store. Raises RunError if it fails or is too slow."""
        answer = []

        def attempt():
            with suppress(Exception):  # the connection is lost
                answer.append(function(*args))

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(timeout or self.timeout)
        if answer:
            return answer[0]
        raise RunError(self.cause or (
            f"node0 can no longer be reached at {self.where} (a process there has failed or ended, or its "
            f"machine or network is down): {HOW_TO_RESUME}."))

    def stop(self, reason: str):
        """Ends the heartbeat and publishes `reason`, if there is one. The store's host leaves last."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._state = "ended"
        if reason:
            self._own_cause = f"{self.name} failed first: {reason}"
        with suppress(RunError):
            self.call(self._beat, timeout=2 * self.BEAT)
        deadline = time.monotonic() + (2 * self.BEAT if self.cause else 30)
        with suppress(RunError):  # others may still wait in `run_and_wait` and need the store
            while self.leaves_last and time.monotonic() < deadline:
                beats = self.call(self.store.multi_get, self.keys, timeout=self.PATIENCE)
                if all(beat.endswith(b"|ended") for beat in beats):
                    break
                time.sleep(self.BEAT / 20)

    def _beat_on(self):
        last, since, host_ended = b"", time.monotonic(), False
        while not self.cause and not self._stopped.wait(self.BEAT):
            try:
                beat, host_ended = self.call(self._beat_and_look, timeout=self.LOST)
            except RunError as error:
                if host_ended:  # and took the store along; nobody waits for it
                    return
                self.cause = str(error)
                break
            if beat != last or beat.endswith(b"|ended"):
                last, since = beat, time.monotonic()
            elif beat and time.monotonic() - since > self.LOST:  # the next _beat publishes it
                self._own_cause = self._lost([beat])
        # the main thread sees the cause by itself unless it waits in a collective
        if not self._stopped.wait(self.PATIENCE + 3 * self.BEAT):
            self.on_lost(self.cause)

    def _beat_and_look(self) -> tuple[bytes, bool]:
        """Returns the beat of the next rank, b"" if it hasn't come, and whether rank 0 has ended. With all
        beats, the store's work would grow with the square of the ranks.
        """
        self._beat()
        keys = [self.keys[(self.rank + 1) % self.world_size], self.keys[0]]
        beat, first = self.store.multi_get(keys) if self.store.check(keys) else (b"", b"")
        return beat, first.endswith(b"|ended")

    def _beat(self):
        with suppress(Exception):  # the stack changes while it is read, and nothing may stop the beats
            self._place = line_of(traceback.walk_stack(
                sys._current_frames()[threading.main_thread().ident]))
        self.store.set(self.keys[self.rank],
                       f"{self.name}|{self.line or self._place}|{time.monotonic()}|{self._state}")
        if cause := self.store.compare_set("cause", "", self._own_cause):  # the first one stays
            self.cause = cause.decode()

    def _names(self, beats: list[bytes]) -> str:
        return joined([beat.decode().partition("|")[0] for beat in beats])

    def _lost(self, beats: list[bytes]) -> str:
        return (f"{self._names(beats)} stopped responding (the process, its machine or its network is "
                f"down): {HOW_TO_RESUME}.")

    def _look_for_cause(self):
        before = self.store.multi_get(self.keys)
        self._state = "failed"
        deadline = time.monotonic() + self.PATIENCE
        while not self.cause:
            time.sleep(self.BEAT / 4)
            self._beat()
            now = self.store.multi_get(self.keys)
            places = [beat.decode().rsplit("|", 2)[0].split("|", 1) for beat in now]
            self.places = joined([*{line: f"{name} {line}" for name, line in places}.values()])
            silent = [beat for beat in now if beat in before and not beat.endswith(b"|ended")]
            busy = [beat for beat in now if not beat.endswith((b"|failed", b"|ended"))]
            if not silent and not busy:
                return
            if time.monotonic() > deadline:  # the next beat publishes the cause
                self._own_cause = (
                    f"{self._lost(silent)} If the trainer was edited and that process aborted in gloo (its "
                    "stack is above), ranks have taken different branches: this was noticed by "
                    f"{self.name} {self.line}.") if silent else (
                    f"{self._names(busy)} did not take part within --timeout ({self.timeout:g} s), though "
                    f"alive ({self.places}): {SAME_COLLECTIVES}")
