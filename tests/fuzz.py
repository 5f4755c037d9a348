"""Fuzz the wire format and the endpoint with almost valid inputs, and check the laws that hold for all.

``tests/unit/transport/test_fuzz.py`` tries some thousands of them. ``make fuzz`` tries a million, guided by
coverage if atheris is installed (the extra ``fuzz``; it has wheels for Linux on x86-64). ``tests/corpus``
keeps one input for each outcome. ``--keep`` adds new ones.
"""

import argparse
import json
import random
import re
import socket
import sys
import time
import traceback
import tracemalloc
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from mutator import LONGEST, mutate

atheris = None
if __name__ == "__main__":  # tests do not use atheris, so they are the same everywhere
    with suppress(ImportError):
        import atheris

with nullcontext() if atheris is None else atheris.instrument_imports(include=["sparkdl"]):
    from coordinators import all_of, coordinator_of, impatient, update_of

    from sparkdl.core.sparse_gradients import Slices, Table, encode
    from sparkdl.errors import RefusedError, WireError, WorkerLostError
    from sparkdl.server import http_server
    from sparkdl.server.aggregation import Hybrid
    from sparkdl.server.http_app import Traffic, add_hosted_driver, make_app
    from sparkdl.transport import messages
    from sparkdl.transport.messages import Answer, Flag, Kind, Reply, Update

CORPUS = Path(__file__).parent / "corpus"
# Bytes that one input may take: the JSON of the longest body that is read, and its values.
MEMORY = 8 << 20
TABLES = (Table(1, 1), Table(4, 2))
NUMBERS = re.compile(r"-?\b(0x)?\d[\d.e+]*\b|\b(nan|inf)\b")


class Wire:
    """Messages: decoding and encoding gives the same bytes again, and all other inputs are refused."""

    name = "wire"
    codecs = (
        (messages.UPDATE.size, messages.decode_update, messages.encode_update),
        (messages.REPLY.size, messages.decode_reply, messages.encode_reply),
    )

    def seeds(self):
        sections = {"parameters": np.ones(3, np.float32), "metrics": b"metrics", "state": b"state"}
        updates = [Update(kind, flags=flag, **sections) for kind in Kind for flag in (Flag.NONE, Flag.STOP)]
        replies = [Reply(kind, flag, **sections) for kind in Answer for flag in (Flag.SEND_STATE, Flag.AGAIN)]
        return [
            *(messages.encode_update(update) + b"".join(messages.sections(update)) for update in updates),
            *(messages.encode_reply(reply) + b"".join(messages.sections(reply)) for reply in replies),
        ]

    mutate = staticmethod(mutate)

    def __call__(self, data):
        """Return the outcome of an input, after checking the invariants."""
        return " ".join(self._outcome(data, *codec) for codec in self.codecs)

    @staticmethod
    def _outcome(data, size, decode, encode):
        try:
            message = messages.fill(*decode(data[:size]), data[size:])
        except WireError as error:
            return _words(str(error))
        assert data == encode(message) + b"".join(messages.sections(message))
        return f"{message.kind.name}."

    def close(self):
        pass


