"""Time fits while clients without the token attack the endpoint.

The fits alternate in one driver: an undisturbed one, and one for each attack. An attack begins with the fit
or with its second epoch, and lasts until the fit ends. It comes from a process at nice 19 on the cores of the
driver and the workers, which is started before the fit. The driver may have 1,024 open files. The final
weights of all fits must be identical, bit for bit, and what the driver's process and its JVM write to file
descriptor 2 is counted in lines. A fit to which no attacker could connect ends the benchmark.

    python benchmarks/attacks.py --results benchmarks/RESULTS.md
"""

import argparse
import itertools
import os
import random
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import harness
from harness import ratios, spread, table, verdict

WHOLE = b"GET /v1/status HTTP/1.1\r\nHost: h\r\n"
HEAD = b"POST /v1/exchange HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "
LIMIT = 16 << 10  # maximum bytes of a head that the endpoint reads
ATTACKS = {
    "64 heads of the limit ± 1 byte": "heads",
    "1,000 silent connections": "silent",
    "half a head each, 64 times": "halves",
    "64 heads that grow by 2 bytes per s": "slow",
    "8,000 connections, more than open files": "flood",
    "100 requests with a wrong token per s": "tokens",
    "100 connections with random bytes per s": "noise",
    "100 whole heads of 2,500 lines without the token per s": "lines",
    "3,000 whole heads without the token": "crowd",
}
# Connections at a time.
HELD = {"heads": 64, "silent": 1000, "halves": 64, "slow": 64, "flood": 8000, "crowd": 3000}
SHORT = 32  # the same, of kinds whose connections are short
HOST = "127.0.0.1"
FILES = 1024  # that the driver may open
ROWS, EPOCHS, PORT = 20_000, 4, 29_471
SLOWER, LINES = 1.10, 10


def attack(kind: str, encrypted: bool, port: int, counter: str | None) -> None:
    """Attack the port until killed.

    Args:
        kind: the kind of attack, a value of ATTACKS.
        encrypted: whether half of the connections use TLS.
        port: the port.
        counter: the file that gets the number of connections. The attack then begins when a line arrives on
            standard input. None: it begins at once.
    """
    os.nice(19)
    count, file = 0, None if counter is None else os.open(counter, os.O_WRONLY)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    dice = random.Random(7)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def connect():
        nonlocal count
        sock = socket.create_connection((HOST, port), timeout=5)
        count += 1
        if file is not None:
            os.pwrite(file, b"%d" % count, 0)
        if not encrypted or dice.random() < 0.5:
            return sock
        sock = context.wrap_socket(sock, do_handshake_on_connect=False)
        sock.setblocking(False)  # an attacker does not wait for the handshake
        return sock

    most = min(HELD.get(kind, SHORT), most - 100)
    pause = {"flood": 0.0}.get(kind, 0.001 if kind in HELD else 0.01)
    held, unsent = [], deque()
    if file is not None:
        print("ready", flush=True)
        sys.stdin.readline()
    while True:
        with suppress(OSError):
            held.append(connect())
            unsent.append((held[-1], _bytes_of(kind, dice)))
        _send_two(unsent)
        while len(held) > most:
            held.pop(0).close()
        if len(held) == most and kind in HELD:
            time.sleep(0.5)
            held = _open_ones(held, b"x" if kind == "slow" else b"")
        time.sleep(pause)


def _bytes_of(kind: str, dice: random.Random) -> bytes:
    """Return the bytes that a connection of this kind sends."""
    return {
        "heads": lambda: (HEAD + b"x" * LIMIT)[: LIMIT + dice.choice([-1, 0, 1])],
        "silent": lambda: b"",
        "halves": lambda: HEAD[: dice.randrange(len(HEAD))],
        "slow": lambda: HEAD,
        "flood": lambda: HEAD[: dice.randrange(2)],
        "tokens": lambda: HEAD + b"no\r\nContent-Length: 9999999\r\n\r\n",
        "lines": lambda: (WHOLE + b"a1:b\r\n" * 2500)[: LIMIT - 8] + b"\r\n\r\n",
        "crowd": lambda: WHOLE + b"\r\n",
        "noise": lambda: dice.randbytes(dice.randrange(1, 5000)),
    }[kind]()


def _send_two(unsent: deque[tuple[socket.socket, bytes]]) -> None:
    """Send the bytes of two connections. Those whose handshake is not complete are tried again later."""
    for _ in range(min(2, len(unsent))):
        sock, sent = unsent.popleft()
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            sock.sendall(sent)
        except ssl.SSLWantReadError:
            unsent.append((sock, sent))
        except OSError:
            pass


def _open_ones(held: list[socket.socket], more: bytes) -> list[socket.socket]:
    """Send some more bytes over all connections; close those that have ended, and return the others."""
    for sock in held:
        with suppress(OSError):
            sock.sendall(more)
    open_ = [sock for sock in held if not _ended(sock)]
    for sock in set(held) - set(open_):
        sock.close()
    return open_


def _ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


