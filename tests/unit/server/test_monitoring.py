"""Tests of a run's record and of its live page: bounds, cursors, sessions and refusals."""

import http.client
import json
import sys
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from coordinators import begun, coordinator_of
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.monitoring import document, record
from sparkdl.server.monitoring.live import MOST_EVENTS, Cursor
from sparkdl.server.monitoring.page import VIEWERS, Page
from sparkdl.server.monitoring.record import MOST_POINTS, RunRecord
from sparkdl.server.state import Member, RowsHeld

ABOUT = {"model": "net", "workers": 2, "first_epoch": 0, "epochs": 5}


@pytest.fixture
def kept():
    return RunRecord(ABOUT)


class Run:
    """A run of two workers, as a record sees it."""

    def __init__(self):
        self.members = {k: Member(1, f"host-{k}", 7, 0.0, held=RowsHeld(100)) for k in (0, 1)}
        self.staleness, self.latest_staleness, self.snapshot = [3, 1], {0: 1}, "the beginning"
        self.plans = [SimpleNamespace(epoch_rows=100)] * 2
        self.counts = {"exchanges": 4, "retries": 0, "dropped": {1: 2}}

    def summary(self):
        return self.counts


# -- the record -----------------------------------------------------------------------------------


def test_a_record_has_a_bounded_size(kept, monkeypatch):
    """After 100,000 updates, epochs and events a record holds at most its limits of each."""
    monkeypatch.setattr(record, "TICK_SECONDS", 0.0)
    run, traffic = Run(), Traffic()
    kept.begin_epoch(0, 100_000)
    for step in range(100_000):
        kept.advance(step, 100_000, {"loss": 1.0}, run, traffic)
        kept.add_event("A snapshot was made.", "info")
    for epoch in range(5000):
        kept.end_epoch(epoch, 10, {"loss": 1.0}, run, traffic)
    values = kept.values()

    assert MOST_POINTS // 2 <= len(values["points"]) <= MOST_POINTS
    assert MOST_POINTS // 2 <= len(values["epochs"]) <= MOST_POINTS
    assert MOST_EVENTS == len(values["events"])
    assert 500_000 > len(json.dumps(values))


@given(st.lists(st.sampled_from(["epoch", "point", "event", "read"]), max_size=80), st.integers(2, 9))
def test_a_reader_with_a_cursor_misses_nothing(steps, most):
    """The parts that a reader gets with its cursor are together the whole record."""
    run, traffic, kept = Run(), Traffic(), RunRecord(ABOUT)
    seen, cursor = {"epochs": [], "points": [], "events": []}, Cursor()
    before = record.MOST_POINTS, record.TICK_SECONDS
    record.MOST_POINTS, record.TICK_SECONDS = most, -1.0
    try:
        for number, step in enumerate([*steps, "read"]):
            if step == "epoch":
                kept.end_epoch(number, 10, {"loss": float(number)}, run, traffic)
            elif step == "point":
                kept.advance(number, 1000, {"loss": float(number)}, run, traffic)
            elif step == "event":
                kept.add_event(f"Event {number}.", "info")
            else:
                values, cursor = kept.changes(Cursor.parse(str(cursor)))
                seen = {
                    name: values[name] if values["whole"] else part + values[name]
                    for name, part in seen.items()
                }
    finally:
        record.MOST_POINTS, record.TICK_SECONDS = before
    whole = kept.values()

    assert {name: whole[name] for name in seen} == seen


@given(st.text())
def test_any_text_is_a_cursor(text):
    """A cursor that a browser sends back may be any text; one that means nothing is the beginning."""
    kept = RunRecord(ABOUT)
    kept.add_event("Began.", "info")
    values, cursor = kept.changes(Cursor.parse(text))

    assert Cursor(0, 0, 0, 1) == cursor
    assert values["whole"] or text.startswith("0.")