class Http:
    """Connections: no answer is a 5xx, and a refused request changes nothing.

    The first byte of an input selects the coordinator behind the endpoint. The rest goes through cheroot's
    connection, its parser and the app as if it had come from a network, in this thread.
    """

    name = "http"
    coordinators = (
        {"mode": "asynchronous"},
        {"mode": "synchronous"},
        {
            "mode": "synchronous",
            "joint": False,
            "hybrid": Hybrid(1, merge_late=True),
            "snapshot_intervals": (1,),
        },
        {"mode": "hogwild", "staleness": 1},
        {"mode": "asynchronous", "begun": False},
        {"mode": "synchronous", "tables": TABLES},
    )

    def __init__(self):
        self.mistakes = []
        self._resources = ExitStack()
        self._resources.enter_context(impatient())
        self._server = http_server._listen(self._watched, "127.0.0.1", 0, 1)
        self._resources.callback(self._server.stop)
        self._server.error_log = lambda *given, **options: self.mistakes.append(traceback.format_exc())
        self._behind = _Behind(self._exchanged)
        self._app = make_app(self._behind, "secret", Traffic())
        self._app.config["PROPAGATE_EXCEPTIONS"] = True  # so that cheroot logs them
        add_hosted_driver(self._app, _steward(self._behind))
        self._fresh = {}

    def close(self):
        self._resources.close()

    def seeds(self):
        indices = range(len(self.coordinators))
        return [bytes([index]) + request for index in indices for request in self._valid(index)]

    @staticmethod
    def mutate(random, data, other):
        """Return a changed input: its head, its body or all of it; Content-Length is mostly corrected."""
        head, blank, body = data.partition(b"\r\n\r\n")
        what = random.random()
        if what < 0.6:
            body = mutate(random, body, other.partition(b"\r\n\r\n")[2])
        elif what < 0.9:
            head = mutate(random, head, other.partition(b"\r\n\r\n")[0])
        else:
            return mutate(random, data, other)
        if random.random() < 0.8:
            head = re.sub(rb"(?<=Content-Length: )\d+", b"%d" % len(body), head)
        return head + blank + body

    def __call__(self, data):
        """Return the outcome of an input, after checking the invariants."""
        self.mistakes.clear()
        self._make(data[0] % len(self.coordinators) if data else 0)
        answer = self._sent(data[1:])
        statuses = re.findall(rb"HTTP/1.1 (\d{3}) ", answer)

        assert not self.mistakes, "".join(self.mistakes)
        assert all(status < b"500" for status in statuses), answer
        assert not getattr(self._coordinator.aggregation, "flights", 0)
        return f"{statuses[-1].decode()} {_error(answer)}" if statuses else "nothing"

    def _make(self, index):
        if index in self._fresh:  # its last input changed nothing
            self._coordinator, self._before = self._fresh.pop(index)
        else:
            self._coordinator = _coordinator(**self.coordinators[index])
            self._before = all_of(self._coordinator)
        self._behind.coordinator = self._coordinator
        self._index, self._changed = index, False

    def _sent(self, data):
        """Return the endpoint's answer to the data of a whole connection."""
        here, there = socket.socketpair()
        with here:
            here.sendall(data)
            here.shutdown(socket.SHUT_WR)
            connection = http_server._Connection(self._server, there)
            while connection.communicate():
                pass
            while there.recv(1 << 16):
                pass
            connection.close()
            if not self._changed:
                self._fresh[self._index] = self._coordinator, self._before
            with here.makefile("rb") as stream:
                return stream.read()

    def _watched(self, environ, start_response):
        """Answer a request, and assert that a refused one leaves the coordinator unchanged."""
        before = self._known()
        statuses = []

        def start(status, *rest):
            statuses.append(status)
            return start_response(status, *rest)

        answer = self._app(environ, start)
        if statuses[0] < "400":
            self._changed = True
        elif isinstance(self._coordinator.failure, WorkerLostError):
            self._changed = True  # a worker that rejoins a synchronous run ends it
        else:
            assert before == all_of(self._coordinator)
        return answer

    def _exchanged(self, update, read):
        """Pass on an update, and assert that a refused one leaves the coordinator unchanged."""
        before = self._known()
        self._changed = True
        try:
            return self._coordinator.exchange(update, read)
        except (RefusedError, WireError, ValueError):
            assert before == all_of(self._coordinator)
            raise

    def _known(self):
        return all_of(self._coordinator) if self._changed else self._before

    def _valid(self, index):
        """Return requests of all kinds that a coordinator accepts, now or at another time."""
        coordinator = _coordinator(**self.coordinators[index])
        who = {"worker": 0, "generation": 1, "attempt": 1}
        failure = who | {"kind": "data", "host": "h", "message": "m", "traceback": ""}
        asked = {
            "join": who | {"host": "h", "pid": 1},
            "leave": {"worker": 1},
            "failure": failure,
            "ready": who | {"rows": 10, "validation_rows": 0, "notes": {}, "fingerprint": [0, 0]},
            "heartbeat": who
            | {
                "epoch": 0,
                "rows": 1,
                "retries": 0,
                "log": [{"name": "n", "level": 20, "message": "m"}],
                "running": [0, 1, "bWV0cg=="],
                "seconds": [0.5, 1.0, 0.0, 0.0, 0.0],
                "intervals": [[1, 2.5, 0.5]],
                "ahead": 0.5,
            },
            "drive": {"epoch": 0, "released": 1, "learning_rate": 0.5, "stop": False, "short": -1},
        }
        move = update_of(coordinator, 0, np.ones(5), statistics=np.ones(2, np.float32))
        said = {"metrics": b"metr", "state": b"stat"}
        sliced = encode(Slices(np.ones(1, np.float32), {1: (np.array([1, 1]), np.ones((2, 2), np.float32))}))
        updates = [
            replace(move, parameters=sliced, flags=Flag.SLICES)
            if "tables" in self.coordinators[index]
            else move,
            update_of(coordinator, 1, flags=Flag.AWAIT),
            *(update_of(coordinator, worker, kind=Kind.REPORT, **said) for worker in (0, 1)),
            update_of(coordinator, 0, kind=Kind.REPORT, flags=Flag.STOP, **said),
            update_of(coordinator, 0, kind=Kind.VALIDATION, metrics=b"metr"),
            update_of(coordinator, 0, kind=Kind.STATE, **said),
            *(
                update_of(coordinator, 0, kind=kind)
                for kind in (Kind.PULL, Kind.RESTORE, Kind.CENTER, Kind.ARRAYS)
            ),
            *(update_of(coordinator, worker, kind=Kind.SHARE, rows=4 + worker) for worker in (0, 1)),
            update_of(coordinator, 0, kind=Kind.GIVE, sequence=1, state=b"rows"),
            update_of(coordinator, 1, kind=Kind.TAKE, sequence=0),
        ]
        encoded = [messages.encode_update(update) + b"".join(messages.sections(update)) for update in updates]
        return [
            _request("GET", "ping"),
            _request("GET", "status"),
            _request("GET", "ping", token=b"wrong"),
            *(_request("POST", name, json.dumps(body).encode()) for name, body in asked.items()),
            *(_request("POST", "exchange", message) for message in encoded),
            _request("POST", "replace/0", np.ones(7, np.float32).tobytes()),
            _request("POST", "exchange", _chunks(encoded[0], encoded[2]), chunked=True),
            _request("POST", "exchange", encoded[2]) + _request("POST", "exchange", encoded[3]),
        ]


