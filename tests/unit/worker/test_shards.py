"""Tests of shards: workers average gradients among themselves, as an endpoint would."""

import socket
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from coordinators import EMPTY, LAYOUT, NEVER, RUN, coordinator_of, impatient, together
from hypothesis import given, settings
from hypothesis import strategies as st
from standalone import eventually

from sparkdl.core.codecs import CODECS
from sparkdl.errors import RefusedError, WorkerLostError
from sparkdl.process.reasons import reason_of
from sparkdl.server.aggregation import AggregationSpec, limits, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import client
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.messages import Answer, Flag, Kind, Sections, Update
from sparkdl.transport.tls import server_context
from sparkdl.worker import shards
from sparkdl.worker.shards import GRAIN, Shard, range_digest, sharded, spans_of

PART = range_digest(LAYOUT, (0, 4))


def counting(workers, statistics=0, **shape):
    """Return the coordinator of a run whose workers average gradients among themselves."""
    plain = coordinator_of(workers=workers, statistics=statistics, size=0, **shape)
    terms = AggregationSpec("synchronous", True, workers, None, sharded=True)
    return Coordinator(plain.shape, make_aggregation(terms, EMPTY, np.zeros(statistics, np.float32)))


class Workers:
    """The exchanges of workers with shards, over real sockets.

    Args:
        stack: closes them.
        workers: their number.
        size: number of elements of a gradient.
        tls: whether all connections use TLS.
    """

    def __init__(self, stack, workers, size, *, tls=False, statistics=0, scaled=False, codec=None):
        self.coordinator = counting(workers, statistics)
        context, certificate = server_context() if tls else (None, b"")
        port = stack.enter_context(
            serve(make_app(self.coordinator, "secret", Traffic()), "127.0.0.1", 0, workers, context)
        )
        stack.callback(self.coordinator.close)
        self.coordinator.release(0, NEVER)
        endpoint = Endpoint("127.0.0.1", port, "secret", RUN, certificate)
        self.exchanges, self.ends = [], []
        for worker in range(workers):
            driver = HttpExchange(endpoint, worker, 1, self.coordinator.generation, LAYOUT, codec=codec)
            stack.callback(driver.close)
            driver.join("host", 1)
            self.ends.append(stack.enter_context(ExitStack()))
            self.exchanges.append(self.ends[-1].enter_context(sharded(driver, size, workers, scaled=scaled)))
        stack.callback(lambda: [exchange.close() for exchange in self.exchanges])  # before any server stops
        self.begins = together(*(lambda e=e: e.ready(10, 0, {}) for e in self.exchanges))

    def round(self, sequence, gradients, rows=None, statistics=()):
        """Exchange the gradient of each worker; return the replies."""
        rows = rows or [4 * bool(len(gradient)) for gradient in gradients]

        def exchange(worker):
            update = Update(
                Kind.GRADIENT,
                sequence=sequence,
                rows=rows[worker],
                loss=1.0,
                parameters=np.asarray(gradients[worker], np.float32),
                base_version=sequence,
            )
            if rows[worker] and len(statistics):
                update.statistics = np.asarray(statistics[worker], np.float32)
            return self.exchanges[worker](update)

        return together(*(lambda k=k: exchange(k) for k in range(len(gradients))))


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def noise(seed, size):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def averaged(gradients, rows):
    """Return the mean that an endpoint on the driver computes."""
    coordinator = coordinator_of(workers=len(gradients), size=len(gradients[0]))
    rounds = coordinator.aggregation
    for worker, gradient in enumerate(gradients):
        update = Update(Kind.GRADIENT, worker=worker, rows=rows[worker], parameters=gradient)
        if rows[worker]:
            rounds._reduce(update)
    return rounds.reductions[0].result()


@pytest.mark.parametrize("name", CODECS)
def test_a_compressed_round_is_the_mean_of_what_was_sent(stack, name):
    """Workers get the same bits: the encoded mean of the encoded parts, within the codec's precision."""
    workers = Workers(stack, 3, 5000, codec=CODECS[name])
    gradients = [noise(worker, 5000) for worker in range(3)]
    first, *others = (reply.parameters for reply in workers.round(0, gradients))

    for other in others:
        np.testing.assert_array_equal(first, other)
    assert not np.array_equal(first, averaged(gradients, [4, 4, 4]))
    assert np.abs(first - averaged(gradients, [4, 4, 4])).max() < 0.1