def test_values_that_json_does_not_have_become_none(kept):
    """NaN and Inf in results become null; a result with several values becomes a list."""
    logs = {"loss": float("nan"), "f1": np.array([0.5, np.inf]), "count": 3}
    kept.end_epoch(0, 10, logs, Run(), Traffic())

    assert {"loss": None, "f1": [0.5, None], "count": 3} == kept.values()["epochs"][0]["logs"]
    json.dumps(kept.values(), allow_nan=False)


def events(kept):
    return [event["text"] for event in kept.values()["events"]]


def test_late_updates_are_an_event_per_epoch(kept):
    """An epoch has one event about the updates that came too late and one about those merged late, if any."""
    run, traffic = Run(), Traffic()
    for epoch, late in enumerate([{}, {}, {"dropped": {0: 1, 1: 5}, "late_merged": 4}]):
        run.counts |= late
        kept.begin_epoch(epoch, 100)
        kept.end_epoch(epoch, 100, {}, run, traffic)
    kept.settle(run, traffic)

    assert [
        "Late updates of epoch 1 were not merged (worker 1: 2).",
        "Late updates of epoch 3 were not merged (worker 0: 1, worker 1: 3).",
        "Late updates of epoch 3 were merged in later rounds (4).",
    ] == events(kept)


def test_snapshots_within_an_epoch_are_few_events(kept, coordinator, monkeypatch):
    """A snapshot within an epoch is an event, unless there was one a short time ago."""
    monkeypatch.setattr(record, "TICK_SECONDS", -1.0)
    run, traffic = Run(), Traffic()
    run.counts = {}
    for place, epoch in ((0, 0), (5, 0), (5, 0), (6, 0), (0, 1)):
        run.snapshot = replace(coordinator.snapshot, place=place, epoch=epoch)
        kept.advance(10, 100, {}, run, traffic)
    few = events(kept)
    monkeypatch.setattr(record, "SNAPSHOT_SECONDS", -1.0)
    run.snapshot = replace(coordinator.snapshot, place=7, epoch=1)
    kept.advance(10, 100, {}, run, traffic)

    assert ["Snapshot at round 5 of epoch 1."] == few
    assert [*few, "Snapshot at round 7 of epoch 2."] == events(kept)


def test_the_speed_of_a_worker(kept, monkeypatch):
    """A worker's speed is the number of rows between two heartbeats, divided by their distance in time."""
    monkeypatch.setattr(record, "TICK_SECONDS", -1.0)
    run, traffic = Run(), Traffic()
    kept.advance(0, 200, {}, run, traffic)
    run.members[0].heard, run.members[0].seen_rows = 2.0, 50
    kept.advance(50, 200, {}, run, traffic)
    first, second = kept.values()["workers"]

    assert (25.0, 1) == (first["speed"], first["staleness"])
    assert (0.0, None) == (second["speed"], second["staleness"])


def test_two_samples_in_a_moment_make_no_speed(kept):
    """The sample at an epoch's end, a moment after another one, does not count as a time without rows."""
    run, traffic = Run(), Traffic()
    for heard, rows in ((10.0, 0), (12.0, 50), (12.01, 80)):
        run.members[0].heard, run.members[0].seen_rows = heard, rows
        kept.end_epoch(0, 100, {}, run, traffic)
    moment = kept.values()["workers"][0]["speed"]
    run.members[0].heard, run.members[0].seen_rows = 14.0, 100
    kept.end_epoch(0, 100, {}, run, traffic)

    assert (25.0, 25.0) == (moment, kept.values()["workers"][0]["speed"])