class _Behind:
    """The current coordinator behind the app, with exchanges under watch."""

    def __init__(self, exchange):
        self.exchange = exchange

    def __getattr__(self, name):
        return getattr(self.coordinator, name)


def _coordinator(mode, *, begun=True, **options):
    """Return a coordinator of two workers, both ready if ``begun``."""
    coordinator = coordinator_of(
        mode,
        workers=2,
        statistics=2,
        metrics=4,
        generators=4,
        optimizer=4,
        evaluated=frozenset([0]),
        **options,
    )
    for worker in (0, 1):
        coordinator.join(worker, 1, 1, "host", 1)
    coordinator.release(0, 0.5)
    for worker in (0, 1) if begun else ():
        coordinator.ready(worker, 1, 1, 10, 0, {})
    return coordinator


def _steward(coordinator):
    """Return a stand-in for the driver's half of a run, without Keras."""
    return SimpleNamespace(
        weight_bytes=28,
        drive=lambda **body: coordinator.release(body["released"], 0.5) or b"record",
        replace=lambda epoch, weights: coordinator.replace(
            *np.split(np.frombuffer(weights, np.float32), [5])
        ),
        leave=lambda worker: None,
    )


def _request(method, path, body=b"", *, token=b"secret", chunked=False):
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    return b"%b /v1/%b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\n%b\r\n\r\n%b" % (
        method.encode(),
        path.encode(),
        token,
        length,
        body,
    )


