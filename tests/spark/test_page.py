"""The live page of a real fit, in a real browser: Chromium, if this machine has it."""

import http.client
import re
import socket
import threading
from contextlib import closing

import keras
import numpy as np
import pytest
from browser import drawn, overflow, press, requested, show_as, texts, violations
from proxy import Proxy
from relay import Relay

from sparkdl import Network, SparkModel
from sparkdl.errors import ClusterError
from sparkdl.server.monitoring import document
from sparkdl.transport.messages import ACTIVITIES

pytestmark = pytest.mark.spark
WIDTHS = 1280, 390
HEADINGS = ["Worker", "Host", "Device", "State", "Epoch", "Rows", "Rows/s", "Staleness", "Received", "Sent"]
HEADINGS += ["Heard", "Retries"]  # of the table of workers, in a run without late updates


class Fit(keras.callbacks.Callback):
    """A fit in a thread, which waits at the end of its second epoch, or of a later one, to be watched.

    Args:
        batch_size: rows per batch of a worker.
    """

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size, self.history = batch_size, None
        self.may_end, self.waits, self.losses = threading.Event(), threading.Event(), []
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(20_000, 8)).astype("float32")
        settings = {"batch_size": self.batch_size, "epochs": 1000, "validation_split": 0.1, "verbose": 2}
        spark_model = SparkModel(model, mode="asynchronous", num_workers=2)
        self.history = spark_model.fit(x, x[:, :1], callbacks=[self], **settings)

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        if epoch and not self.may_end.is_set():
            self.waits.set()
            self.may_end.wait(60)

    def hold(self):
        """Make the fit wait at the end of its epoch; return the number of epochs so far."""
        self.waits.clear()
        self.may_end.clear()
        assert self.waits.wait(60)
        return len(self.losses)

    def end(self):
        """End the fit, and wait for its end."""
        self.may_end.set()
        if self.model is not None:
            self.model.stop_training = True
        self.thread.join()


@pytest.fixture
def watched(request, spark, capsys, eventually):
    """Fit in a thread; return the fit, and the address, the port and the link of its page."""
    fit, printed = Fit(getattr(request, "param", 16)), []
    fit.thread.start()
    try:
        assert eventually(lambda: printed.append(capsys.readouterr().out) or "key=" in "".join(printed), 60)

        yield fit, *re.search(r"http://(\S+):(\d+)/(\?key=\S+)", "".join(printed)).groups()
    finally:
        fit.end()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def positions(browser):
    """Return the epoch and the rows of each worker, as in the table."""
    return [
        browser.execute_script(f"return arguments[0].cells[{place}].textContent", row)
        for row in browser.find_elements("css selector", "#workers tbody tr")
        for place in map(HEADINGS.index, ("Epoch", "Rows"))
    ]


@pytest.mark.one_case
@pytest.mark.parametrize("prefix", ["/user/ann/proxy/192.0.2.7:7100/", "/"])
def test_a_fit_is_watched_and_stopped(watched, browser, eventually, prefix):
    """A viewer sees curves and workers move, is connected again after a cut, and ends training with keys.

    A reverse proxy, which adds a prefix to all paths, changes nothing of this.
    """
    pytest.importorskip("axe_core_python")
    fit, address, port, key = watched
    with (
        Relay(int(port), 0, 0.0, host=address) as relay,  # which can cut the connection
        Proxy(address, relay.port, prefix) as proxy,
    ):
        site = f"http://{address}:{proxy.port}{prefix}"
        browser.get(site + key)
        assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) == 2, 60)
        assert HEADINGS == texts(browser, "#workers thead th")
        places, losses = positions(browser), drawn(browser)["training"]

        relay.cut()
        fit.may_end.set()
        assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) > 3, 60)
        assert eventually(lambda: all(map(str.__ne__, places, positions(browser))), 60)
        assert eventually(lambda: len(drawn(browser)["training"]) > 3, 60)

        assert 2 * 2 == len(places)
        assert losses == drawn(browser)["training"][:2] == fit.losses[:2]
        assert all(texts(browser, f"#chart-{name} svg") for name in ("loss", "staleness"))
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                show_as(browser, width, scheme)

                assert [] == violations(browser), (width, scheme)
                assert 0 == overflow(browser), (width, scheme)

        epochs = fit.hold()
        press(browser, "[data-stop=epoch]")
        assert eventually(lambda: texts(browser, "#state") == ["Stopping"], 60)
        fit.may_end.set()
        assert eventually(lambda: texts(browser, "#state") == ["Stopped"], 60)
        cookies = [(cookie["path"], cookie["httpOnly"]) for cookie in browser.get_cookies()]
    fit.thread.join()
    urls = requested(browser)

    assert 3 < epochs == len(fit.losses)
    assert (list(range(epochs)), fit.losses) == (fit.history.epoch, fit.history.history["loss"])
    assert fit.losses == drawn(browser)["training"]
    assert all(url.startswith((site, "data:")) for url in urls)
    assert site + "state" not in urls  # all updates came as events
    assert [(prefix.rstrip("/") or "/", True)] == cookies
    assert [] == [
        entry
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and "ERR_" not in entry["message"]  # of the cut
    ]


