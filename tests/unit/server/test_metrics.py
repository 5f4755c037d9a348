"""The metrics of a run at /metrics, read with Prometheus's own parser."""

import gc
import sys
import weakref

import numpy as np
import pytest
from coordinators import begun, coordinator_of, give, push, report_of, together

from sparkdl.errors import ConfigError
from sparkdl.server.aggregation import Hybrid
from sparkdl.server.allreduce import AllReduceCoordinator
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.monitoring.metrics import metrics_token

parser = pytest.importorskip("prometheus_client.parser")
TOKEN = {"Authorization": "Bearer secret"}
READER = {"Authorization": "Bearer reader"}


def get(coordinator, path="/metrics", headers=TOKEN):
    return (
        make_app(coordinator, "secret", Traffic(), metrics_token="reader")
        .test_client()
        .get(path, headers=headers)
    )


def scraped(coordinator):
    """Return the samples by name, or by name and the value of their label."""
    families = parser.text_string_to_metric_families(get(coordinator).text)
    samples = [sample for family in families for sample in family.samples]
    return {(each.name, *each.labels.values()): each.value for each in samples}


def test_a_scrape_has_the_counts_and_the_progress_of_a_run():
    """Workers, epoch, rows, exchanges, merges and the last loss are those of the coordinator."""
    coordinator = begun(coordinator_of("asynchronous", workers=2, epochs=3))
    push(coordinator, 0, np.ones(5), loss=0.5)
    push(coordinator, 1, np.ones(5), loss=0.25)
    coordinator.heartbeat(0, 1, 1, epoch=0, rows=8, retries=2, log=[])
    samples = scraped(coordinator)

    expected = {
        ("sparkdl_workers", "joined"): 2,
        ("sparkdl_workers", "lost"): 0,
        ("sparkdl_workers", "missing"): 0,
        ("sparkdl_worker_epoch_rows", "0"): 8,
        ("sparkdl_worker_epoch_rows", "1"): 0,
        ("sparkdl_exchanges_total",): 2,
        ("sparkdl_retries_total",): 2,
        ("sparkdl_merges_total",): 2,
        ("sparkdl_restarts_total",): 0,
        ("sparkdl_epoch",): 0,
        ("sparkdl_epochs",): 3,
        ("sparkdl_epoch_rows",): 20,
        ("sparkdl_loss",): 0.25,
    }
    assert expected == {name: samples[name] for name in expected}
    assert 0 <= samples["sparkdl_worker_silence_seconds", "0"] < 60


def test_a_restart_and_new_weights_leave_the_merges_as_they_are():
    """A round that was rolled back still counts, and neither a restart nor weights from a callback do."""
    coordinator = begun(coordinator_of(workers=1, joint=False))
    push(coordinator, 0, np.ones(5))
    coordinator.restart()
    coordinator.replace(np.zeros(5, np.float32), np.zeros(0, np.float32))
    samples = scraped(coordinator)

    assert (1, 0) == (samples["sparkdl_merges_total",], samples["sparkdl_restarts_total",])


def test_the_last_loss_stays_after_an_epoch():
    """At an epoch's end the driver takes the losses, and the last one can still be read."""
    coordinator = begun(coordinator_of("asynchronous", workers=1))
    push(coordinator, 0, np.ones(5), loss=0.5)
    give(coordinator, report_of(coordinator, 0, sequence=1))
    coordinator.commit(coordinator.wait_epoch(0, 1).snapshot)
    samples = scraped(coordinator)

    assert (0.5, 1) == (samples["sparkdl_loss",], samples["sparkdl_epoch",])


def test_lost_and_late_workers_are_counted():
    """A lost worker changes its state, and a dropped update counts as late."""
    coordinator = begun(coordinator_of(workers=3, joint=False, hybrid=Hybrid(2, 5.0, False), goes_on=True))
    together(lambda: push(coordinator, 0, np.ones(5)), lambda: push(coordinator, 1, np.ones(5)))
    push(coordinator, 2, np.ones(5))
    with coordinator.changed:
        coordinator.lose(2, "Worker 2 is gone.")
    samples = scraped(coordinator)

    assert (2, 1) == (samples["sparkdl_workers", "joined"], samples["sparkdl_workers", "lost"])
    assert (1, 1) == (samples["sparkdl_lost_workers_total",], samples["sparkdl_late_dropped_updates_total",])


def test_a_run_of_a_function_has_no_epochs():
    """The endpoint of `sparkdl.run` has the counts of its workers, and no progress of training."""
    samples = scraped(AllReduceCoordinator(b"r" * 16, 2))

    assert 2 == samples["sparkdl_workers", "missing"]
    assert ("sparkdl_epoch",) not in samples


def test_nothing_of_a_run_outlives_it():
    """A scrape leaves prometheus_client's own registry as it was, and does not keep the coordinator."""
    registry = pytest.importorskip("prometheus_client").REGISTRY
    before = [family.name for family in registry.collect()]
    coordinator = begun(coordinator_of())
    scraped(coordinator)
    gone = weakref.ref(coordinator)
    del coordinator
    gc.collect()

    assert before == [family.name for family in registry.collect()]
    assert gone() is None


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/metrics", {}, 401),
        ("/metrics", {"Authorization": "Bearer other"}, 401),
        ("/metrics", READER, 200),
        ("/v1/status", READER, 401),
        ("/v1/ping", READER, 401),
        ("/metrics/", READER, 401),
    ],
)
def test_the_metrics_have_a_token_of_their_own(path, headers, status):
    """Without a token nothing is read, and Prometheus's token reads the metrics only."""
    assert status == get(begun(coordinator_of()), path, headers).status_code


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    """Status 501 names the extra to install, and the run goes on."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = get(begun(coordinator_of()))

    assert 501 == answer.status_code
    assert 'pip install "sparkdl-keras[metrics]"' in answer.json["error"]


def test_a_scrape_that_fails_does_not_end_the_run(monkeypatch):
    """An error in the metrics is the scrape's own: status 500 with its reason, and no failure of the run."""
    coordinator = begun(coordinator_of())
    monkeypatch.setattr("prometheus_client.generate_latest", lambda registry: 1 / 0)
    answer = get(coordinator)

    assert (500, None) == (answer.status_code, coordinator.failure)
    assert "division by zero" in answer.json["error"]


def test_the_token_is_read_from_a_file(tmp_path):
    """A file holds the token, and a line's end after it does not count."""
    (tmp_path / "token").write_text("0123456789abcdef\n")

    assert "0123456789abcdef" == metrics_token(str(tmp_path / "token"))
    assert "" == metrics_token("")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"short", "at least 16 characters without spaces; .* has 5 characters. Make one with"),
        (b"two words and a few more", "without spaces"),
        (b"line\nsecond line, for length", "without spaces"),
        ("gehörnt und lang genug".encode(), "the path of a file on the driver"),
    ],
)
def test_a_bad_token_file_is_refused(tmp_path, content, message):
    """A file that is missing, or holds something else than a token, ends the fit with its reason."""
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        metrics_token(str(tmp_path / "token"))
