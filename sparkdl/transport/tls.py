"""TLS 1.3 between workers and the endpoint, with a certificate made for one run.

Workers receive the certificate with the endpoint's address, and trust no other. A handshake takes the
endpoint's processor for some tenths of a millisecond. Workers therefore send a greeting in the clear with
their first message, as the name of the server; it is a hash of the run's token. The connection combines
OpenSSL over memory buffers with plain socket calls, because ``ssl.SSLSocket`` rejects the flags that the
endpoint needs: MSG_PEEK with MSG_DONTWAIT to look at data without waiting, and MSG_WAITALL to read a whole
body at once.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import http.client
import importlib.util
import os
import secrets
import socket
import ssl
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from sparkdl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

RECORD = 17 << 10  # bytes; more than the largest TLS record
BLOCK = 1 << 18  # maximum bytes encrypted at once
HEADER = 5  # bytes before the content of a TLS record: its type, its version and its length
HANDSHAKE = 22  # type of the record with a client's first message
EARLY = 1 << 18  # maximum bytes that a client may send before its request
SOME = 1 << 16  # maximum bytes to read if it is unknown how many will come
EVER = datetime.datetime(2000, 1, 1), datetime.datetime(2100, 1, 1)  # clocks may differ
ENCRYPTED = (  # Spark's settings that encrypt the traffic between its processes
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
)


class Settings(Protocol):
    """An object with the application's settings."""

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting."""


def is_wanted(choice: bool | None, settings: Settings) -> bool:
    """Return True if an endpoint uses TLS.

    Args:
        choice: the user's choice; if None, ``spark.sparkdl.tls`` decides; if that is not set
            either, TLS is used if Spark encrypts its own traffic.
        settings: the application's settings.

    Raises:
        ConfigError: ``spark.sparkdl.tls`` is neither true nor false.
    """
    if choice is not None:
        return choice
    value = settings.setting("spark.sparkdl.tls").lower()
    if value not in ("", "true", "false"):
        raise ConfigError(f'spark.sparkdl.tls should be "true" or "false"; got {value!r}.')
    return value == "true" or not value and any(settings.setting(name) == "true" for name in ENCRYPTED)


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """Return an endpoint's context with a new key, and the certificate (DER) for its workers.

    Raises:
        ConfigError: the package "cryptography", which only endpoints and shards need, is not installed.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "An endpoint with TLS needs the package cryptography, which is not installed on "
            f'{socket.gethostname()}. Run pip install "sparkdl-keras[tls]" there, or set tls=False.'
        )
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sparkdl")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(EVER[0])
        .not_valid_after(EVER[1])
        .sign(key, hashes.SHA256())
    )
    password = secrets.token_bytes(32).hex()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(password.encode())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    # ssl loads keys from files; this one has mode 0600.
    descriptor, path = tempfile.mkstemp(prefix="sparkdl-", suffix=".pem")
    try:
        with open(descriptor, "wb") as file:
            file.write(private + certificate.public_bytes(pem))
        context.load_cert_chain(path, password=password)
    finally:
        os.unlink(path)
    return context, certificate.public_bytes(serialization.Encoding.DER)


def client_context(certificate: bytes) -> ssl.SSLContext:
    """Return a worker's context, which trusts only this certificate (DER), whatever its name is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context


def greeting_of(token: str) -> str:
    """Return the greeting of a run's workers: a hash, which does not reveal the token."""
    return hashlib.sha256(b"greeting " + token.encode()).hexdigest()[:32]


class TlsError(ConnectionResetError):
    """The peer cannot be authenticated, or its data is not valid TLS."""


class NoGreetingError(Exception):
    """A client's first message does not have the expected greeting."""


