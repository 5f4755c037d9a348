"""Fault injection below files, sockets, memory maps and arrays: one call of the package fails.

Python tells a profile function of every call of a C function before the call. An exception of the profile
function takes the place of the call, so a call can fail in any thread that starts meanwhile. Calls are named
by *sites*: the nearest function of the package, or of its HTTP server, that led to the call, and the called
function.
"""

import errno
import io
import mmap
import os
import signal
import socket
import ssl
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType

import cheroot
import numpy as np

import sparkdl
from sparkdl.server import state

PLACES = {str(Path(module.__file__).parent) + os.sep: module.__name__ for module in (sparkdl, cheroot)}
OPENS = {"posix.open", "io.open", "posix.scandir", "posix.listdir", "socket._accept", "mmap.new"}
WRITES = {
    "file.write",
    "file.flush",
    "file.seek",
    "file.truncate",
    "posix.fsync",
    "posix.link",
    "posix.mkdir",
    "posix.posix_fallocate",
    "posix.pwrite",
    "posix.rename",
    "posix.replace",
    "posix.write",
    "io.open",
    "posix.open",
    "mmap.new",
}
READS = {
    "file.read",
    "file.readinto",
    "file.readall",
    "file.readline",
    "io.open",
    "mmap.new",
    "posix.fstat",
    "posix.listdir",
    "posix.open",
    "posix.read",
    "posix.scandir",
    "posix.stat",
    "posix.utime",
}
REMOVES = "posix.remove", "posix.rmdir", "posix.unlink"  # if one fails, a file may stay
SOCKETS = {
    "socket._accept",
    "socket.bind",
    "socket.connect",
    "socket.listen",
    "socket.read",
    "socket.recv",
    "socket.recv_into",
    "socket.send",
    "socket.sendall",
    "socket.sendmsg",
    "socket.setsockopt",
    "socket.do_handshake",
    "socket.write",
}
ALLOCATES = {"array.", "bytes.join", "file.read", "json.", "mmap.new", "numpy.", "pickle.", "socket.read"}


def _os_error(number):
    return lambda: OSError(number, os.strerror(number))


# The exception, or None for an interrupt of the process, and the calls that it may hit.
FAILURES = {
    "ENOSPC": (_os_error(errno.ENOSPC), WRITES),
    "EIO": (_os_error(errno.EIO), WRITES | READS | {*REMOVES}),
    "ETIMEDOUT": (_os_error(errno.ETIMEDOUT), WRITES | READS | {*REMOVES}),  # a network file system is silent
    "EMFILE": (_os_error(errno.EMFILE), OPENS),
    "ECONNRESET": (_os_error(errno.ECONNRESET), SOCKETS),
    "MemoryError": (lambda: MemoryError("Unable to allocate memory"), ALLOCATES),
    "SIGINT": (None, WRITES | READS | {*REMOVES} | SOCKETS | ALLOCATES),
}


_MMAP = mmap.mmap


class _Map(_MMAP):
    """A map whose constructor is a Python function, so that the profile function sees its call."""

    def __new__(cls, *arguments, **options):
        return super().__new__(cls, *arguments, **options)


def name_of(function):
    """Return a C function's name in this module's terms, such as "posix.open" or "socket.recv"."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if isinstance(owner, ModuleType):
        return f"{function.__module__ or owner.__name__}.{name}".removeprefix("_")
    if isinstance(owner, type) and issubclass(owner, _MMAP):
        return "mmap.new"
    if isinstance(owner, socket.socket | ssl.SSLObject) or type(owner).__module__ in ("_ssl", "_socket"):
        return f"socket.{name}"
    if isinstance(owner, io.IOBase):
        return f"{'socket' if isinstance(getattr(owner, 'raw', None), socket.SocketIO) else 'file'}.{name}"
    if isinstance(owner, np.ndarray):
        return f"array.{name}"
    return f"{type(owner).__module__}.{name}".replace("builtins", type(owner).__name__).removeprefix("_")


def site_of(frame, called):
    """Return the site of a call that a frame makes; None if the package is not among its callers."""
    while frame is not None:
        code = frame.f_code
        if f"{os.sep}py4j{os.sep}" in code.co_filename:
            return None  # a conversation with the JVM
        for place, name in PLACES.items():
            if code.co_filename.startswith(place):
                return f"{name}/{code.co_filename[len(place) :]} {code.co_name}: {called}"
        frame = frame.f_back
    return None


def failures_at(site):
    """Return the kinds of failures that a call at this site may have."""
    called = site.rpartition(" ")[2]
    return [
        kind
        for kind, (_, names) in FAILURES.items()
        if called in names or any(name.endswith(".") and called.startswith(name) for name in names)
    ]


class Failing:
    """A watch over the calls of this process that makes one of them fail.

    Args:
        site: the site of the failing call; None: nothing fails.
        kind: one of FAILURES.
        number: the number of calls of the site that succeed first.
        log: a file to which sites are added as they are reached.

    Attributes:
        sites: the number of calls at each site.
        failed: True once the call has failed.
    """

    def __init__(self, site=None, kind=None, number=0, log=None):
        self.sites, self.failed = Counter(), False
        self._site, self._kind, self._number, self._log = site, kind, number, log
        self._lock = threading.RLock()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self):
        """Watch this thread and those that start from now on."""
        self._maps = mmap.mmap, state.mmap
        mmap.mmap = state.mmap = _Map
        self._watches = True
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def stop(self):
        """Stop watching."""
        self._watches = False
        sys.setprofile(None)
        threading.setprofile(None)
        mmap.mmap, state.mmap = self._maps

    def _see(self, frame, event, function):
        if event != "c_call" or not self._watches:
            return
        called = name_of(function)
        if self._site is not None and not self._site.endswith(f" {called}") or not failures_at(f" {called}"):
            return
        if (site := site_of(frame, called)) is None or not self._comes(site):
            return
        if (failure := FAILURES[self._kind][0]) is None:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise failure()

    def _comes(self, site):
        """Count a call; return True if it must fail. At most one call does."""
        with self._lock:
            if self._log is not None and Path(f"{self._log}.failed").exists():
                self._watches = False
                return False
            self.sites[site] += 1
            if self._log is not None and self.sites[site] == 1:
                with open(self._log, "a") as file:
                    file.write(f"{site}\n")
            if site != self._site or self.sites[site] != self._number + 1:
                return False
            self.failed = True
            if self._log is not None:
                Path(f"{self._log}.failed").touch()
            return True


_tasks = []  # the watches of this process, one of Spark's Python workers


def watch_task(context, site, kind, number, log):
    """Watch this process if it has worker 0's rows and no call has failed yet; end earlier watches."""
    while _tasks:
        _tasks.pop().stop()
    if context.partitionId() == 0 and not (site and Path(f"{log}.failed").exists()):
        _tasks.append(Failing(site, kind, number, log))
        _tasks[-1].start()
