"""A relay in front of an endpoint that drops or delays requests and answers, and repeats requests."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: closing sends a reset
END = b"\r\n\r\n"


class Relay:
    """A relay for connections to its port, with faults; it runs for the life of a ``with`` block.

    Args:
        port: the endpoint's port.
        seed: the seed of the faults.
        share: the fraction of requests lost, of answers lost, and of requests repeated.
        host: the address of the endpoint and of the relay.
        delay: the longest delay in seconds.
        removed: the header that the relay removes from requests, as a proxy may.

    Attributes:
        port: the relay's own port.
        done: the number of lost "requests", lost "answers" and "repeated" requests.
    """

    def __init__(self, port, seed, share=0.1, *, host="127.0.0.1", delay=0.0, removed=None):
        self.upstream, self.share, self.random = (host, port), share, random.Random(seed)
        self.delay, self.removed = delay, removed and f"\r\n{removed}:".encode()
        self.done, self.lock, self.threads, self.sockets = Counter(), threading.Lock(), [], []

    def __enter__(self):
        self.listener = socket.create_server((self.upstream[0], 0))
        self.port = self.listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *exception):
        with self.lock:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            for each in self.sockets:
                end(each)
        for thread in self.threads:
            thread.join(30)

    def cut(self):
        """Cut the connections that are open now."""
        with self.lock:
            for each in self.sockets:
                end(each)

    def _start(self, target, *arguments):
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                try:
                    server = socket.create_connection(self.upstream)
                except OSError:  # the endpoint has ended
                    client.close()
                    raise
                with self.lock:
                    self.sockets += [client, server]
                said = Said()
                self._start(self._hand_on, client, server, "requests", said)
                self._start(self._hand_on, server, client, "answers", said)

    def _hand_on(self, source, target, kind, said):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.removed and kind == "requests":
                    data = data.replace(self.removed, b"\r\nX".ljust(len(self.removed) - 1, b"-") + b":")
                if self.delay:
                    time.sleep(self.delay * self._below(1000) / 1000)
                lost, twice = self._falls(kind), kind == "answers" and self._falls("repeated")
                if twice:
                    self._start(self._repeat, said.request())
                said.add(data) if kind == "requests" else said.answered()
                if lost:
                    target.sendall(data[: self._below(len(data))])
                    break
                target.sendall(data)
        for each in (source, target):
            if self._below(2):
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end(each)

    def _repeat(self, request):
        """Repeat a request, after a short delay, on a separate connection, and ignore its answer."""
        time.sleep(self._below(300) / 1000)
        with contextlib.suppress(OSError), socket.create_connection(self.upstream) as again:
            again.settimeout(1)
            again.sendall(request)
            again.recv(1 << 16)

    def _falls(self, kind):
        with self.lock:
            falls = self.random.random() < self.share
            self.done[kind] += falls
            return falls

    def _below(self, number):
        with self.lock:
            return self.random.randrange(number)


class Said:
    """The data from a client on a connection since the last answer."""

    def __init__(self):
        self.head, self.last = b"", b""

    def add(self, data):
        """Add received data; the head of a stream serves all its updates."""
        self.last += data
        if not self.head and END in self.last:
            self.head = self.last[: self.last.index(END) + len(END)]

    def answered(self):
        """Start the next request."""
        self.last = b""

    def request(self):
        """Return the complete request."""
        return self.last if self.last.startswith(b"POST") else self.head + self.last


def end(connection):
    """Close a connection and wake the threads waiting for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