def test_a_worker_that_left_has_its_last_state_and_mean_speed(kept, monkeypatch):
    """At the end a worker has the rows, the times and the mean speed as of its last heartbeat."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(record, "time", clock)
    run, traffic, kept = Run(), Traffic(), RunRecord(ABOUT)
    for epoch in (0, 1):
        kept.begin_epoch(epoch, 200)
        clock.now += 4.0
        kept.end_epoch(epoch, 200, {"loss": 1.0}, run, traffic)
    run.members[0].epoch, run.members[0].seen_rows, run.members[0].seconds = 1, 100, [1.0, 6.0]
    run.members[1].epoch, run.members[1].seen_rows = 2, 16  # of an epoch that the driver did not begin
    kept.settle(run, traffic)
    first, second = kept.values()["workers"]

    assert (2, 100, 25.0, [1.0, 6.0]) == tuple(first[name] for name in ("epoch", "seen", "speed", "times"))
    assert (2, 100, 25.0) == tuple(second[name] for name in ("epoch", "seen", "speed"))


def test_a_run_that_fails_keeps_the_rows_of_its_last_epoch(kept, monkeypatch):
    """After a failure within an epoch a worker has the rows that it trained, also those of a later epoch."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(record, "time", clock)
    run, traffic, kept = Run(), Traffic(), RunRecord(ABOUT)
    kept.begin_epoch(0, 200)
    clock.now += 4.0
    run.members[0].seen_rows = 50
    run.members[1].epoch, run.members[1].seen_rows = 1, 20
    kept.settle(run, traffic)
    first, second = kept.values()["workers"]

    assert (1, 50, 12.5) == tuple(first[name] for name in ("epoch", "seen", "speed"))
    assert (2, 20, 30.0) == tuple(second[name] for name in ("epoch", "seen", "speed"))


# -- the page -------------------------------------------------------------------------------------


@pytest.fixture
def page(kept):
    return Page(kept, bytes(range(16)))


@pytest.fixture
def coordinator():
    return begun(coordinator_of("asynchronous", workers=2, metrics=1))


@pytest.fixture
def port(coordinator, page):
    app = make_app(coordinator, "secret", Traffic(), page=page)
    with serve(app, "127.0.0.1", 0, 1, num_viewers=VIEWERS) as port:
        yield port
        page.record.finish("finished")


def ask(port, path, method="GET", body=b"", **headers):
    """Return the status, the headers and the body of an answer."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def opened(port, page):
    """Open the page; return its cookie and its CSRF token."""
    status, headers, html = ask(port, "/" + page.link())
    settings = html.split(b'id="settings">')[1].split(b"</script>")[0]

    assert 200 == status
    return headers["Set-Cookie"].split(";")[0], json.loads(settings)["csrf"]


def test_a_link_opens_the_page_once(port, page):
    """A link works once, and its browser then has a cookie that scripts and other sites cannot use."""
    link = page.link()
    first, second = ask(port, f"/{link}"), ask(port, f"/{link}")

    assert (200, 401) == (first[0], second[0])
    assert all(word in first[1]["Set-Cookie"] for word in ("HttpOnly", "SameSite=Strict"))
    assert 200 == ask(port, "/", Cookie=first[1]["Set-Cookie"].split(";")[0])[0]
    assert b"://" not in first[2]


@pytest.mark.parametrize("path", ["/", "/?key=", "/?key=%C3%A9", "/state", "/events", "/plotly.js"])
def test_strangers_are_refused(port, path):
    """Without a session, and with the run's token in its place, nothing of the page can be read."""
    assert 401 == ask(port, path)[0]
    assert 401 == ask(port, path, Cookie="sparkdl-000102030405=guess")[0]
    assert 401 == ask(port, path, Authorization="Bearer secret")[0]


def test_a_used_link_is_explained_to_a_person(port, page):
    """A used link answers with a page that explains the remedy; paths that scripts read answer with JSON."""
    link = page.link()
    opened, refused = ask(port, f"/{link}"), ask(port, f"/{link}")
    html, headers = refused[2].decode(), refused[1]
    kept = "X-Content-Type-Options", "Referrer-Policy", "Cache-Control", "Content-Type"

    assert "Link for another viewer" in html
    assert "{" not in html.partition("<body>")[2]
    assert "<script" not in html
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert [opened[1][name] for name in kept] == [headers[name] for name in kept]
    assert headers["Set-Cookie"] is None
    assert "close" == headers["Connection"]
    assert "Link for another viewer" in json.loads(ask(port, "/state")[2])["error"]


