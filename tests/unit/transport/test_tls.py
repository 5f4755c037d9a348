"""TLS between workers and endpoint: no other party can impersonate the endpoint or read the traffic."""

import importlib.util
import os
import shutil
import socket
import ssl
import stat
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from coordinators import coordinator_of, state_of, together
from hypothesis import given
from hypothesis import strategies as st
from served import served

from sparkdl import Network
from sparkdl.errors import ConfigError, TransportError
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import connections, tls
from sparkdl.transport.client import Connection
from sparkdl.transport.exchange import Endpoint

RUN = b"r" * 16
TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def identity():
    return tls.server_context()


@pytest.fixture
def coordinator():
    return coordinator_of("asynchronous", workers=1)


@pytest.fixture
def port(coordinator, identity):
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 1, identity[0]) as port:
        yield port


@contextmanager
def pair(context, certificate):
    """Yield both ends of a connection after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here, there = socket.create_connection(listener.getsockname(), timeout=20), listener.accept()[0]
    there.settimeout(None)  # as at the endpoint: with a timeout, Python waits in any case
    with (
        tls.Socket(here, tls.client_context(certificate), server=False) as worker,
        tls.Socket(there, context, server=True) as endpoint,
    ):
        together(worker.greet, endpoint.greet)
        yield worker, endpoint


def ping(port, certificate):
    """Return the status of a ping."""
    with closing(tls.connection_to("127.0.0.1", port, certificate, 20, "secret")) as connection:
        connection.request("GET", "/v1/ping", headers=TOKEN)
        return connection.getresponse().status


def test_who_has_the_certificate_is_answered(port, identity):
    """A client with the certificate is answered, whatever the host's name and clock."""
    assert 204 == ping(port, identity[1])


def test_another_certificate_is_refused(port):
    """A certificate of another run is refused before anything is sent, above all the token."""
    with pytest.raises(ConnectionResetError, match="certificate verify failed"):
        ping(port, tls.server_context()[1])


def test_who_answers_in_its_place_is_refused(identity):
    """A server with another key is refused and gets no byte of a request."""
    context, _ = tls.server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            with tls.Socket(listener.accept()[0], context, server=True) as sock:
                sock.greet()
                return sock.recv(1)

        def ask():
            return ping(listener.getsockname()[1], identity[1])

        outcomes = together(pretend, ask)

    assert all(isinstance(outcome, ConnectionResetError) for outcome in outcomes), outcomes


def test_an_older_version_is_refused(port, identity):
    """Versions before TLS 1.3 are refused."""
    context = tls.client_context(identity[1])
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as sock,
        pytest.raises(ssl.SSLError),
        context.wrap_socket(sock),
    ):
        pass


def test_the_librarys_own_client_is_understood(port, identity):
    """The client of Python's ssl module is understood, and needs a token too."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as sock,
        tls.client_context(identity[1]).wrap_socket(sock) as wrapped,
    ):
        wrapped.sendall(b"GET /v1/ping HTTP/1.1\r\nHost: h\r\n\r\n")
        assert b"HTTP/1.1 401" == wrapped.recv(12)


def test_a_greeting_may_come_in_parts(port, identity):
    """A worker whose first message arrives byte by byte is answered."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = tls.greeting_of("secret")
    worker = tls.client_context(identity[1]).wrap_bio(incoming, outgoing, server_hostname=name)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with pytest.raises(ssl.SSLWantReadError):
            worker.do_handshake()
        for byte in outgoing.read():
            sock.sendall(bytes([byte]))
        incoming.write(sock.recv(1 << 16))
        worker.do_handshake()


def test_handshakes_without_the_greeting_are_few(port, identity, monkeypatch):
    """Clients without the workers' greeting get few handshakes per second; workers do not wait for them."""
    monkeypatch.setattr(connections, "REFUSALS", 2.0)
    context = tls.client_context(identity[1])
    with ExitStack() as stack:
        begin, strange = time.monotonic(), []
        for name in [None, "localhost", tls.greeting_of("another")] * 20:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            outgoing = ssl.MemoryBIO()
            hello = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
            with pytest.raises(ssl.SSLWantReadError):
                hello.do_handshake()
            sock.sendall(outgoing.read())
            sock.setblocking(False)
            strange.append(sock)
        time.sleep(0.5)
        assert 204 == ping(port, identity[1])
        answered = sum(map(has_data, strange))

        assert 0 < answered <= 2.0 * (1 + time.monotonic() - begin) + 1


