"""The preflight check of an executor that it reaches the endpoint."""

import socket
import sys
from contextlib import contextmanager

import pytest
from coordinators import RUN, coordinator_of, together
from relay import Relay

from sparkdl.errors import StaleWorkerError, WorkerError
from sparkdl.process import memory
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.spark import preflight
from sparkdl.transport import connections, tls


@pytest.fixture(scope="module")
def identity():
    return tls.server_context()


@contextmanager
def endpoint(context=None):
    """Yield the port of an endpoint."""
    with serve(make_app(coordinator_of(workers=1), "secret", Traffic()), "127.0.0.1", 0, 1, context) as port:
        yield port


def check(port, certificate=b"", token="secret", **options):
    """Run the check of the endpoint as a task does."""
    expected = preflight.expectations(None, local=True)
    preflight.reach(expected, ("127.0.0.1", port, token, RUN, certificate), **options)


def test_an_endpoint_is_reached(identity):
    """The check passes with and without TLS."""
    with endpoint() as port:
        check(port)
    with endpoint(identity[0]) as port:
        check(port, identity[1])


def test_an_endpoint_of_another_run_is_named(identity):
    """An endpoint with another token or key is reported as another run's."""
    with endpoint() as port, pytest.raises(RuntimeError, match=f"401 from 127.0.0.1:{port}; another run"):
        check(port, token="other")
    with endpoint(identity[0]) as port, pytest.raises(RuntimeError, match="verify failed.*another program"):
        check(port, tls.server_context()[1])


def test_a_proxy_that_removes_the_token_is_named():
    """A proxy that removes the header with the token is named as a possible cause."""
    removing = {"share": 0.0, "removed": "Authorization"}
    error = pytest.raises(RuntimeError, match="a proxy removes the Authorization header")
    with endpoint() as port, Relay(port, 0, **removing) as proxy, error:
        check(proxy.port)


def test_an_endpoint_that_speaks_tls_or_does_not_against_expectation_is_named(identity, monkeypatch):
    """A mismatch of TLS between task and endpoint is reported; there is no fallback."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with endpoint() as port, pytest.raises(RuntimeError, match="TLS: .*another program uses that port"):
        check(port, identity[1])
    with endpoint(identity[0]) as port, pytest.raises(RuntimeError, match=f"127.0.0.1:{port}"):
        check(port)


@pytest.mark.parametrize("certificate", [False, True])
def test_another_program_is_named(identity, certificate):
    """A program that speaks neither HTTP nor TLS is reported as another program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            for _ in range(3):
                with listener.accept()[0] as sock:
                    sock.sendall(b"SSH-2.0-OpenSSH\r\n")
                    sock.recv(1 << 16)

        _, error = together(greet, lambda: check(listener.getsockname()[1], identity[1] * certificate))

    assert "another program uses that port" in str(error)


@pytest.mark.parametrize(
    ("local", "words"),
    [(True, f"set PYSPARK_PYTHON={sys.executable} before"), (False, "spark.pyspark.python, or --archives")],
)
def test_what_is_missing_is_named_with_what_to_do(local, words):
    """The remedy for a missing package differs if the executor shares the driver's machine."""
    expected = preflight.expectations("torch", local=local)
    expected["packages"] = {"no-such-package": "1.0"}

    with pytest.raises(RuntimeError, match=f"has no no-such-package; the driver has .* 1.0. .*{words}"):
        preflight.by_value(preflight.check)(expected)


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"python": "3.8"}, f"runs Python 3.{sys.version_info[1]} .*; the driver runs 3.8"),
        ({"packages": {"keras": "1.0"}}, r"has keras 3\..*; the driver has keras 1.0"),
        ({"packages": {"numpy": "0.1"}}, r"has numpy \d.*; the driver has numpy 0.1"),
        ({"backend": "no_such_backend"}, "has no no_such_backend, the Keras backend of the driver"),
        ({"sparkdl": "0.0"}, "has a different sparkdl, .*; the driver has 0.0 from .*--py-files"),
    ],
)
def test_what_differs_is_named(differs, words):
    """A version mismatch is reported with both versions."""
    with pytest.raises(RuntimeError, match=words):
        preflight.by_value(preflight.check)(preflight.expectations(None, local=True) | differs)


def test_nobody_there_is_named():
    """The error for an unreachable endpoint names the settings of its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RuntimeError, match=f"cannot reach .* 127.0.0.1:{port} .* spark.driver.host or adv"):
        check(port)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"])
def test_a_connection_that_fails_is_tried_again(answer):
    """A failed connection is retried: the endpoint may lack memory or open files for a moment."""
    good = b"HTTP/1.1 204 No Content\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_thrice():
            for sent in (answer, answer, good):
                with listener.accept()[0] as sock:
                    sock.recv(1 << 16)
                    sock.sendall(sent)

        assert [None, None] == together(serve_thrice, lambda: check(listener.getsockname()[1]))


def test_an_endpoint_that_is_paused_is_waited_for():
    """A paused endpoint is retried: a stopped driver's machine still accepts connections."""
    good = b"HTTP/1.1 204 No Content\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_late():
            with listener.accept()[0], listener.accept()[0], listener.accept()[0] as sock:
                sock.recv(1 << 16)
                sock.sendall(good)

        port = listener.getsockname()[1]
        assert [None, None] == together(answer_late, lambda: check(port, timeouts=(0.2, 20)))


def test_an_endpoint_that_never_answers_is_named():
    """An endpoint that never answers is reported after one attempt per timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"cannot reach .* 127.0.0.1:{port} \(timed out\)"):
            check(port, timeouts=(0.1, 0.1))


SHORTAGES = [MemoryError(), SystemError("no exception set"), RuntimeError("can't start new thread")]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_lack_of_memory_before_a_task_names_the_limit(monkeypatch, error):
    """An allocation that fails before a task runs, as in an import, is an error with the process's limit."""
    monkeypatch.setattr(memory, "_address_limit", lambda: 1)  # so that this process is near its limit
    limit = r"address space limit of 0 MiB \(RLIMIT_AS\)"
    with pytest.raises(WorkerError, match=limit) as raised, preflight.shortages_named(3):
        raise error
    assert 3 == raised.value.worker
    assert "Raise ulimit -v" in str(raised.value)


@pytest.mark.parametrize("error", [StaleWorkerError("stale"), KeyError("other"), RuntimeError("also other")])
def test_other_errors_before_a_task_are_left_alone(error):
    """An error that is no lack of memory is raised as it is."""
    with pytest.raises(type(error)) as raised, preflight.shortages_named(3):
        raise error
    assert error is raised.value
