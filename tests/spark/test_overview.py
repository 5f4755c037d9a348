"""The live pages of searches and schedulers, in a real browser: Chromium, if this machine has it."""

import re
import threading

import keras
import pytest
from browser import drawn, overflow, press, show_as, texts, violations

from sparkdl import SparkModel, scheduling, tune
from sparkdl.errors import SearchError

pytestmark = pytest.mark.spark
WIDTHS = 1280, 390


class Hold(keras.callbacks.Callback):
    """Waits at the end of each epoch until the viewer has seen it."""

    may_go_on = threading.Event()

    def __deepcopy__(self, memo):
        return self

    def on_epoch_end(self, epoch, logs=None):
        assert self.may_go_on.wait(60)


@pytest.fixture
def hold():
    Hold.may_go_on.clear()
    yield Hold.may_go_on
    Hold.may_go_on.set()


def build(units):
    """Return a small classifier, and no model for 13 units."""
    if units == 13:
        raise ValueError("13 units <b>are</b> unlucky")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def link(capsys, eventually):
    """Return the link that was printed."""
    printed = []
    assert eventually(lambda: printed.append(capsys.readouterr().out) or "key=" in "".join(printed), 60)
    return re.search(r"Live page: (\S+) \(works once\)", "".join(printed))[1]


def state(browser):
    return texts(browser, "#state")


@pytest.fixture
def searched(spark, problem, capsys, hold, eventually):
    """Search in a thread; return the thread's result, and the link of the page."""
    found = []
    options = {"num_trials": 6, "epochs": 2, "parallelism": 1, "validation_split": 0.2, "verbose": 2}
    space = {"units": [4, 13, 8, 16, 5, 6]}

    def search():
        rows = problem.x, problem.y
        try:
            found.append(
                tune.search(build, rows, space, sampler="grid", seed=3, callbacks=[Hold()], **options)
            )
        except SearchError as error:
            found.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    try:
        yield found, link(capsys, eventually)
    finally:
        hold.set()
        thread.join()


def test_a_search_is_watched_and_stopped(searched, browser, hold, eventually):
    """The page has a row for each trial, and curves; a viewer ends the search, which returns its result."""
    pytest.importorskip("axe_core_python")
    found, url = searched
    browser.get(url)
    assert eventually(lambda: any("running" in row for row in texts(browser, "#rows tbody tr")), 60)
    press(browser, "[data-stop=epoch]")
    assert eventually(lambda: state(browser) == ["Stopping"], 60)
    assert [] == violations(browser)
    hold.set()
    assert eventually(lambda: state(browser) == ["Stopped"], 60)
    assert eventually(lambda: bool(found), 60)

    table = found[0].trials
    ended = texts(browser, "#rows tbody tr th")
    assert sorted(map(str, table["number"]), key=int, reverse=True) == ended
    assert 0 < len(table) < 6
    assert "running" not in set(table["state"])
    best = found[0].best_trial
    assert f"{found[0].best_value:.4f} (trial {best.number})" in texts(browser, "#about dd")
    curve = found[0].curves()[best.number].tolist()
    assert curve == drawn(browser, "curves")[f"trial {best.number}"]
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            show_as(browser, width, scheme)

            assert [] == violations(browser), (width, scheme)
            assert 0 == overflow(browser), (width, scheme)


@pytest.mark.whole
def test_a_failed_trial_is_shown_with_its_reason(searched, browser, hold, eventually):
    """The reason of a trial that failed is text, whatever it contains."""
    found, url = searched
    hold.set()
    browser.get(url)
    assert eventually(lambda: state(browser) == ["Finished"], 60)

    rows = texts(browser, "#rows tbody tr")
    assert 6 == len(rows)
    assert 1 == sum("failed" in row and "13 units <b>are</b> unlucky" in row for row in rows)
    assert 1 == sum("best" in row for row in rows)
    assert not browser.find_elements("css selector", "#rows b")


@pytest.mark.whole
def test_a_search_is_stopped_at_once(searched, browser, hold, eventually):
    """Stop now ends the trials that are under way; a later search would repeat them."""
    found, url = searched
    browser.get(url)
    assert eventually(lambda: any("running" in row for row in texts(browser, "#rows tbody tr")), 60)
    press(browser, "[data-stop=now]")
    assert eventually(lambda: state(browser) == ["Stopping"], 60)
    hold.set()
    assert eventually(lambda: state(browser) == ["Stopped"], 60)
    assert eventually(lambda: bool(found), 60)

    assert str(found[0]) == "The search was stopped before a trial succeeded."
    assert {"repeated"} == set(texts(browser, "#rows tbody td:nth-child(2)"))


@pytest.mark.whole
@pytest.mark.parametrize("off", [{"verbose": 0}, {"dashboard": False}])
def test_a_search_without_a_dashboard_has_no_page(spark, problem, capsys, off):
    """With dashboard=False or verbose=0 a search prints no link."""
    options = {"metric": "loss", "num_trials": 1, "verbose": 2} | off
    tune.search(build, (problem.x, problem.y), {"units": [4]}, **options)

    assert "Live page" not in capsys.readouterr().out


def test_a_scheduler_shows_its_plan(spark, problem, capsys, browser, hold, eventually):
    """The page has a row for each job, with its state, and says when all have ended."""
    pytest.importorskip("axe_core_python")
    with scheduling.Scheduler(1) as scheduler:
        browser.get(link(capsys, eventually))
        for name in ("first", "second"):
            model = SparkModel(build(4), num_workers=1)
            scheduler.submit(model, problem.x, problem.y, name=name, epochs=2, callbacks=[Hold()])
        assert eventually(lambda: len(texts(browser, "#rows tbody tr")) == 2, 60)
        assert not browser.find_element("css selector", "[data-stop=now]").is_displayed()
        assert any("firstrunning" in row for row in texts(browser, "#rows tbody tr"))
        assert [] == violations(browser)
        hold.set()
    assert eventually(lambda: state(browser) == ["Finished"], 60)

    assert {"finished"} == set(texts(browser, "#rows tbody td:nth-child(2)"))
    losses = {
        name: job.history.history["loss"]
        for name, job in zip(("first", "second"), scheduler.jobs, strict=True)
    }
    assert losses == drawn(browser, "curves")


@pytest.mark.whole
def test_a_scheduler_without_a_dashboard_has_no_page(spark, capsys):
    """With dashboard=False a scheduler prints no link."""
    with scheduling.Scheduler(1, dashboard=False):
        pass

    assert "Live page" not in capsys.readouterr().out
