"""The live page of a real fit, in a real browser: Chromium, if this machine has it."""

import json
import re
import shutil
import threading
from importlib.resources import files

import keras
import numpy as np
import pytest
from relay import Relay

from sparkdl import History, SparkModel
from sparkdl.errors import ConfigError
from sparkdl.server.monitoring import document
from sparkdl.transport.messages import ACTIVITIES

pytestmark = pytest.mark.spark
WIDTHS = 1280, 390


class Fit(keras.callbacks.Callback):
    """A fit in a thread, whose second epoch does not end too soon to be watched."""

    def __init__(self):
        super().__init__()
        self.may_end, self.losses = threading.Event(), []
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(20_000, 8)).astype("float32")
        settings = {"batch_size": 16, "epochs": 1000, "validation_split": 0.1, "verbose": 2}
        spark_model = SparkModel(model, mode="asynchronous", num_workers=2)
        spark_model.fit(x, x[:, :1], callbacks=[self], **settings)

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        if epoch == 1:
            self.may_end.wait(60)

    def end(self):
        """End the fit, and wait for its end."""
        self.may_end.set()
        if self.model is not None:
            self.model.stop_training = True
        self.thread.join()


@pytest.fixture
def watched(spark, capsys, eventually):
    """Fit in a thread; return the fit, and the address, the port and the link of its page."""
    fit, printed = Fit(), []
    fit.thread.start()
    try:
        assert eventually(lambda: printed.append(capsys.readouterr().out) or "key=" in "".join(printed), 60)

        yield fit, *re.search(r"http://(\S+):(\d+)/(\?key=\S+)", "".join(printed)).groups()
    finally:
        fit.end()