def test_refused_viewers_are_no_refused_requests(port, page):
    """The counts of a run have refused requests of workers and unknown clients, not of the page's viewers."""
    cookie, _ = opened(port, page)
    for path in ("/", "/?key=used", "/state", "/events"):
        ask(port, path)
    ask(port, "/stop", "POST", b"{}", Cookie=cookie)
    viewers = json.loads(ask(port, "/v1/status", Authorization="Bearer secret")[2])
    ask(port, "/v1/status")
    stranger = json.loads(ask(port, "/v1/status", Authorization="Bearer secret")[2])

    assert (0, 1) == (viewers["refused_requests"], stranger["refused_requests"])


@pytest.mark.parametrize("path", ["/v1/status", "/v1/join", "/v1/exchange"])
def test_a_viewer_is_no_worker(port, page, path):
    """The session of a viewer does not open the paths of workers."""
    cookie, csrf = opened(port, page)
    method = "GET" if path == "/v1/status" else "POST"

    assert 401 == ask(port, path, method, b"{}", Cookie=cookie, X_CSRF_Token=csrf)[0]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"when": "now"}', 200), (b'{"when": "epoch"}', 200), (b'{"when": "later"}', 400), (b"[", 400)],
)
def test_a_button_asks_the_run_to_stop(port, page, kept, body, status):
    """A request to stop is recorded, if it carries the page's CSRF token and says when."""
    cookie, csrf = opened(port, page)
    refused = ask(port, "/stop", "POST", body, Cookie=cookie)
    untouched = kept.stop_request
    answered = ask(port, "/stop", "POST", body, Cookie=cookie, X_CSRF_Token=csrf)

    assert (403, None) == (refused[0], untouched)
    assert b"no X-CSRF-Token header" in refused[2]
    assert status == answered[0]
    assert (json.loads(body)["when"] if status == 200 else None) == kept.stop_request


def test_a_viewer_may_invite_another(port, page):
    """A link that the page hands out opens it in another browser, once."""
    cookie, csrf = opened(port, page)
    link = json.loads(ask(port, "/link", "POST", b"{}", Cookie=cookie, X_CSRF_Token=csrf)[2])["link"]

    assert [200, 401] == [ask(port, f"/{link}")[0] for _ in range(2)]


@contextmanager
def stream(port, cookie, **headers):
    """Open a stream of events; yield its status and a function that reads the next event."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/events", headers={"Cookie": cookie, **headers})
        answer = connection.getresponse()

        def event():
            lines = []
            while (line := answer.readline()) not in (b"\n", b""):
                lines.append(line.decode().rstrip("\n").split(": ", 1))
            return dict(lines)

        yield answer.status, event


def test_a_stream_goes_on_after_a_cut(port, page, kept):
    """A stream begins with the whole record; a new one begins with the parts that the browser lacks."""
    cookie, _ = opened(port, page)
    kept.add_event("One.", "info")
    with stream(port, cookie) as (_, event):
        first = event()
    kept.add_event("Two.", "info")
    with stream(port, cookie, **{"Last-Event-ID": first["id"]}) as (_, event):
        second = event()

    assert "text/event-stream" in ask_head(port, cookie)
    assert ["One."] == [each["text"] for each in json.loads(first["data"])["events"]]
    assert ["Two."] == [each["text"] for each in json.loads(second["data"])["events"]]
    assert "about" not in json.loads(second["data"])


def ask_head(port, cookie):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/events", headers={"Cookie": cookie})
        return connection.getresponse().headers["Content-Type"]


def test_a_stream_ends_with_the_run(port, page, kept):
    """The last event of a stream has the final state of the run."""
    cookie, _ = opened(port, page)
    with stream(port, cookie) as (_, event):
        event()
        kept.finish("failed", "The cluster is gone.")
        last = json.loads(event()["data"])
        end = event()

    assert ("failed", "The cluster is gone.") == (last["state"], last["reason"])
    assert {} == end


def test_streams_take_no_thread_from_workers(port, page):
    """As many streams as are allowed leave room for workers; one more is refused."""
    cookie, _ = opened(port, page)
    streams = [stream(port, cookie) for _ in range(VIEWERS)]
    statuses = [each.__enter__()[0] for each in streams]
    refused = ask(port, "/events", Cookie=cookie)
    pinged = ask(port, "/v1/ping", Authorization="Bearer secret")
    page.record.finish("finished")
    for each in streams:
        each.__exit__(None, None, None)

    assert [200] * VIEWERS == statuses
    assert (503, 204) == (refused[0], pinged[0])


def test_a_page_without_its_chart_library(port, page, monkeypatch):
    """Without plotly the page names the package to install, and requests no library."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    document.chart_library.cache_clear()
    try:
        cookie, _ = opened(port, page)
        html, answer = ask(port, "/", Cookie=cookie)[2], ask(port, "/plotly.js", Cookie=cookie)
    finally:
        document.chart_library.cache_clear()

    assert b"pip install" in html
    assert b"src=" not in html
    assert 404 == answer[0]