def test_shards_draw_random_bits_of_their_own(stack):
    """Two shards encode equal means with different random bits."""
    size = 2 * GRAIN
    workers = Workers(stack, 2, size, codec=CODECS["int8"])
    half = noise(0, GRAIN)
    reply, _ = workers.round(0, [np.concatenate([half, half])] * 2)

    assert not np.array_equal(reply.parameters[:GRAIN], reply.parameters[GRAIN:])


def test_a_gradient_that_a_codec_cannot_hold_is_not_merged(stack):
    """A number beyond the range of float16 would become infinite; the others' mean is applied instead."""
    workers = Workers(stack, 2, 100, codec=CODECS["fp16"])
    spoilt = noise(1, 100)
    spoilt[99] = 65_520
    replies = workers.round(0, [noise(0, 100), spoilt])

    for reply in replies:
        np.testing.assert_allclose(noise(0, 100), reply.parameters, rtol=1e-2)
    assert 1 == workers.coordinator.counters["not_finite"]


def test_parts_that_wait_for_a_slow_worker_are_sent_again(stack, monkeypatch):
    """Parts that wait unread for a slow worker are dropped after a while and sent again, and count once."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    monkeypatch.setattr(limits, "BODY_PATIENCE", 0.05)
    size = 1 << 20
    group = Workers(stack, 3, size)
    gradients = [noise(worker, size) for worker in range(3)]
    sent = []
    for each in group.exchanges:
        shard = each.shard
        monkeypatch.setattr(
            shard, "exchange", lambda *args, whole=shard.exchange: sent.append(args[0].worker) or whole(*args)
        )

    def exchange(worker):
        time.sleep(0.5 * (worker == 0))
        return group.exchanges[worker](Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=gradients[worker]))

    for reply in together(*(lambda k=k: exchange(k) for k in range(3))):
        np.testing.assert_array_equal(averaged(gradients, [4, 4, 4]), reply.parameters)
    assert sent.count(1) > 3


def test_workers_that_pause_for_long_go_on(stack, monkeypatch):
    """Shards close connections that are silent for long; the next round uses new ones, without a pause."""
    monkeypatch.setattr("sparkdl.server.http_server.IDLE_SECONDS", 1)
    workers = Workers(stack, 3, 100)
    gradients = [noise(worker, 100) for worker in range(3)]
    workers.round(0, gradients)
    time.sleep(3)
    replies = workers.round(1, gradients)

    for reply in replies:
        np.testing.assert_array_equal(reply.parameters, averaged(gradients, [4, 4, 4]))
    assert not any(peer.retried for exchange in workers.exchanges for peer in exchange._peers)


@pytest.mark.parametrize(
    "lost",
    [lambda k: [0], lambda k: [k], lambda k: [(k + 1) % 3], lambda k: [(k + 2) % 3], lambda k: [0, 1, 2]],
    ids=["one shard", "own", "next", "previous", "all"],
)
def test_parts_that_are_lost_on_their_way_are_sent_again(stack, monkeypatch, lost):
    """A round closes although connections break while parts are sent, whichever shards the parts are for."""
    monkeypatch.setattr(limits, "PATIENCE", 5.0)
    workers = Workers(stack, 3, 100)
    gradients = [noise(worker, 100) for worker in range(3)]
    for worker, exchange in enumerate(workers.exchanges):
        for shard in lost(worker):
            _lose_next(exchange._peers[shard])
    for sequence in range(2):
        for reply in workers.round(sequence, gradients):
            np.testing.assert_array_equal(reply.parameters, averaged(gradients, [4, 4, 4]))


def _lose_next(peer):
    """Let the next update of a peer vanish in a connection that breaks unnoticed."""
    connection = peer._connection
    send = connection.send

    def vanish(update):
        connection.send = send
        connection._streams = True
        connection._http.putrequest("POST", "/v1/exchange")
        connection._http.putheader("Authorization", connection._token["Authorization"])
        connection._http.putheader("Transfer-Encoding", "chunked")
        connection._http.endheaders()
        connection._http.sock.shutdown(socket.SHUT_RDWR)

    connection.send = vanish


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_ranges_cover_a_vector_once(size, workers):
    """The ranges follow each other, are aligned, and differ by less than two grains, except the last."""
    spans = spans_of(size, workers)
    lengths = [span.stop - span.start for span in spans]

    assert workers == len(spans)
    assert [0, *(span.stop for span in spans)] == [*(span.start for span in spans), size]
    assert all(span.start % GRAIN == 0 for span in spans)
    assert min(lengths) >= 0
    assert max(lengths) - min(lengths) <= 2 * GRAIN


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(("workers", "size"), [(1, 100), (2, 100), (3, 1), (3, 1000), (4, 200_003)])
def test_the_mean_has_the_bits_of_an_endpoint_on_the_driver(stack, workers, size, tls):
    """Each worker gets the mean that the driver would compute, whatever the rows of each worker."""
    group = Workers(stack, workers, size, tls=tls)
    for sequence in range(3):
        gradients = [noise(10 * sequence + worker, size) for worker in range(workers)]
        rows = [4 + (worker + sequence) % 3 for worker in range(workers)]
        replies = group.round(sequence, gradients, rows)

        expected = averaged(gradients, rows)
        for reply in replies:
            assert (Answer.MEAN, sequence + 1) == (reply.kind, reply.version)
            np.testing.assert_array_equal(expected, reply.parameters)
    assert 3 * workers == group.coordinator.counters["exchanges"]


def test_a_worker_without_rows_takes_part(stack):
    """A worker without rows gets the mean of the others. If no worker has rows, there is no mean."""
    group = Workers(stack, 3, 100)
    some = group.round(0, [noise(0, 100), EMPTY, noise(2, 100)])
    none = group.round(1, [EMPTY, EMPTY, EMPTY])

    for reply in some:
        np.testing.assert_array_equal(averaged([noise(0, 100), noise(2, 100)], [4, 4]), reply.parameters)
    assert [0, 0, 0] == [len(reply.parameters) for reply in none]


def test_the_driver_averages_the_statistics(stack):
    """Moving statistics are averaged by the driver's endpoint, weighted by rows."""
    group = Workers(stack, 2, 50, statistics=2)
    replies = group.round(0, [noise(0, 50), noise(1, 50)], [1, 3], [[0.0, 4.0], [4.0, 8.0]])

    assert [[3.0, 7.0]] * 2 == [reply.statistics.tolist() for reply in replies]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_with_nan_is_not_merged(stack, bad):
    """A gradient with NaN or Inf counts and contributes nothing, on any shard."""
    group = Workers(stack, 2, 100)
    spoilt = noise(1, 100)
    spoilt[99] = bad
    first, second = group.round(0, [noise(0, 100), spoilt])

    for reply in (first, second):
        np.testing.assert_array_equal(noise(0, 100), reply.parameters)
    assert (Flag.NONE, Flag.NOT_FINITE) == (first.flags, second.flags)
    assert 1 == group.coordinator.counters["not_finite"]