@pytest.mark.parametrize("first", [b"\x15\x03\x03\x00\x02\x01\x5a", b"\x14\x03\x03\x00\x01\x01", b"GET / "])
def test_nothing_may_come_before_the_greeting(port, identity, first):
    """A connection that begins with a record of another type, or with no TLS, is closed."""
    outgoing = ssl.MemoryBIO()
    hello = tls.client_context(identity[1]).wrap_bio(ssl.MemoryBIO(), outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(first + outgoing.read())
        with suppress(ConnectionResetError):  # the other way in which a connection may end
            assert b"" == sock.recv(1)


def test_messages_without_data_hold_up_nobody_and_are_limited(identity):
    """A look for data receives once, however many TLS messages without data arrive; too many end it."""
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT

    def look(times):
        for _ in range(times):
            with suppress(BlockingIOError):
                endpoint.recv(10, flags)

    with pair(*identity) as (worker, endpoint):
        endpoint._tls = mock.Mock(read=mock.Mock(side_effect=ssl.SSLWantReadError))  # as if they had none
        socket.socket.sendall(worker, bytes(2 * tls.SOME))
        look(1)
        assert 2 == endpoint._tls.read.call_count
        socket.socket.sendall(worker, bytes(tls.EARLY - tls.SOME))
        with pytest.raises(tls.TlsError, match="too much data without a request"):
            look(100)


def has_data(sock):
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_who_does_not_encrypt_gets_no_answer(port, coordinator, identity, monkeypatch):
    """A worker and an endpoint of which only one uses TLS get no answer, and the error says so."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    before = state_of(coordinator)
    plain = Connection(Endpoint("127.0.0.1", port, "secret", RUN), retries=0)
    with closing(plain), pytest.raises(TransportError):
        plain.call("/v1/join", worker=0, generation=1, attempt=1, host="h", pid=1)

    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 1) as open_port:
        encrypted = Connection(Endpoint("127.0.0.1", open_port, "secret", RUN, identity[1]), retries=0)
        with closing(encrypted), pytest.raises(TransportError, match="TLS: "):
            encrypted.call("/v1/join", worker=0, generation=1, attempt=1, host="h", pid=1)

    assert before == state_of(coordinator)


def test_a_relay_sees_neither_token_nor_weights(identity, coordinator):
    """A relay that reads the traffic sees neither the token nor HTTP."""
    seen = bytearray()
    with (
        serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 1, identity[0]) as port,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):

        def relay(source, sink):
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        def ask():
            return ping(listener.getsockname()[1], identity[1])

        def carry():
            with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
                back = threading.Thread(target=relay, args=(far, near))
                back.start()
                relay(near, far)
                back.join()

        assert 204 == together(ask, carry)[0]

    assert len(seen) > 500
    assert not any(word in seen for word in (b"secret", b"ping", b"Bearer", b"HTTP"))


def test_the_key_is_on_no_disk_when_the_endpoint_has_it(tmp_path, monkeypatch):
    """The key is on disk only while OpenSSL reads it: encrypted, in a private file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    load = ssl.SSLContext.load_cert_chain

    def watched(context, path, **more):
        data = Path(path).read_bytes()
        seen.append((b"ENCRYPTED PRIVATE KEY" in data, stat.S_IMODE(os.stat(path).st_mode)))
        return load(context, path, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    tls.server_context()

    assert [(True, 0o600)] == seen
    assert [] == list(tmp_path.iterdir())


def test_each_run_has_a_key_of_its_own():
    """Each run has a new key."""
    assert tls.server_context()[1] != tls.server_context()[1]


@given(st.lists(st.integers(0, 3 * tls.BLOCK), min_size=1, max_size=4), st.booleans(), st.data())
def test_bytes_come_as_they_were_sent(identity, lengths, whole, data):
    """Bytes arrive as sent, in pieces of any size, read whole or in parts, after a peek or not."""
    parts = [np.random.default_rng(number).bytes(length) for number, length in enumerate(lengths)]
    sent = b"".join(parts)
    ahead = data.draw(st.integers(0, min(len(sent), tls.RECORD)))
    with pair(*identity) as (worker, endpoint):

        def read():
            peeked = b""
            while len(peeked) < ahead:
                peeked = endpoint.recv(ahead, socket.MSG_PEEK)
            got = bytearray(len(sent))
            place, view = 0, memoryview(got)
            while place < len(sent):
                place += endpoint.recv_into(view[place:], 0, socket.MSG_WAITALL if whole else 0)
                assert place == len(sent) or not whole
            return peeked, bytes(got)

        def write():
            left = [memoryview(part) for part in parts]
            while left:
                count = worker.sendmsg(left)
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]

        (peeked, got), _ = together(read, write)

    assert (sent[:ahead], sent) == (peeked, got)


def test_nothing_there_is_not_waited_for(identity):
    """Reading without data does not block: the endpoint watches many connections in one thread."""
    with pair(*identity) as (worker, endpoint):
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        with pytest.raises(BlockingIOError):
            endpoint.recv(10, flags)
        worker.sendall(b"GET")
        assert b"GET" == endpoint.recv(10, socket.MSG_PEEK)[:3]
        assert b"GET" == endpoint.recv(10, flags) == endpoint.recv(10)
        worker.close()
        assert b"" == endpoint.recv(10)


def test_an_end_in_the_middle_is_one(identity):
    """A connection that is cut returns the received bytes and then ends."""
    with pair(*identity) as (worker, endpoint):
        worker.sendall(b"half of it")
        worker.close()
        buffer = bytearray(100)
        assert 10 == endpoint.recv_into(buffer, 0, socket.MSG_WAITALL)


def test_a_changed_byte_ends_the_connection(identity):
    """A changed byte ends the connection."""
    with pair(*identity) as (worker, endpoint):
        socket.socket.send(worker, b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ConnectionResetError, match="TLS: "):
            endpoint.recv(10)


class Settings:
    """The settings of an application."""

    def __init__(self, **settings):
        self.settings = {name.replace("_", "."): value for name, value in settings.items()}

    def setting(self, name, default=""):
        return self.settings.get(name, default)


@pytest.mark.parametrize(
    ("asked", "settings", "expected"),
    [
        (None, {}, False),
        (True, {}, True),
        (False, {"spark_ssl_enabled": "true"}, False),
        (None, {"spark_ssl_enabled": "true"}, True),
        (None, {"spark_ssl_rpc_enabled": "true"}, True),
        (None, {"spark_network_crypto_enabled": "true"}, True),
        (None, {"spark_network_crypto_enabled": "false"}, False),
        (None, {"spark_authenticate_enableSaslEncryption": "true"}, True),
        (None, {"spark_ssl_enabled": "true", "spark_sparkdl_tls": "false"}, False),
        (None, {"spark_sparkdl_tls": "True"}, True),
    ],
)
def test_tls_is_what_was_asked_for_or_what_spark_does(asked, settings, expected):
    """TLS follows the argument, else the application's setting, else Spark's own encryption."""
    assert expected == tls.is_wanted(asked, Settings(**settings))


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
@pytest.mark.parametrize("day", ["+1 day", "-1 day"])
def test_a_driver_on_another_day_is_trusted(day):
    """A worker accepts the certificate of an endpoint whose clock is a day ahead or behind."""
    with served(encrypted=True, before=["faketime", "-f", day]) as endpoint:
        to = endpoint.host, endpoint.port, endpoint.certificate, 20, endpoint.token
        with closing(tls.connection_to(*to)) as worker:
            worker.request("GET", "/v1/ping", headers=TOKEN)
            with worker.getresponse() as answer:
                there = parsedate_to_datetime(answer.headers["Date"]).timestamp()

        assert 204 == answer.status
        assert 80_000 < abs(time.time() - there)


def test_what_is_no_answer_is_refused():
    """An invalid value of tls is refused by name, on the driver."""
    with pytest.raises(ConfigError, match='spark.sparkdl.tls should be "true" or "false"; got \'maybe\''):
        tls.is_wanted(None, Settings(spark_sparkdl_tls="maybe"))
    with pytest.raises(ConfigError, match="tls should be True or False; got 'yes'"):
        Network(tls="yes")


def test_a_missing_library_is_named(monkeypatch):
    """The error names the package to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "sparkdl-keras\[tls\]"'):
        tls.server_context()