@pytest.mark.whole
@pytest.mark.parametrize("watched", [1], indirect=True)  # batches of one row: an epoch takes long
def test_a_fit_is_stopped_within_an_epoch(browser, watched, eventually):
    """Stop now ends training in the middle of an epoch, which is the last one of the History."""
    fit, address, port, key = watched
    browser.get(f"http://{address}:{port}/{key}")
    assert eventually(browser.find_element("id", "buttons").is_displayed, 60)
    before = positions(browser)
    assert eventually(lambda: positions(browser) != before, 60)

    press(browser, "[data-stop=now]")
    assert eventually(lambda: texts(browser, "#state") == ["Stopped"], 60)
    fit.thread.join()

    assert list(range(len(fit.losses))) == fit.history.epoch
    assert 0 < fit.history.training["epoch_rows"][-1] < 18_000
    assert len(fit.history.epoch) == len(texts(browser, "#epochs tbody tr"))


@pytest.mark.parametrize("dashboard", [True, False])
def test_a_fit_without_a_dashboard_has_no_page(spark, problem, capsys, port, dashboard):
    """With dashboard=False a fit prints no link, and its endpoint answers no browser with a page."""
    answers = []

    def look(epoch, logs):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("GET", "/")
            answers.append(connection.getresponse().headers["Content-Type"].partition(";")[0])

    SparkModel(problem.model(), num_workers=2, network=Network(port=port), dashboard=dashboard).fit(
        problem.x, problem.y, verbose=2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)]
    )

    assert dashboard == ("Live page" in capsys.readouterr().out)
    assert ["text/html" if dashboard else "application/json"] == answers


def test_a_port_that_is_taken_is_named(spark, problem, jobs):
    """A port that is taken is named before a job starts, and the model stays as it was."""
    model, before = problem.model(), jobs()
    start = model.get_weights()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"cannot listen on .*; tried port {port}.*Set port= to 0"):
            SparkModel(model, num_workers=2, network=Network(port=port)).fit(problem.x, problem.y, verbose=2)

    assert before == jobs()
    assert all(map(np.array_equal, start, model.get_weights()))
    assert 0 == int(model.optimizer.iterations)


def values(**changes):
    """Return the values of a record after two of five epochs, and changes of them."""
    worker = {
        "host": "ip-10-20-112-123.eu-west-1.compute.internal",
        "device": "CPU",
        "rows": 1_250_000,
        "epoch": 3,
        "seen": 1_123_456,
        "speed": 12345.6,
        "received": 123_400_000_000,
        "sent": 123_400_000_000,
        "heard": 0.4,
        "retries": 12,
        "lost": False,
        "times": [12.3, 4567.0, 890.1, 1234.0, 56.7],
        "staleness": 3,
        "dropped": 14,
    }
    return {
        "state": "training",
        "reason": "",
        "stop_request": None,
        "seconds": 31.0,
        "about": {"model": "net", "workers": 2, "first_epoch": 0, "epochs": 5, "mode": "asynchronous"},
        "progress": {"epoch": 2, "rows": 10, "total": 1000, "seconds": 1.0},
        "workers": [{"worker": 0, **worker}, {"worker": 1, **worker}],
        "staleness": [3, 1],
        "counts": {},
        "epochs": [
            {"epoch": k + 1, "seconds": 20.0 - 10 * k, "rows": 1000, "logs": {"loss": 1.0, "mae": 1.0}}
            for k in (0, 1)
        ],
        "points": [],
        "events": [],
        "whole": True,
    } | changes


