"""A server in a process of its own, with its own limits and its own clock.

Usage: python served.py FILES [tls], where FILES is the number of files that it may open in addition to those
already open. It prints its address, and ends with its input.
"""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from coordinators import RUN, begun, coordinator_of

from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import tls
from sparkdl.transport.exchange import Endpoint

TESTS = Path(__file__).parent
# A heartbeat of worker 0.
BEAT = {"worker": 0, "generation": 1, "attempt": 1, "epoch": 0, "rows": 0, "retries": 0, "log": []}
BEAT |= {"running": [], "seconds": [], "intervals": [], "ahead": 0.0}


@contextmanager
def served(*, encrypted, files=1000, before=()):
    """Yield the endpoint of a server in its own process; fail if it writes more than ten lines.

    Args:
        encrypted: whether it uses TLS.
        files: number of files that it may open in addition to those already open.
        before: words before the command.
    """
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [*before, sys.executable, __file__, str(files), *["tls"] * encrypted]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=environment, **pipes)
    try:
        port, _, certificate = server.stdout.readline().rstrip("\n").partition(" ")
        yield Endpoint("127.0.0.1", int(port), "secret", RUN, bytes.fromhex(certificate))
    finally:
        _, said = server.communicate(timeout=60)
        assert len(said.splitlines()) <= 10, said


def main():
    coordinator = begun(coordinator_of("asynchronous", workers=2))
    context, certificate = tls.server_context() if sys.argv[2:] else (None, b"")
    with serve(make_app(coordinator, "secret", Traffic()), "127.0.0.1", 0, 2, context) as port:
        files = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        sys.stdout.write(f"{port} {certificate.hex()}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