class Attack:
    """An attack from a separate process."""

    def __init__(self, kind: str, encrypted: bool) -> None:
        self._counter = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by ``end``
        command = [sys.executable, __file__, "--attack", kind, "--port", str(PORT)]
        command += [*["--encrypted"] * encrypted, "--counter", self._counter.name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process.stdout.readline()  # it is ready

    def begin(self) -> None:
        """Begin to attack."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def end(self) -> int:
        """Stop the attackers; return the number of their connections."""
        self._process.kill()
        self._process.communicate()
        with self._counter:
            return int(Path(self._counter.name).read_bytes() or 0)


class Lines:
    """A count of the lines that this process and its children write to file descriptor 2."""

    def __init__(self) -> None:
        self._file, self._terminal = os.memfd_create("lines"), os.dup(2)
        os.dup2(self._file, 2)

    def count(self) -> int:
        """Return the number of lines since the last call, and show them."""
        lines = os.pread(self._file, os.fstat(self._file).st_size, 0)
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)  # a position that the children share
        os.write(self._terminal, lines)
        return lines.count(b"\n")


def fit(kind: str | None, moment: str, encrypted: bool) -> tuple[float, bytes, int]:
    """Train; return the seconds, the bytes of the final weights, and the number of strange connections."""
    import keras
    import numpy as np

    from sparkdl import Network, SparkModel

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((784,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    random_ = np.random.default_rng(0)
    x = random_.random((ROWS, 784), dtype=np.float32)
    y = random_.integers(0, 10, ROWS)
    attack_ = Attack(kind, encrypted) if kind else None

    class Middle(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0 and attack_ is not None and moment == "in the middle":
                attack_.begin()

    connections = 0
    began = time.perf_counter()
    if attack_ is not None and moment == "from the start":
        attack_.begin()
    try:
        network = Network(bind_address=HOST, advertised_host=HOST, port=PORT, tls=encrypted)
        model_ = SparkModel(model, num_workers=2, network=network)
        history = model_.fit(x, y, batch_size=64, epochs=EPOCHS, seed=1, verbose=0, callbacks=[Middle()])
    finally:
        seconds = time.perf_counter() - began
        if attack_ is not None:
            connections = attack_.end()
    if attack_ is not None and not connections:
        raise SystemExit(f"No attacker could connect: {kind}, {moment}.")
    if history.training["restarts"]:
        raise SystemExit("A worker was lost.")
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return seconds, weights, connections


def main() -> None:
    """Run all fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=PORT, help=argparse.SUPPRESS)
    parser.add_argument("--encrypted", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--counter", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(options.attack, options.encrypted, options.port, options.counter)
        return
    from pyspark.sql import SparkSession

    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    lines = Lines()
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = []
    for encrypted in (False, True):
        rows += rows_of(encrypted, options.rounds, lines)
        print(f"# {'TLS' if encrypted else 'plain'}: done", flush=True)
    header = ["", "attack", "connections", "seconds per fit", "ratio to no attack", "most lines"]
    header += ["weights", "bar"]
    words = (
        f"Two workers, {ROWS:,} rows of 784 numbers, {EPOCHS} epochs, synchronous/batch, batches of 64; "
        f"{options.rounds} rounds. The attackers run at nice 19 on the same cores; the median of their "
        "connections per fit is given. Lines are those on file descriptor 2 of the driver and its JVM. "
        f"{harness.machine({'sparkdl': sys.executable})}"
    )
    harness.report("Fits under attack", f"{words}\n\n{table(header, rows)}", options.results)


def rows_of(encrypted: bool, rounds: int, lines: Lines) -> list[list[str]]:
    """Return the rows of the table for plain or encrypted connections."""
    undisturbed = None, ""
    cases = [undisturbed, *itertools.product(ATTACKS.values(), ("from the start", "in the middle"))]
    found, logged, weights = {case: {} for case in cases}, dict.fromkeys(cases, 0), dict.fromkeys(cases, True)
    strangers = {case: [] for case in cases}
    _, expected, _ = fit(None, "", encrypted)  # warms up
    lines.count()
    for round_ in range(rounds):
        for case in cases[round_ % len(cases) :] + cases[: round_ % len(cases)]:
            found[case][round_], given, connections = fit(*case, encrypted)
            strangers[case].append(connections)
            logged[case] = max(logged[case], lines.count())
            weights[case] = weights[case] and given == expected
    names, rows = {kind: name for name, kind in ATTACKS.items()}, []
    for case in cases:
        ratio = statistics.median(ratios(found[case], found[undisturbed]))
        met = ratio <= SLOWER and logged[case] <= LINES and weights[case]
        bar = "" if case == undisturbed else verdict(f"≤ {SLOWER:.2f}, ≤ {LINES} lines, the same", met)
        title = "none" if case == undisturbed else f"{names[case[0]]}, {case[1]}"
        found_ = [f"{statistics.median(strangers[case]):,.0f}", spread(found[case].values(), ".2f")]
        found_ += [f"{ratio:.2f}", str(logged[case])]
        same = "the same" if weights[case] else "DIFFERENT"
        rows.append(["TLS" if encrypted else "plain", title, *found_, same, bar])
    return rows


if __name__ == "__main__":
    main()