def test_a_report_holds_no_markup_of_its_values(kept):
    """Text of the run, such as a model's name or an event, cannot become markup of the page."""
    kept.about["model"] = "</script><script>alert(1)</script>"
    html = document.report(kept.values())

    assert "alert(1)" in html
    assert "<script>alert(1)" not in html


def test_text_that_looks_like_a_part_of_the_page_stays_text(kept):
    """A model whose name is that of a part of the document does not break a report."""
    kept.about["model"] = "{script} {nonce}"
    settings = document.report(kept.values()).split('id="settings">')[1].split("</script>")[0]

    assert "{script} {nonce}" == json.loads(settings)["run"]["about"]["model"]


@pytest.mark.parametrize("body", [b"[" * 900, b"x" * 5000, b""], ids=["deep", "long", "empty"])
def test_a_bad_request_to_the_page_does_not_end_the_run(coordinator, port, page, body):
    """A request that the page cannot read is refused, and the run goes on."""
    cookie, csrf = opened(port, page)

    assert 400 == ask(port, "/stop", "POST", body, Cookie=cookie, X_CSRF_Token=csrf)[0]
    assert coordinator.failure is None


def test_an_error_of_the_page_does_not_end_the_run(coordinator, port, page, monkeypatch):
    """Whatever the page raises, the run goes on."""
    cookie, _ = opened(port, page)
    monkeypatch.setattr(document, "live", lambda *kinds, **options: 1 / 0)

    assert 500 == ask(port, "/", Cookie=cookie)[0]
    assert coordinator.failure is None


@pytest.mark.parametrize(
    ("encrypted", "schemes", "secure"),
    [
        (True, "", True),
        (False, "", False),
        (False, "https", True),
        (False, "https, http", True),
        (False, "http,https", False),
    ],
)
def test_a_cookie_is_sent_to_the_page_only(port, page, encrypted, schemes, secure):
    """The cookie is for the page's folder, and if the browser uses TLS never sent without it."""
    page.encrypted = encrypted
    _, headers, _ = ask(port, f"/{page.link()}", X_Forwarded_Proto=schemes)

    assert "Path" not in headers["Set-Cookie"]
    assert secure == ("Secure" in headers["Set-Cookie"])


def test_an_endpoint_without_a_page(served_without_page):
    """With dashboard=False the endpoint has no page."""
    assert 401 == ask(served_without_page, "/")[0]
    assert 404 == ask(served_without_page, "/", Authorization="Bearer secret")[0]


@pytest.fixture
def served_without_page():
    app = make_app(begun(coordinator_of("asynchronous", workers=2, metrics=1)), "secret", Traffic())
    with serve(app, "127.0.0.1", 0, 1) as port:
        yield port
