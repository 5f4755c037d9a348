"""The lease of a checkpoint folder, which lets only one run at a time write there.

Two drivers in one folder would delete and overwrite each other's checkpoints, for example if a scheduler
restarts a driver that it wrongly considers dead. The drivers share only the folder, so the lease is made of
files:

    lease             the record of the first run
    lease-ID.next     the record of the run that took over from the run ID
    lease-ID.beat     the heartbeat of the run ID, which rewrites it every few seconds

The records form a chain: ``lease``, then the ``.next`` file of each run in turn. The owner is the last run
of the chain. A record is created only if there is no file of that name. Some file systems cannot guarantee
this in a race. There a run waits for ``settle_seconds``, and then reads the chain again. A run takes over by
creating the ``.next`` file of an owner that has ended or is silent. So only one of several runs wins, and no
run takes over from an owner that it has not checked. The owner ends the chain by removing ``lease``. Each
attempt to acquire the lease has an id of its own, so that files of an earlier chain are never mistaken for
files of the present chain.

The waiting run measures silence by its own clock. Times of two machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.process import interrupts
from sparkdl.spark.folders import Folder, open_folder
from sparkdl.spark.hadoop import Context

logger = logging.getLogger(__name__)
NAME = "lease"
BEAT_SECONDS = 3.0  # between two heartbeats
SILENCE_SECONDS = 20.0  # without a heartbeat, after which another run may take over
POLL_SECONDS = 0.5  # between two looks at the heartbeat of another run
LOOKS = 20  # attempts to read a folder while another run removes its files
JOIN_SECONDS = 10.0  # the longest wait for the last heartbeat to end, on a file system that may hang
ID = re.compile("[0-9a-f]{32}")  # a part of file names
LEFTOVER = re.compile(rf"\.{NAME}(-{ID.pattern}\.next)?-[0-9a-f]+|{NAME}-{ID.pattern}\.(beat|next)")
MOST_PROCESSES = 1 << 31  # process ids are below this; os.kill accepts no larger ones
_held: set[str] = set()  # the ids of this process's leases


@dataclass(frozen=True)
class Owner:
    """A run that has a lease, or had one.

    Attributes:
        id: a unique id, 32 hexadecimal digits.
        host: the machine's host name.
        process: the driver's process id.
        started: the start time of that process, in the kernel's ticks; None if unknown.
        machine: the boot and the namespace that the process id belongs to; None if unknown.
    """

    id: str
    host: str
    process: int
    started: str | None = None
    machine: str | None = None

    @classmethod
    def here(cls) -> Owner:
        """Return a new owner for this process."""
        process = os.getpid()
        return cls(secrets.token_hex(16), socket.gethostname(), process, _started(process), _machine())

    @classmethod
    def of(cls, data: bytes) -> Owner:
        """Return the owner that a record describes.

        Raises:
            ValueError: the data is not a record, or has values that no run writes.
        """
        try:
            values = json.loads(data)
            owner = cls(*(values.get(name) for name in cls.__dataclass_fields__))
            known = (
                ID.fullmatch(owner.id)
                and isinstance(owner.host, str)
                and type(owner.process) is int
                and 0 < owner.process < MOST_PROCESSES
                and all(isinstance(each, str | None) for each in (owner.started, owner.machine))
            )
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("it is not the record of a run") from error
        if not known:
            raise ValueError("it is not the record of a run")
        return owner

    def record(self) -> bytes:
        """Return the record, which ``of`` reads."""
        return json.dumps(asdict(self)).encode()

    def is_gone(self) -> bool:
        """Return True if the owner ran on this machine, and its process or its run is known to have ended."""
        if self.machine is None or self.machine != _machine():
            return False
        if self.process == os.getpid():
            return self.id not in _held  # left by an earlier fit, or by an earlier process with the same id
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # the process belongs to another user
        now = _started(self.process)
        return None not in (now, self.started) and now != self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def _machine() -> str | None:
    """Return a name of the machine's boot and of the container's process namespace; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(process: int) -> str | None:
    """Return the start time of a process in the kernel's ticks; "ended" for a zombie; None if unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]  # fields 3 and 22 of proc(5)


class Lease:
    """The lease of a checkpoint folder.

    Args:
        uri: the folder, a path or a URI.
        folder: the files of this folder.
        clock: the function that returns the time in seconds.
        sleep: the function that waits for a number of seconds.
    """

    def __init__(
        self,
        uri: str,
        folder: Folder,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.uri, self.folder = uri, folder
        self._clock, self._sleep = clock, sleep
        self.me = Owner.here()
        self._root = ""  # the id at the beginning of the chain
        self._beats = 0
        self._problem: str | None = None  # the message if the lease is lost
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    # Acquiring.

    def acquire(self) -> None:
        """Become the owner of the folder.

        This takes a moment if the folder is free, or if the owner ran on this machine and its process has
        ended; otherwise usually up to ``SILENCE_SECONDS``, or longer if the folder cannot always be read.

        Raises:
            CheckpointError: another run owns the folder.
            ConfigError: the folder cannot be read or written, or one of its records is damaged.
        """
        try:
            while not self._try():
                pass
            self._beat()
            self._remove_leftovers()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Checkpoints cannot be kept in {self.uri}: {error}. Expected a folder that this process can "
                "read and write."
            ) from error

    def _remove_leftovers(self) -> None:
        """Remove the files of drivers that were killed, also unfinished ones.

        A driver that is about to create such a file looks at the folder again; see ``Folder.create``.
        """
        names = self.folder.names()  # before the chain, so that no later run's file is among them
        kept = {_beat_of(self.me), *map(_next_of, self._chain())}
        for name in names:
            if LEFTOVER.fullmatch(name) and name not in kept:
                self.folder.discard(name)

    def _try(self) -> bool:
        """Try once to become the owner; return False if other runs changed the chain in the meantime."""
        chain = self._chain()
        target = NAME
        if chain:
            self._require_stale(chain[-1])
            target = _next_of(chain[-1])
        self.me = Owner.here()  # a new id, because others may have seen the id of the last attempt
        _held.add(self.me.id)
        if not self.folder.create(target, self.me.record()):
            _held.discard(self.me.id)
            return False
        if self.folder.settle_seconds:
            self._sleep(self.folder.settle_seconds)
        found = self._chain()
        if self.me in found:
            self._root = found[0].id
            self.check()
            return True
        if target != NAME:  # the chain that this run was about to continue has ended in the meantime
            self.folder.discard(target)
        _held.discard(self.me.id)
        return False

    def _chain(self) -> list[Owner]:
        """Return the owners, from the first to the present one; empty if the folder is free.

        Raises:
            OSError: a file in the folder cannot be read.
            ValueError: a file is not a record, or repeats the record of an earlier run of the chain.
        """
        for _ in range(LOOKS):
            names, chain, name = self.folder.names(), list[Owner](), NAME
            while name in names and (owner := self._read(name)):
                if owner in chain:
                    raise _no_lease(name)
                chain.append(owner)
                name = _next_of(owner)
            if name not in names:
                return chain
            self._sleep(POLL_SECONDS)  # the file was removed after it was listed
        raise OSError(f"its file {name} cannot be read")

    def _read(self, name: str) -> Owner | None:
        """Return the run whose record is in a file; None if there is no such file.

        Raises:
            ValueError: the file is not a record.
        """
        since = self._clock()
        while (data := self.folder.read(name)) == b"" and self._clock() - since < SILENCE_SECONDS:
            self._sleep(POLL_SECONDS)  # still being written, on a file system without hard links
        try:
            return None if data is None else Owner.of(data)
        except ValueError as error:
            raise _no_lease(name) from error

    def _require_stale(self, owner: Owner) -> None:
        """Wait until a run has ended, is no longer the owner, or has been silent for ``SILENCE_SECONDS``.

        Raises:
            CheckpointError: the run is alive.
            OSError: the folder cannot be read.
            ValueError: a file in the folder is not a record.
        """
        if owner.id in _held and owner.process == os.getpid():
            raise CheckpointError(self._refusal(owner, "another fit of this process"))
        name, silent, unknown, before = _beat_of(owner), 0.0, 0.0, self._clock()
        seen: list[object] = []
        while silent < SILENCE_SECONDS:
            if owner.is_gone():
                self._say_takeover(owner, "whose run has ended")
                return
            if not seen:
                logger.info("Waiting up to %.0f s for a heartbeat of %s.", SILENCE_SECONDS, owner)
            now = self._clock()
            # If this process was suspended, its clock kept running, but it did not watch.
            passed, before = min(now - before, 2 * POLL_SECONDS), now
            try:
                stamp = self.folder.stamp(name)
                if seen and seen[0] != stamp:
                    self._require_over(owner)
                    return
                seen, silent, unknown = [stamp], silent + passed, 0.0
            except OSError:
                silent, unknown = 0.0, unknown + passed
                if unknown >= SILENCE_SECONDS:
                    raise
            self._sleep(POLL_SECONDS)
        self._say_takeover(owner, f"which has been silent for {SILENCE_SECONDS:.0f} s")

    def _say_takeover(self, owner: Owner, why: str) -> None:
        logger.warning("The run takes over the checkpoint folder %s from %s, %s.", self.uri, owner, why)

    def _require_over(self, owner: Owner) -> None:
        """Raise if a run whose heartbeat has just changed is still the owner.

        Raises:
            CheckpointError: the run is the owner.
        """
        if self._chain()[-1:] == [owner]:
            raise CheckpointError(
                self._refusal(owner, f"{owner}, which wrote a heartbeat less than {BEAT_SECONDS:.0f} s ago")
            )

    def _refusal(self, owner: Owner, who: str) -> str:
        return (
            f"Another run writes checkpoints to {self.uri}: {who}. Wait until that run ends, stop it, or "
            "use another folder."
        )

    # Keeping.

    def start(self) -> None:
        """Write heartbeats in a thread until ``release``, or until the lease is lost."""
        self._thread = threading.Thread(target=self._beat_on, name="sparkdl-lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise if the lease is known to be lost; this does not read the folder.

        Raises:
            CheckpointError: the lease is lost.
        """
        if self._problem is not None:
            raise CheckpointError(self._problem)

    def check(self) -> None:
        """Read the folder, and raise if this run does not own it.

        Raises:
            CheckpointError: this run does not own the folder, or this process is a fork of its driver.
            OSError: the folder cannot be read.
            ValueError: a file is not the record of a run.
        """
        self.require()
        if os.getpid() != self.me.process:
            raise CheckpointError(
                f"The lease of {self.uri} belongs to {self.me}, and this process is a fork of it. Write "
                "checkpoints from the parent process."
            )
        # Look for a successor first. If there was none, and ``lease`` is unchanged, this run was the owner.
        taken = _next_of(self.me) in self.folder.names()
        root = self.folder.read(NAME)
        if not taken and root is not None and Owner.of(root).id == self._root:
            return
        how = 'its file "lease" was removed'
        if taken:
            by = self.folder.read(_next_of(self.me))
            how = (
                f"{Owner.of(by) if by else 'another run'} took it over after {SILENCE_SECONDS:.0f} s "
                "without a heartbeat"
            )
        elif root is not None:
            how = f"{Owner.of(root)} owns it now"
        self._problem = (
            f"This run ({self.me}) lost the checkpoint folder {self.uri}: {how}. The run ends and writes no "
            "more checkpoints."
        )
        self.require()

    def _beat(self) -> None:
        self.check()
        self._beats += 1
        self.folder.rewrite(_beat_of(self.me), b"%020d\n" % self._beats)

    def _beat_on(self) -> None:
        warned = False
        while not self._ends.wait(BEAT_SECONDS):
            try:
                self._beat()
            except CheckpointError as error:
                logger.warning("%s", error)  # the run may end for another reason before it checks the lease
                return
            except Exception as error:  # noqa: BLE001 - a local or Hadoop file system may raise anything
                if not warned:
                    logger.warning(
                        "No heartbeat could be written to %s; training continues. After %.0f s another run "
                        "may take the folder over: %s",
                        self.uri,
                        SILENCE_SECONDS,
                        error,
                    )
                warned = True

    # Releasing.

    def release(self) -> None:
        """End the heartbeats and free the folder for the next run; do nothing without a lease.

        If an interrupted call ends before the file system responds, a thread frees the folder later. Until
        then this process holds the lease.
        """
        if os.getpid() != self.me.process:
            return  # this is a fork; its parent keeps the lease
        self._ends.set()
        interrupts.finish(
            self._release,
            f"The lease of {self.uri} could not be removed; the next run may have to wait "
            f"{SILENCE_SECONDS:.0f} s",
        )

    def _release(self) -> None:
        try:
            if self._thread is not None:
                self._thread.join(JOIN_SECONDS)
            if self.me.id in _held:
                self._remove()
        finally:
            _held.discard(self.me.id)

    def _remove(self) -> None:
        chain = self._chain()
        if chain and chain[-1] == self.me:
            self.folder.discard(NAME)  # first, because the other files mean nothing without it
            for owner in chain[:-1]:
                self.folder.discard(_next_of(owner))
        self.folder.discard(_beat_of(self.me))


def _no_lease(name: str) -> ValueError:
    return ValueError(f"its file {name} is not a lease of sparkdl; remove it if no other run uses the folder")


def _next_of(owner: Owner) -> str:
    return f"{NAME}-{owner.id}.next"


def _beat_of(owner: Owner) -> str:
    return f"{NAME}-{owner.id}.beat"


def lease_of(uri: str, context: Context) -> Lease:
    """Return the lease of a checkpoint folder, not yet acquired; create the folder if it does not exist.

    Raises:
        ConfigError: the path is not a folder, or the folder cannot be created.
    """
    try:
        return Lease(uri, open_folder(uri, context=context))
    except OSError as error:
        raise ConfigError(f"Checkpoints cannot be kept in {uri}: {error}.") from error
