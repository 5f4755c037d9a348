"""The live page of a run, or of several fits: the routes that serve it, and its sessions.

* ``GET  /``             HTML: the page, or with status 401 how to open it;
* ``GET  /state``        JSON: all values of the record;
* ``GET  /events``       Server-Sent Events: the values, then what is new, at most once per second;
* ``GET  /plotly.js``    JavaScript: the chart library of the plotly package, if it is installed;
* ``POST /stop``         JSON: end training, ``{"when": "now"}`` or ``{"when": "epoch"}``;
* ``POST /link``         JSON: a link for another viewer.

The page belongs to an endpoint, whose token its viewers do not have. A link has a key that works once:
it opens the page and sets the cookie of a session. POST requests also need the header ``X-CSRF-Token``, whose
value is only in the page. All addresses are relative, so that the page works behind a proxy that adds a
prefix.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import threading
from collections.abc import Iterator

import flask
from flask.typing import ResponseReturnValue

from sparkdl.errors import RefusedError
from sparkdl.server.http_server import App, json_body
from sparkdl.server.monitoring import document
from sparkdl.server.monitoring.live import ENDED, TICK_SECONDS, Cursor, LiveRecord

VIEWERS = 12  # maximum number of streams of events; each keeps a thread of the endpoint
KEEPALIVE_SECONDS = 5.0  # time after which a stream without news sends a comment
KEYS = 100  # maximum number of links that were not opened yet
KEY = re.compile(rb"[A-Z]+ [^ \r\n]*[?&]key=([\w-]+)")  # the first line of a request with a key
PAGE = "page"  # Flask's name for the routes of the page
BODY_BYTES = 1000  # size limit of a request's body
REFUSAL = (
    "This page needs a link that was not used before, or the browser that opened it. Press "
    '"Link for another viewer" on the open page.'
)
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data: blob:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


class Page:
    """The live page of one record.

    Args:
        record: the record of a run, or of several fits.
        run: the bytes that identify it. A browser sends the cookies of a host to all ports, so the cookie's
            name has to tell two pages apart.
    """

    def __init__(self, record: LiveRecord, run: bytes) -> None:
        self.record = record
        self.cookie = f"sparkdl-{run.hex()[:12]}"
        self._session, self._csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._cookie = re.compile(rb"\b%b=([\w-]+)" % re.escape(self.cookie).encode())
        self._lock = threading.Lock()
        self._keys: list[str] = []
        self._viewers = 0
        self.encrypted = False  # whether the endpoint uses TLS

    def link(self) -> str:
        """Return a relative link that opens the page once."""
        key = secrets.token_urlsafe(24)
        with self._lock:
            self._keys = [*self._keys, key][-KEYS:]
        return f"?key={key}"

    def add_to(self, app: App) -> None:
        """Add the routes of the page to the endpoint's app."""
        app.secrets.append(self.admits)
        routes = flask.Blueprint(PAGE, __name__)
        routes.before_request(self._check)
        routes.get("/")(self.show)
        routes.get("/state")(self.state)
        routes.get("/events")(self.events)
        routes.get("/plotly.js")(self.plotly)
        routes.post("/stop")(self.stop)
        routes.post("/link", endpoint="link")(self.new_link)
        app.register_blueprint(routes)

    def _check(self) -> flask.Response | None:
        """Require a session, or a link that was not used yet, and for POST requests the page's CSRF token.

        Returns:
            None if the request may go on. For a person who opens the page without a session or such a link,
            an HTML page that says so.

        Raises:
            RefusedError: a path other than ``/`` is requested without a session, or the CSRF token is missing
                or wrong.
        """
        opens = flask.request.path == "/"
        if not self._has_session() and not (opens and self._use_key()):
            if not opens:
                raise RefusedError(401, REFUSAL)
            return _answer(document.closed(REFUSAL), status=401)
        if flask.request.method == "POST":
            given = flask.request.headers.get("X-CSRF-Token", "")
            if not given:
                raise RefusedError(
                    403,
                    "The request has no X-CSRF-Token header, which the buttons of the page send. If a proxy "
                    "removes it, open the page without that proxy.",
                )
            if not hmac.compare_digest(given.encode(), self._csrf.encode()):
                raise RefusedError(403, "The request does not come from this page. Reload it.")
        return None

    def _has_session(self) -> bool:
        given = flask.request.cookies.get(self.cookie, "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._session.encode())

    def admits(self, head: bytes) -> bool:
        """Return True if the head of a request has the cookie of the session, or an unused key."""
        session, key = self._cookie.search(head), KEY.match(head)
        if session is not None and hmac.compare_digest(session[1], self._session.encode()):
            return True
        with self._lock:
            return key is not None and any(hmac.compare_digest(key[1], each.encode()) for each in self._keys)

    def _use_key(self) -> bool:
        given = flask.request.args.get("key", "").encode("utf-8", "replace")
        with self._lock:
            for key in self._keys:
                if hmac.compare_digest(given, key.encode()):
                    self._keys.remove(key)
                    return True
        return False

    def show(self) -> ResponseReturnValue:
        """Return the page, and the cookie of its session."""
        nonce = secrets.token_urlsafe(16)
        html = document.live(self.record.page, csrf=self._csrf, nonce=nonce)
        answer = _answer(html, nonce=nonce)
        # Each proxy on the way adds its scheme: the first one is the browser's.
        scheme = flask.request.headers.get("X-Forwarded-Proto", "").partition(",")[0]
        secure = self.encrypted or scheme.strip() == "https"
        # Without a path the cookie is for the folder of the page, behind a proxy too.
        answer.set_cookie(
            self.cookie, self._session, path=None, httponly=True, samesite="Strict", secure=secure
        )
        return answer

    def state(self) -> ResponseReturnValue:
        """Return all values of the record."""
        return self.record.values(), {"Cache-Control": "no-store"}

    def events(self) -> ResponseReturnValue:
        """Return a stream of the changes since the last event that the browser received.

        Raises:
            RefusedError: there are too many streams.
        """
        with self._lock:
            if self._viewers >= VIEWERS:
                raise RefusedError(503, f"At most {VIEWERS} viewers can follow a run at a time.")
            self._viewers += 1
        cursor = Cursor.parse(flask.request.headers.get("Last-Event-ID", ""))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = flask.Response(self._stream(cursor), mimetype="text/event-stream", headers=headers)
        stream.call_on_close(self._leave)
        return stream

    def _leave(self) -> None:
        with self._lock:
            self._viewers -= 1

    def _stream(self, cursor: Cursor) -> Iterator[bytes]:
        """Yield events until the run is over."""
        version, over = -1, False
        while not over:
            if not self.record.wait(version, KEEPALIVE_SECONDS):
                yield b": no news\n\n"
                continue
            version = self.record.version
            values, cursor = self.record.changes(cursor)
            over = values["state"] in ENDED
            yield f"id: {cursor}\ndata: {json.dumps(values, separators=(',', ':'))}\n\n".encode()
            self.record.wait_for_end(TICK_SECONDS)  # at most one event per second, until the run ends

    def plotly(self) -> ResponseReturnValue:
        """Return the chart library.

        Raises:
            RefusedError: the plotly package is not installed.
        """
        script = document.chart_library()
        if script is None:
            raise RefusedError(404, document.WITHOUT_CHARTS)
        return flask.Response(script, mimetype="text/javascript", headers={"Cache-Control": "max-age=86400"})

    def stop(self) -> ResponseReturnValue:
        """Record that training should end.

        Raises:
            RefusedError: viewers cannot stop what the page shows; or the body is empty, too long or
                malformed, or does not say when.
        """
        if not self.record.stops:
            raise RefusedError(404, "This page has no button that stops the fits.")
        length = flask.request.content_length or 0
        if not 0 < length <= BODY_BYTES:
            raise RefusedError(400, f"Expected a JSON body of at most {BODY_BYTES} bytes.")
        body = json_body(length)
        when = body.get("when") if isinstance(body, dict) else None
        if when not in ("now", "epoch"):
            raise RefusedError(400, 'Expected {"when": "now"} or {"when": "epoch"}.')
        self.record.stop_request = when
        end = "now" if when == "now" else self.record.stops
        self.record.add_event(f"A viewer of the live page requested that training stop {end}.", "info")
        return {}

    def new_link(self) -> ResponseReturnValue:
        """Return a link for another viewer."""
        return {"link": self.link()}


def _answer(html: str, *, status: int = 200, nonce: str = "") -> flask.Response:
    """Return an answer with HTML that no other site may show, and that no browser or proxy keeps.

    Args:
        html: the document.
        status: the HTTP status.
        nonce: the value that its own script carries; empty: it has no script.
    """
    headers = {
        "Content-Security-Policy": POLICY.format(nonce=nonce or secrets.token_urlsafe(16)),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    if status >= 400:
        headers["Connection"] = "close"  # as after each refused request
    return flask.Response(html, status, mimetype="text/html", headers=headers)