def test_a_gradient_of_a_scaled_loss_may_be_infinite(stack):
    """A scaled loss may overflow; all replicas see it in the mean."""
    group = Workers(stack, 2, 100, scaled=True)
    object.__setattr__(group.coordinator.shape, "scaled", True)
    replies = group.round(0, [noise(0, 100), np.full(100, np.inf)])

    assert all(np.isinf(reply.parameters).all() for reply in replies)


def test_parts_beyond_the_budget_wait_unread(stack, monkeypatch):
    """Without memory for parts ahead of their turn, all rounds still close, with the same bits."""
    monkeypatch.setattr(limits, "EARLY_BYTES", 0)
    size = 1 << 20
    group = Workers(stack, 3, size)
    for sequence in range(2):
        gradients = [noise(10 * sequence + worker, size) for worker in range(3)]
        for reply in group.round(sequence, gradients):
            np.testing.assert_array_equal(averaged(gradients, [4, 4, 4]), reply.parameters)


def test_a_round_that_is_late_is_asked_for_again(stack):
    """A worker that waits long for a mean sends its parts once."""
    group = Workers(stack, 2, 100)

    def late():
        assert eventually(lambda: group.exchanges[0].shard.aggregation.counted(0, 0), 10)
        update = Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=noise(1, 100))
        return group.exchanges[1](update)

    with impatient():
        first = Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=noise(0, 100))
        replies = together(lambda: group.exchanges[0](first), late)

    for reply in replies:
        np.testing.assert_array_equal(averaged([noise(0, 100), noise(1, 100)], [4, 4]), reply.parameters)


def test_a_part_that_is_sent_twice_counts_once(stack):
    """If the connection to a shard breaks after the parts were sent, they are sent again and count once."""
    group = Workers(stack, 2, 100)

    def breaking(worker):
        exchange = group.exchanges[worker]
        update = Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=noise(worker, 100))
        ticket = exchange.begin(update)
        for peer in exchange._peers:
            peer._connection.close()
        return exchange.finish(ticket)

    for reply in together(lambda: breaking(0), lambda: breaking(1)):
        np.testing.assert_array_equal(averaged([noise(0, 100), noise(1, 100)], [4, 4]), reply.parameters)