@pytest.fixture
def show(browser, tmp_path, eventually):
    """Return a function that shows the values of a record in the browser, as a report."""

    def show(**changes):
        path = tmp_path / "values.html"
        path.write_text(document.report(values(**changes)), "utf-8")
        browser.get(path.as_uri())
        assert eventually(lambda: any(texts(browser, "#progress")), 60)  # under load, get may return earlier

    return show


def test_everyone_can_read_the_page_of_a_used_link(browser, tmp_path):
    """The page that explains a used link meets the rules of accessibility."""
    pytest.importorskip("axe_core_python")
    (tmp_path / "closed.html").write_text(document.closed("This page needs a link."), "utf-8")
    browser.get((tmp_path / "closed.html").as_uri())

    assert ["This page needs a link."] == texts(browser, "main p")[:1]
    assert [] == violations(browser)


def test_the_time_left_does_not_jump(browser, show):
    """The time left is that at the speed of the last epochs, or of the rows so far in the first."""
    show()
    later = texts(browser, "#progress")[0]
    show(epochs=[], progress={"epoch": 0, "rows": 500, "total": 1000, "seconds": 10.0})
    first = texts(browser, "#progress")[0]
    show(epochs=[], progress={"epoch": 0, "rows": 10, "total": 1000, "seconds": 1.0})
    compiling = texts(browser, "#progress")[0]

    # 1000 rows of epoch 2 in 10 s, and 10 rows of epoch 3 in 1 s; 2990 rows are left.
    assert "92 rows/s · 33 s left" in later
    assert "50 rows/s · 1 min 30 s left" in first
    assert "left" not in compiling


def test_the_tables_fit_a_laptop(browser, show):
    """With all columns and a long name of a host, no table is wider than a page of 1280 pixels."""
    browser.set_window_size(1280, 1000)
    show()
    wide = browser.execute_script(
        "return [...document.querySelectorAll('.scroll')]"
        ".filter((each) => each.scrollWidth > each.clientWidth)"
        ".map((each) => each.getAttribute('aria-label'))"
    )

    assert [] == wide
    assert [*HEADINGS[:8], "Dropped", *HEADINGS[8:]] == texts(browser, "#workers thead th")
    assert ["Worker", *ACTIVITIES] == texts(browser, "#times-table thead th")


def test_charts_take_the_colors_of_the_page(browser, show, eventually):
    """When the color scheme changes, each chart is drawn again, in the colors that the page has then."""
    show()
    of_charts = (
        "return [...document.querySelectorAll('.chart')].map((each) => "
        "[each.querySelector('.main-svg'), each.querySelector('text')].map((part, index) => "
        "getComputedStyle(part)[index ? 'fill' : 'backgroundColor']))"
    )
    of_page = (
        "return [[document.querySelector('section'), 'backgroundColor'], [document.body, 'color']]"
        ".map(([part, name]) => getComputedStyle(part)[name])"
    )
    seen = []
    for scheme in ("light", "dark", "light"):
        show_as(browser, WIDTHS[1], scheme)
        colors = browser.execute_script(of_page)
        assert eventually(lambda colors=colors: [colors] * 4 == browser.execute_script(of_charts), 10), scheme
        seen.append(colors)

    assert seen[0] == seen[2] != seen[1]
    assert 0 == overflow(browser)


def test_results_within_an_epoch_are_a_line(browser, show):
    """An epoch with several results has a line without marks, and one with a single result has none."""
    points = [{"at": at, "logs": {"loss": 1 - at / 4, "mae": 1.0}} for at in (0.2, 0.5, 0.8, 1.5, 2.01)]
    show(points=points)
    drawn = "document.getElementById('chart-loss').data.map((each) => [each.name, [each.x, each.mode]])"
    lines = dict(browser.execute_script(f"return {drawn}"))
    show(points=points[3:])
    without = dict(browser.execute_script(f"return {drawn}"))

    assert [[0.2, 0.5, 0.8, None], "lines"] == lines["within epochs"]
    assert ["training"] == list(without)


