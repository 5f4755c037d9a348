"""A server in a process of its own, for ``test_attacks.py``: it prints its address, and ends with its input.

Usage: python attacked.py FILES [tls], where FILES is the number of files that it may open in addition.
"""

import os
import resource
import sys

from stores import begun, store_of

from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import tls

if __name__ == "__main__":
    store = begun(store_of("asynchronous", workers=2))
    context, certificate = tls.server_context() if sys.argv[2:] else (None, b"")
    with serve(make_app(store, "secret", Traffic()), "127.0.0.1", 0, 2, context) as port:
        files = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        sys.stdout.write(f"{port} {certificate.hex()}\n")
        sys.stdout.flush()
        sys.stdin.read()
