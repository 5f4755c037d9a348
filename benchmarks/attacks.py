"""Time fits while clients without the token attack the endpoint.

The fits alternate in one driver: an undisturbed one, and one for each attack. An attack begins with the fit
or with its second epoch, and lasts until the fit ends. It comes from a process of the lowest priority on the
same machine. The final weights of all fits must be identical, bit for bit.

    python benchmarks/attacks.py --results benchmarks/RESULTS.md
"""

import argparse
import itertools
import logging
import os
import random
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import time
from contextlib import suppress

import harness
from harness import ratios, spread, table, verdict

HEAD = b"POST /v1/exchange HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "
LIMIT = 16 << 10  # maximum bytes of a head that the endpoint reads
ATTACKS = {
    "64 heads of the limit ± 1 byte": "heads",
    "1,000 silent connections": "silent",
    "half a head each, 64 times": "halves",
    "100 requests with a wrong token per s": "tokens",
    "100 connections with random bytes per s": "noise",
}
ROWS, EPOCHS, PORT = 20_000, 4, 29_471
SLOWER, LINES = 1.10, 10


def attack(kind: str, encrypted: bool) -> None:
    """Attack the port until killed."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    dice = random.Random(7)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def connect():
        sock = socket.create_connection(("127.0.0.1", PORT), timeout=5)
        return context.wrap_socket(sock) if encrypted and dice.random() < 0.5 else sock

    def head():
        return (HEAD + b"x" * LIMIT)[: LIMIT + dice.choice([-1, 0, 1])]

    def bytes_of():
        return {
            "heads": head,
            "silent": lambda: b"",
            "halves": lambda: HEAD[: dice.randrange(len(HEAD))],
            "tokens": lambda: HEAD + b"no\r\nContent-Length: 9999999\r\n\r\n",
            "noise": lambda: dice.randbytes(dice.randrange(1, 5000)),
        }[kind]()

    most = {"heads": 64, "silent": 1000, "halves": 64}.get(kind, 1)
    pause = 0.01 if most == 1 else 0.001
    held = []
    while True:
        with suppress(OSError):
            held.append(connect())
            held[-1].sendall(bytes_of())
        while len(held) > most:
            held.pop(0).close()
        if len(held) == most and most > 1:  # closed connections are replaced
            time.sleep(0.5)
            open_ = [sock for sock in held if not _ended(sock)]
            for sock in set(held) - set(open_):
                sock.close()
            held = open_
        time.sleep(pause)


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
        self.command = [sys.executable, __file__, "--attack", kind, *["--encrypted"] * encrypted]
        self.process = None

    def begin(self) -> None:
        """Start the attackers."""
        self.process = subprocess.Popen(self.command)

    def end(self) -> None:
        """Stop the attackers."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Lines(logging.Handler):
    """A log handler that counts records."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        self.count += 1


def fit(kind: str | None, moment: str, encrypted: bool) -> tuple[float, bytes, int]:
    """Train; return the seconds, the bytes of the final weights, and the number of log lines."""
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

    lines = Lines()
    logging.getLogger().addHandler(lines)
    began = time.perf_counter()
    if attack_ is not None and moment == "from the start":
        attack_.begin()
    try:
        model_ = SparkModel(model, num_workers=2, network=Network(port=PORT, tls=encrypted))
        history = model_.fit(x, y, batch_size=64, epochs=EPOCHS, seed=1, verbose=0, callbacks=[Middle()])
    finally:
        seconds = time.perf_counter() - began
        logging.getLogger().removeHandler(lines)
        if attack_ is not None:
            attack_.end()
    if history.training["restarts"]:
        raise SystemExit("A worker was lost.")
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return seconds, weights, lines.count


def main() -> None:
    """Run all fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--encrypted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(options.attack, options.encrypted)
        return
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows, same = [], True
    for encrypted in (False, True):
        undisturbed = None, ""
        cases = [undisturbed, *itertools.product(ATTACKS.values(), ("from the start", "in the middle"))]
        found = {case: {} for case in cases}
        logged = dict.fromkeys(cases, 0)
        weights = set()
        fit(None, "", encrypted)  # warms up
        for round_ in range(options.rounds):
            for case in cases[round_ % len(cases) :] + cases[: round_ % len(cases)]:
                seconds, given, lines = fit(*case, encrypted)
                found[case][round_] = seconds
                logged[case] = max(logged[case], lines)
                weights.add(given)
        same = same and len(weights) == 1
        names = {kind: name for name, kind in ATTACKS.items()}
        for case in cases:
            ratio = statistics.median(ratios(found[case], found[undisturbed]))
            met = ratio <= SLOWER and logged[case] <= LINES
            bar = "" if case == undisturbed else verdict(f"≤ {SLOWER:.2f}, ≤ {LINES} lines", met)
            title = "none" if case == undisturbed else f"{names[case[0]]}, {case[1]}"
            found_ = [spread(found[case].values(), ".2f"), f"{ratio:.2f}", str(logged[case])]
            rows.append(["TLS" if encrypted else "plain", title, *found_, bar])
        print(f"# {'TLS' if encrypted else 'plain'}: done", flush=True)
    header = ["", "attack", "seconds per fit", "ratio to no attack", "most log lines", "bar"]
    words = (
        f"Two workers, {ROWS:,} rows of 784 numbers, {EPOCHS} epochs, synchronous/batch, batches of 64; "
        f"{options.rounds} rounds. All fits have {'the same' if same else 'DIFFERENT'} weights, bit for bit. "
        f"{harness.machine({'sparkdl': sys.executable})}"
    )
    harness.report("Fits under attack", f"{words}\n\n{table(header, rows)}", options.results)


if __name__ == "__main__":
    main()