def test_charts_are_drawn_in_their_places_at_once(browser, show):
    """The first drawing of a chart has the size of its place, also before the browser reports a new size."""
    browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {"source": "window.ResizeObserver = class { observe() {} };"},
    )
    browser.set_window_size(1280, 1000)
    show()
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map((each) => "
        "[each.clientWidth, each.querySelector('.main-svg').getBoundingClientRect().width])"
    )

    assert 4 == len(sizes)
    assert all(abs(place - drawn) < 2 for place, drawn in sizes), sizes


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("header", "words"),
    [("Cookie", "did not receive the cookie"), ("X-CSRF-Token", "no X-CSRF-Token header")],
)
def test_a_proxy_that_removes_a_header_is_named(watched, browser, eventually, header, words):
    """Behind a proxy that removes a header of the page, the page says so, and training goes on."""
    fit, address, port, key = watched
    with Relay(int(port), 0, 0.0, host=address, removed=header) as relay:
        browser.get(f"http://{address}:{relay.port}/{key}")
        if header != "Cookie":
            assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) == 2, 60)

            browser.find_element("css selector", "[data-stop=epoch]").click()
        assert eventually(lambda: words in "".join(texts(browser, "#notice")), 60)
    fit.may_end.set()
    before = len(fit.losses)

    assert eventually(lambda: len(fit.losses) > before, 60)


@pytest.mark.whole
def test_a_proxy_that_holds_events_back_is_noticed(watched, browser, eventually):
    """Behind a proxy that passes events on only after the end of a run, the page asks for the state."""
    fit, address, port, key = watched
    with Proxy(address, int(port), "/proxy/7100/", streams=False) as proxy:
        browser.get(f"http://{address}:{proxy.port}/proxy/7100/{key}")
        assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) == 2, 60)

        fit.may_end.set()
        assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) > 3, 60)

        browser.find_element("css selector", "[data-stop=now]").click()
        assert eventually(lambda: "It may have ended." in "".join(texts(browser, "#notice")), 60)
    fit.thread.join()

    assert 3 < len(fit.losses) < 1000


def test_a_report_is_read_from_disk(browser, spark, problem, tmp_path):
    """The saved report shows the curves and the workers of the run, without a server."""
    history = SparkModel(problem.model(), num_workers=2).fit(
        problem.x, problem.y, epochs=3, verbose=0, validation_split=0.1
    )
    history.report(tmp_path / "run.html")
    browser.get((tmp_path / "run.html").as_uri())
    curves = drawn(browser)

    assert history.history["loss"] == curves["training"]
    assert history.history["val_loss"] == curves["validation"]
    assert ["Finished"] == texts(browser, "#state")
    assert 2 == len(texts(browser, "#workers tbody tr"))
    assert not browser.find_element("id", "buttons").is_displayed()
    assert [] == violations(browser)
    assert all(url.startswith(("file:", "data:")) for url in requested(browser))
    assert [] == browser.get_log("browser")


@pytest.mark.classic
def test_jobs_are_described_in_sparks_page(spark, problem):
    """Spark's own page names the model of each job and stage, unless the user has described the job."""
    context = spark.sparkContext
    store = context._jsc.sc().statusStore()
    known = store.jobsList(None).size()
    spark_model = SparkModel(problem.model(), num_workers=2)
    rows = spark.range(50).selectExpr("array_repeat(rand(1), 6) AS features", "id % 3 AS label")
    spark_model.fit(rows, verbose=0)
    spark_model.evaluate(rows)
    spark_model.predict(problem.x)
    context.setLocalProperty("spark.job.description", "mine")
    spark_model.evaluate(problem.x, problem.y)
    context.setLocalProperty("spark.job.description", None)
    jobs = store.jobsList(None)
    new = [jobs.apply(index) for index in range(jobs.size() - known)]  # the newest first
    texts = [job.description().get() for job in new]
    stages = [
        (text, store.lastStageAttempt(job.stageIds().apply(index)))
        for text, job in zip(texts, new, strict=True)
        for index in range(job.stageIds().size())
    ]

    assert {
        "sparkdl: first row for network",
        "sparkdl: fit network with 2 workers",
        "sparkdl: evaluate network",
        "sparkdl: predict with network",
        "mine",
    } == set(texts)
    for text, stage in stages:  # a stage that Spark skips, because its result is there, has none
        assert (f"Some({text})" if stage.status().toString() != "SKIPPED" else "None") == (
            stage.description().toString()
        )