@pytest.fixture
def browser():
    """Return a browser without a window and without requests of its own."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium or its driver is not installed.")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-background-networking", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
    )


def violations(browser):
    """Return the rules of accessibility that the page breaks, by axe-core."""
    browser.execute_script(files("axe_core_python").joinpath("axe.min.js").read_text())
    return browser.execute_async_script(
        "axe.run().then((result) => arguments[0](result.violations.map((each) => each.id)))"
    )


def requested(browser):
    """Return the addresses that the browser requested since the last call."""
    entries = [entry["message"] for entry in browser.get_log("performance")]
    sent = [entry for entry in entries if '"Network.requestWillBeSent"' in entry]
    return {url for entry in sent for url in re.findall(r'"url":"([^"]+)"', entry)}


def test_a_fit_is_watched_and_stopped(watched, browser, eventually):
    """A viewer sees curves and workers move, is connected again after a cut, and ends training."""
    pytest.importorskip("axe_core_python")
    fit, address, port, key = watched
    with Relay(int(port), 0, 0.0, host=address) as relay:  # a proxy, which can cut the connection
        browser.get(f"http://{address}:{relay.port}/{key}")
        assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) == 2, 60)

        relay.cut()
        fit.may_end.set()
        assert eventually(lambda: len(texts(browser, "#epochs tbody tr")) > 3, 60)

        moving = texts(browser, "#workers tbody tr")
        assert eventually(lambda: texts(browser, "#workers tbody tr") != moving, 60)
        assert 2 == len(moving)
        assert all(texts(browser, f"#chart-{name} svg") for name in ("loss", "staleness"))
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                browser.set_window_size(width, 1000)
                browser.execute_cdp_cmd(
                    "Emulation.setEmulatedMedia",
                    {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
                )

                assert [] == violations(browser), (width, scheme)

        browser.find_element("css selector", "[data-stop=epoch]").click()
        assert eventually(lambda: texts(browser, "#state") == ["Stopped"], 60)
    fit.thread.join()
    epochs = len(fit.losses)

    assert 3 < epochs < 1000
    assert epochs == len(texts(browser, "#epochs tbody tr"))
    assert all(url.startswith((f"http://{address}:{relay.port}/", "data:")) for url in requested(browser))
    assert [] == [
        entry
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and "ERR_" not in entry["message"]  # of the cut
    ]


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
    assert ["Worker", *ACTIVITIES] == texts(browser, "#times-table thead th")


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


@pytest.fixture(scope="module")
def traced(spark, problem):
    """The History of a fit of two workers whose 16 batches are all traced."""
    spark_model = SparkModel(problem.model(), mode="asynchronous", num_workers=2)
    return spark_model.fit(
        problem.x, problem.y, batch_size=16, epochs=3, verbose=0, validation_split=0.1, profile=(1, 1000)
    )


def test_a_report_is_read_from_disk(browser, traced, tmp_path):
    """The saved report shows the curves and the workers of the run, without a server."""
    traced.report(tmp_path / "run.html")
    browser.get((tmp_path / "run.html").as_uri())
    curves = browser.execute_script(
        "return document.getElementById('chart-loss').data.map((each) => [each.name, each.y])"
    )

    assert traced.history["loss"] == dict(curves)["training"]
    assert traced.history["val_loss"] == dict(curves)["validation"]
    assert ["Finished"] == texts(browser, "#state")
    assert 2 == len(texts(browser, "#workers tbody tr"))
    assert not browser.find_element("id", "buttons").is_displayed()
    assert [] == violations(browser)
    assert all(url.startswith(("file:", "data:")) for url in requested(browser))
    assert [] == browser.get_log("browser")


def test_a_report_has_the_last_state_of_each_worker(traced):
    """A run that is shorter than a heartbeat has all rows and the times of each worker, as of its end."""
    workers = traced.run["workers"]

    assert [3, 3] == [worker["epoch"] for worker in workers]
    assert list(traced.training["worker_rows"]) == [worker["seen"] for worker in workers]
    assert all(worker["speed"] > 0 and sum(worker["times"]) > 0 for worker in workers)


def test_a_trace_accounts_for_the_time(traced, tmp_path):
    """The spans of a worker are in order, do not overlap, and cover its epochs."""
    traced.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]

    assert [True, True] == [name.startswith(f"worker {worker} on ") for worker, name in enumerate(names)]
    for worker in (0, 1):
        mine = [event for event in spans if event["pid"] == worker]
        ends = [event["ts"] + event["dur"] for event in mine]
        covered = sum(event["dur"] for event in mine)

        assert {"data", "compute", "exchange", "merge"} <= {event["name"] for event in mine} <= {*ACTIVITIES}
        assert all(after["ts"] >= end - 1 for end, after in zip(ends, mine[1:], strict=False))
        assert 0.95 * (ends[-1] - mine[0]["ts"]) <= covered <= 1.05 * (ends[-1] - mine[0]["ts"])


@pytest.mark.parametrize("profile", [(0, 5), (5, 4), (1, 2000), "10", (1.0, 2), (1,), (True, 2)])
def test_a_profile_that_is_no_range_is_refused(problem, profile):
    """A profile that is not a range of batches raises ConfigError before a job starts."""
    with pytest.raises(ConfigError, match="profile should be the first and the last batch"):
        SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, profile=profile)


def test_a_profile_needs_an_endpoint_on_the_driver(problem):
    """A profile with an endpoint in worker 0, whose trace does not reach the driver, is refused."""
    with pytest.raises(ConfigError, match='profile needs placement="driver" or "executors"'):
        SparkModel(problem.model(), placement="worker").fit(problem.x, problem.y, profile=(1, 2))


def test_a_profile_after_the_last_batch_is_refused(spark, problem):
    """A profile that begins after the last batch raises ConfigError, and the weights stay as they were."""
    spark_model = SparkModel(problem.model(), num_workers=2)
    before = spark_model.model.get_weights()
    with pytest.raises(ConfigError, match="begins after the last batch"):
        spark_model.fit(problem.x, problem.y, profile=(100_000, 100_010), verbose=0)

    assert all(np.array_equal(a, b) for a, b in zip(before, spark_model.model.get_weights(), strict=True))


def test_files_that_cannot_be_written_are_errors(traced, tmp_path):
    """A path that cannot be written raises the error of Python, and a History without a fit has no report."""
    for save in (traced.report, traced.save_trace):
        with pytest.raises(FileNotFoundError):
            save(tmp_path / "missing" / "file")
    for save in (History().report, History().save_trace):
        with pytest.raises(ConfigError):
            save(tmp_path / "file")


@pytest.mark.classic
def test_jobs_are_described_in_sparks_page(spark, problem):
    """Spark's own page names the fit of a job, unless the user has described the job."""
    context = spark.sparkContext
    store = context._jsc.sc().statusStore()
    spark_model = SparkModel(problem.model(), num_workers=2)
    for described in (None, "mine"):
        context.setLocalProperty("spark.job.description", described)
        spark_model.fit(problem.x, problem.y, verbose=0)
    context.setLocalProperty("spark.job.description", None)
    jobs = store.jobsList(None)
    found = [jobs.apply(index).description() for index in range(jobs.size())]
    texts = [each.get() for each in found if each.isDefined()]

    assert {f"sparkdl: fit {spark_model.model.name} with 2 workers", "mine"} <= set(texts)
