"""Prometheus scrapes a fit while it trains."""

import http.client
import socket
from contextlib import closing

import keras
import pytest

from sparkdl import Network, SparkModel
from sparkdl.errors import ConfigError
from sparkdl.server.monitoring.metrics import TOKEN_SETTING
from sparkdl.spark import application

parser = pytest.importorskip("prometheus_client.parser")
TOKEN = "a-token-for-prometheus"


def scrape(port, token):
    """Return the status of a scrape, and its samples by name, or by name and the values of their labels."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read().decode() if answer.status == 200 else ""
    families = parser.text_string_to_metric_families(text)
    samples = {(each.name, *each.labels.values()): each.value for one in families for each in one.samples}
    return answer.status, samples


@pytest.fixture
def token_file(spark, monkeypatch, tmp_path):
    """A file that the application's settings name, with a token."""
    application.application_of().setting(TOKEN_SETTING)  # reads the settings
    path = tmp_path / "token"
    path.write_text(TOKEN)
    monkeypatch.setitem(application._settings[spark.sparkContext], TOKEN_SETTING, str(path))
    return path


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_fit_is_scraped_with_a_token(problem, token_file, port):
    """Each scrape has the counts so far; without the token, and after the fit, there are none."""
    scrapes, statuses = [], []

    def look(epoch, logs):
        for token in (TOKEN, "another-token"):
            status, samples = scrape(port, token)
            statuses.append(status)
            scrapes.extend([samples] * bool(samples))

    watch = keras.callbacks.LambdaCallback(on_epoch_end=look)
    history = SparkModel(problem.model(), num_workers=2, network=Network(port=port)).fit(
        problem.x, problem.y, epochs=2, batch_size=29, callbacks=[watch], verbose=0
    )

    assert [200, 401, 200, 401] == statuses
    assert [2, 2] == [each["sparkdl_workers", "joined"] for each in scrapes]
    assert [14, 28] == [each["sparkdl_exchanges_total",] for each in scrapes]
    assert [0, 1] == [each["sparkdl_refused_requests_total",] for each in scrapes]
    assert len(problem.x) == scrapes[0]["sparkdl_epoch_rows",]
    assert history.training["losses"][0][-1] == pytest.approx(scrapes[0]["sparkdl_loss",])
    assert 0 < scrapes[0]["sparkdl_received_bytes_total",] < scrapes[1]["sparkdl_received_bytes_total",]
    with pytest.raises(ConnectionRefusedError):
        scrape(port, TOKEN)


def test_a_missing_token_file_ends_the_fit_before_a_job(problem, token_file, jobs):
    """The error names the setting, and no job has started."""
    token_file.unlink()
    before = jobs()
    with pytest.raises(ConfigError, match=f"{TOKEN_SETTING} should be the path of a file"):
        SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, verbose=0)

    assert before == jobs()