def test_a_worker_that_cannot_reach_another_names_it(stack, monkeypatch):
    """The error names both workers, the address and the remedy, and no round begins."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    made = shards.ShardedExchange.__init__

    def misplaced(self, driver, shard, address, spans, **options):
        address = ("127.0.0.1", port, "") if driver.identity["worker"] == 1 else address
        made(self, driver, shard, address, spans, **options)

    monkeypatch.setattr(shards.ShardedExchange, "__init__", misplaced)
    group = Workers(stack, 2, 100)

    assert [WorkerLostError, WorkerLostError] == list(map(type, group.begins))
    words = f"Worker 0 on .* cannot reach worker 1 at 127.0.0.1:{port}, .*refused.*advertised_host.*driver."
    with pytest.raises(WorkerLostError, match=words):
        raise group.begins[0]


def test_a_shard_that_is_gone_is_a_lost_worker(stack, monkeypatch):
    """A worker whose shard is gone counts as lost; the error names it."""
    monkeypatch.setattr(client, "RETRIES", 0)
    group = Workers(stack, 2, 100)
    group.exchanges[0]._peers[1].close()
    group.ends[1].close()
    update = Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=noise(0, 100))

    with pytest.raises(WorkerLostError, match="Worker 0 lost worker 1: .* got no response from the run's"):
        group.exchanges[0](update)


def test_a_worker_leaves_once_all_have_the_last_mean():
    """A shard does not end before the other workers have received its last mean."""
    shard = Shard(RUN, 1, 0, 2, size=4, layout=PART)
    shard.begin(0, [0, 0])
    left = threading.Event()
    together(
        *(
            lambda k=k: shard.exchange(part(worker=k), lambda k=k: part(worker=k, parameters=noise(k, 4)))
            for k in range(2)
        )
    )
    waiting = threading.Thread(target=lambda: (shard.wait_sent(), left.set()))
    waiting.start()
    shard.sent(part(worker=0))
    assert not left.wait(0.2)
    shard.sent(part(worker=1))
    assert left.wait(10)
    waiting.join()


@pytest.mark.parametrize("sequence", [0, 7])
def test_a_worker_leaves_at_once_if_no_round_was_closed(sequence, monkeypatch):
    """A worker leaves at once if its run, new or resumed, ends before the first round."""
    monkeypatch.setattr(shards, "LEAVE_SECONDS", 3600)
    shard = Shard(RUN, 1, 0, 2, size=4, layout=PART)
    shard.begin(sequence, [0, 0])
    leaving = threading.Thread(target=shard.wait_sent, daemon=True)
    leaving.start()
    leaving.join(10)

    assert not leaving.is_alive()


def part(**fields):
    return Update(**{"kind": Kind.GRADIENT, "rows": 4, "generation": 1, "run": RUN, "layout": PART, **fields})


@pytest.mark.parametrize(
    ("fields", "lengths", "status", "words"),
    [
        ({"run": bytes(16)}, (4, 0, 0, 0), 409, "belongs to another run"),
        ({"layout": LAYOUT}, (4, 0, 0, 0), 422, "range of the part does not match"),
        ({"kind": Kind.DELTA}, (4, 0, 0, 0), 400, "A shard takes no DELTA of worker 0"),
        ({"worker": 2}, (4, 0, 0, 0), 400, "no GRADIENT of worker 2"),
        ({}, (5, 0, 0, 0), 413, "A part with 4 rows cannot have these sections"),
        ({}, (0, 0, 0, 0), 413, "A part with 4 rows"),
        ({"rows": 0}, (4, 0, 0, 0), 413, "A part with 0 rows"),
        ({}, (4, 1, 0, 0), 413, "A part with 4 rows"),
        ({}, (4, 0, 1, 0), 413, "A part with 4 rows"),
        ({}, (4, 0, 0, 1), 413, "A part with 4 rows"),
        ({"flags": Flag.AWAIT}, (0, 0, 0, 0), 409, "did not arrive"),
        ({"flags": Flag.AWAIT}, (4, 0, 0, 0), 409, "did not arrive"),
    ],
)
def test_a_part_that_does_not_belong_here_is_refused(fields, lengths, status, words):
    """A part of another run, layout, kind, worker or size is refused by its header."""
    shard = Shard(RUN, 1, 0, 2, size=4, layout=PART)
    with pytest.raises(RefusedError, match=words) as error:
        shard.admit(part(**fields), Sections(*lengths))

    assert status == error.value.status


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"generation": 1}, "Generation 1 is over"),
        ({"attempt": 4}, "Attempt 5 of worker 0 superseded 4"),
        ({"attempt": 6}, "Attempt 5 of worker 0 superseded 6"),
    ],
)
def test_a_part_of_another_generation_or_attempt_is_refused(fields, words):
    """A part of an attempt that the shard did not begin with is refused, also if it came before."""
    shard = Shard(RUN, 2, 0, 1, size=4, layout=PART)
    stale = part(**{"generation": 2, "attempt": 5} | fields)
    early = [] if stale.generation == 1 else [lambda: shard.exchange(stale, lambda: stale)]
    outcomes = together(*early, lambda: shard.begin(0, [5]))

    with pytest.raises(RefusedError, match=words):
        shard.admit(stale, Sections(4, 0, 0, 0))
    assert [409] * len(early) == [outcome.status for outcome in outcomes[:-1]]
    shard.admit(part(generation=2, attempt=5), Sections(4, 0, 0, 0))


def test_after_its_end_a_shard_answers_nothing():
    """A part that comes after the end of a shard gets no answer, so that its worker asks again."""
    shard = Shard(RUN, 2, 0, 1, size=4, layout=PART)
    shard.begin(0, [0])
    shard.close()
    asked_again = []
    for call in (
        lambda: shard.admit(part(generation=2), Sections(4, 0, 0, 0)),
        lambda: shard.exchange(part(generation=2), lambda: part(generation=2, parameters=noise(0, 4))),
    ):
        with pytest.raises(RefusedError, match="ended") as caught:
            call()
        asked_again.append(caught.value.status)
    assert [408, 408] == asked_again


@pytest.mark.parametrize("error", [MemoryError("no room"), TimeoutError(110, "no room")])
def test_a_shard_that_fails_names_the_reason_to_every_worker(stack, monkeypatch, error):
    """If adding a part fails, all workers of the round get the reason, which they report to the driver."""
    group = Workers(stack, 2, 100)
    group.round(0, [noise(0, 100), noise(1, 100)])

    def fail(update):
        raise error

    def slowly(raised):
        time.sleep(0.2)  # meanwhile the other request ends too
        return reason_of(raised)

    monkeypatch.setattr(shards, "reason_of", slowly)
    monkeypatch.setattr(group.exchanges[1].shard.aggregation, "_reduce", fail)
    replies = group.round(1, [noise(0, 100), noise(1, 100)])

    assert [500, 500] == [reply.status for reply in replies]
    assert all("The shard of worker 1 failed: " in str(reply) for reply in replies)
    assert all("no room" in str(reply) for reply in replies)


def test_a_worker_may_take_long_for_its_first_gradient(stack):
    """The other workers wait for a worker that compiles for a long time, and do not report it as lost."""
    group = Workers(stack, 2, 100)

    def exchange(worker):
        gradient = Update(Kind.GRADIENT, rows=4, loss=1.0, parameters=noise(worker, 100))
        return group.exchanges[worker](gradient)

    def late():
        time.sleep(1)  # a multiple of the patience of a request
        return exchange(1)

    with impatient():
        replies = together(lambda: exchange(0), late)

    for reply in replies:
        np.testing.assert_array_equal(averaged([noise(0, 100), noise(1, 100)], [4, 4]), reply.parameters)
    assert [0, 0] == [peer.retried for peer in group.exchanges[0]._peers]


def test_a_mean_that_could_not_be_sent_is_not_received():
    """A reply that asks for patience, or that was not delivered, lets no shard end."""
    shard = Shard(RUN, 1, 0, 1, size=4, layout=PART)
    shard.begin(0, [0, 0])
    shard.exchange(part(), lambda: part(parameters=noise(0, 4)))
    shard.sent(part(), delivered=False)
    assert -1 == shard._received[0]
    shard.sent(part())
    assert 0 == shard._received[0]
    assert [] == shard.aggregation.losses


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 5), st.integers(1, 300), st.integers(0, 1000))
def test_any_number_of_workers_averages_any_vector(workers, size, seed):
    """The law of the mean holds for any number of workers and any size."""
    with ExitStack() as stack:
        group = Workers(stack, workers, size)
        gradients = [noise(seed + worker, size) for worker in range(workers)]
        for reply in group.round(0, gradients):
            np.testing.assert_array_equal(averaged(gradients, [4] * workers), reply.parameters)