def _chunks(*encoded):
    parts = [
        part for each in encoded for part in (each[: messages.UPDATE.size], each[messages.UPDATE.size :])
    ]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def _error(answer):
    """Return the error message of the last answer, if it has one."""
    body = answer.rpartition(b"\r\n\r\n")[2]
    try:
        return _words(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "without JSON"


def _words(message):
    """Return a message without the parts that differ between inputs."""
    return NUMBERS.sub("N", re.sub(r"(got b|expected: ).*", r"\1...", message, flags=re.DOTALL))[:100]


def kept(target):
    """Return the inputs of a target's corpus."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).iterdir())]


def replay(target, data):
    """Return the outcome of an input; errors show the input. With tracemalloc on, memory is bounded too."""
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        outcome = target(data)
        assert tracemalloc.get_traced_memory()[1] - before < MEMORY
    except Exception as error:
        error.add_note(f"The input of {target.name} was {data!r}.")
        raise
    return outcome


def search(target, number, source):
    """Try ``number`` inputs, mutating those with a new outcome further; return one input by outcome."""
    pool = [*target.seeds(), *kept(target)]
    found = {replay(target, data): data for data in pool}
    for _ in range(number):
        data = target.mutate(source, source.choice(pool), source.choice(pool))
        outcome = replay(target, data)
        if outcome not in found:
            found[outcome] = data
            pool.append(data)
    return found


def keep(target, found):
    """Rewrite the corpus with the shortest known input of each outcome."""
    for data in kept(target):
        outcome = replay(target, data)
        found[outcome] = min(data, found.get(outcome, data), key=len)
    folder = CORPUS / target.name
    for path in folder.iterdir():
        path.unlink()
    for outcome, data in found.items():
        (folder / blake2b(outcome.encode(), digest_size=6).hexdigest()).write_bytes(data)


def guide(target, number, source):
    """Try ``number`` inputs, which atheris mutates for coverage of new code; does not return."""
    pool = [*target.seeds(), *kept(target)]

    def changed(data, most, seed):
        source.seed(seed)
        return target.mutate(source, data, source.choice(pool))[:most]

    seeds = Path("build/fuzz", target.name)
    seeds.mkdir(parents=True, exist_ok=True)
    for data in pool:
        (seeds / blake2b(data, digest_size=8).hexdigest()).write_bytes(data)
    options = f"-atheris_runs={number}", f"-max_len={LONGEST}", f"-artifact_prefix={seeds}-", str(seeds)
    atheris.Setup([sys.argv[0], *options], lambda data: replay(target, data) and None, custom_mutator=changed)
    try:
        atheris.Fuzz()
    finally:  # it exits, which threads of the endpoint would prevent
        target.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=("wire", "http"))
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many")
    parser.add_argument("--seed", type=int, help="what they are drawn from (default: the time)")
    parser.add_argument("--keep", action="store_true", help="add to tests/corpus, without guidance")
    given = parser.parse_args()
    target = {"wire": Wire, "http": Http}[given.target]()
    seed = time.time_ns() if given.seed is None else given.seed
    print(f"Fuzzing {target.name} with {given.inputs} inputs and seed {seed}")
    start = time.monotonic()
    if atheris is not None and not given.keep:
        guide(target, given.inputs, random.Random(seed))
    found = search(target, given.inputs, random.Random(seed))
    print(f"{len(found)} outcomes, {given.inputs / (time.monotonic() - start):.0f} inputs a second")
    if given.keep:
        keep(target, found)
    target.close()


if __name__ == "__main__":
    main()