class Socket(socket.socket):
    """A connection with TLS, for one thread at a time.

    Args:
        sock: the connection, which this object takes over.
        context: an endpoint's or a worker's context.
        server: whether this is the endpoint's side, which does the handshake at its first read.
        greeting: the greeting that a worker sends, and that an endpoint expects; empty: none.

    Attributes:
        known: whether the expected greeting has arrived.

    Raises:
        NoGreetingError: from ``recv`` on the endpoint's side, if the first message has another greeting.
            After ``forgive`` it may have any.
        TlsError: from every method that receives or sends, if the peer does not speak TLS or has a different
            key.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, greeting: str = ""
    ) -> None:
        timeout = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if server else greeting or None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server, server_hostname=name)
        self._expected, self._first = greeting.encode() if server else b"", b""
        self.known = False
        self._early = 0  # bytes since the last request
        self._peeked = bytearray()
        self._greeted = False

    def forgive(self) -> bool:
        """Expect no greeting any longer; return True if one was expected and had not arrived."""
        expected, self._expected = self._expected, b""
        return bool(expected)

    def _check_greeting(self, flags: int) -> None:
        """Receive the client's first message up to its greeting."""
        while self._expected:
            if self._expected in self._first:
                self.known = self.forgive()
                return
            size = HEADER + int.from_bytes(self._first[3:HEADER], "big")
            if self._first[:1] not in (b"", bytes([HANDSHAKE])):
                raise self._broken("the client does not begin with a handshake")
            if len(self._first) >= max(size, HEADER + 1):
                raise NoGreetingError("TLS: the client is not a worker of this run")
            if not self._receive(0, flags):
                raise self._broken("the connection ended")

    def greet(self, flags: int = 0) -> None:
        """Do the handshake: agree on keys; a worker also checks that the peer has the certificate's key."""
        self._check_greeting(flags)
        while not self._greeted:
            try:
                self._tls.do_handshake()
                self._greeted = True
            except ssl.SSLWantReadError:
                if not self._receive(0, flags):
                    raise self._broken("the connection ended") from None
            except ssl.SSLError as error:
                raise self._broken(error) from error
        self._flush(flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return 1 to ``size`` bytes, or none at the end of the connection.

        MSG_PEEK leaves them unread, MSG_DONTWAIT does not wait.
        """
        if not flags & socket.MSG_PEEK:
            buffer = bytearray(size)
            return bytes(buffer[: self.recv_into(buffer, size, flags)])
        try:
            while len(self._peeked) < size:
                more = bytearray(size - len(self._peeked))
                count = self._read(memoryview(more), flags & ~socket.MSG_PEEK)
                if not count:
                    break
                self._peeked += more[:count]
                flags |= socket.MSG_DONTWAIT
        except BlockingIOError:
            if not self._peeked:
                raise
        return bytes(self._peeked[:size])

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Read into a buffer, and with MSG_WAITALL fill it; return the number of bytes."""
        self._early = 0
        view = memoryview(buffer).cast("B")
        view = view[: nbytes or len(view)]
        count = min(len(view), len(self._peeked))
        view[:count] = self._peeked[:count]
        del self._peeked[:count]
        if count < len(view) and (not count or flags & socket.MSG_WAITALL):
            count += self._read(view[count:], flags)
        return count

    def sendmsg(self, buffers: Iterable[ReadableBuffer], *unused: object) -> int:
        """Send the first bytes of some buffers, as ``socket.sendmsg`` does; return their number."""
        parts, size = [], 0
        for buffer in buffers:
            parts.append(memoryview(buffer).cast("B")[: BLOCK - size])
            size += len(parts[-1])
            if size == BLOCK:
                break
        left = memoryview(b"".join(parts))
        try:
            while left:
                left = left[self._tls.write(left) :]
        except ssl.SSLError as error:
            raise self._broken(error) from error
        self._flush(0)
        return size

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send the first bytes of ``data``; return their number."""
        return self.sendmsg([data])

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        """Send all bytes."""
        left = memoryview(data).cast("B")
        while left:
            left = left[self.sendmsg([left]) :]

    def _read(self, view: memoryview, flags: int) -> int:
        """Decrypt received data into a buffer, and with MSG_WAITALL fill it; return the number of bytes.

        With MSG_DONTWAIT, receive only once: TLS has messages without data, and a client may send many.
        """
        self.greet(flags)
        count = received = 0
        while count < len(view):
            try:
                read = int(self._tls.read(len(view) - count, view[count:]))
            except ssl.SSLWantReadError:
                if count and not flags & socket.MSG_WAITALL:
                    break
                if received and flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError from None
                if not self._receive(len(view) - count, flags):
                    break
                received += 1
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            except ssl.SSLError as error:
                raise self._broken(error) from error
            count += read
            if not read:
                break
        return count

    def _receive(self, wanted: int, flags: int) -> bool:
        """Send TLS's own messages, then receive more data; return False at the end of the connection."""
        self._flush(flags)
        certain = min(wanted, BLOCK) - RECORD  # bytes still to arrive: one record may be partly here
        if flags & socket.MSG_WAITALL and certain > SOME:
            data = super().recv(certain, flags)
        else:
            data = super().recv(SOME, flags & ~socket.MSG_WAITALL)
        if not data:
            self._incoming.write_eof()
            return False
        self._incoming.write(data)
        if flags & socket.MSG_DONTWAIT:
            self._early += len(data)
            if self._early > EARLY:
                raise self._broken("too much data without a request")
        if self._expected:
            self._first += data
        return True

    def _flush(self, flags: int) -> None:
        """Send encrypted data. With MSG_DONTWAIT it is TLS's own messages, which fit in the send buffer."""
        data = self._outgoing.read()
        if not data:
            return
        if not flags & socket.MSG_DONTWAIT:
            super().sendall(data)
        elif super().send(data, socket.MSG_DONTWAIT) < len(data):
            raise TlsError(errno.ECONNRESET, "TLS: the peer does not read the handshake")

    def _broken(self, why: object) -> TlsError:
        """Notify the peer, if it is still there; return the error."""
        with suppress(OSError):
            self._flush(socket.MSG_DONTWAIT)
        return TlsError(errno.ECONNRESET, f"TLS: {why}")


class HTTPConnection(http.client.HTTPConnection):
    """A worker's connection with TLS.

    Args:
        host: the endpoint's host.
        port: the endpoint's port.
        certificate: the endpoint's certificate (DER).
        timeout: maximum seconds without a byte.
        greeting: the greeting of the run's workers.
    """

    def __init__(self, host: str, port: int, certificate: bytes, timeout: float, greeting: str) -> None:
        super().__init__(host, port, timeout=timeout)
        self._context, self._greeting = client_context(certificate), greeting

    def connect(self) -> None:
        """Connect, and check that the peer is the run's endpoint."""
        super().connect()
        self.sock = sock = Socket(self.sock, self._context, server=False, greeting=self._greeting)
        sock.greet()


def connection_to(
    host: str, port: int, certificate: bytes, timeout: float, token: str
) -> http.client.HTTPConnection:
    """Return an unopened connection to an endpoint; without a certificate it does not use TLS."""
    if certificate:
        return HTTPConnection(host, port, certificate, timeout, greeting_of(token))
    return http.client.HTTPConnection(host, port, timeout=timeout)
