"""The HTML documents: the live page of a run or of several fits, the report of a run, and a refusal."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from sparkdl.transport.messages import ACTIVITIES

STOP = {"run": "Stop after this epoch", "overview": "Begin no more trials"}  # labels, by kind of page
WITHOUT_CHARTS = "For charts, install plotly on the driver: pip install 'sparkdl-keras[dashboard]'."


def live(kind: str, *, csrf: str, nonce: str) -> str:
    """Return the live page.

    Args:
        kind: what it shows: "run" or "overview".
        csrf: the token that the page sends along when a button is pressed.
        nonce: the value by which the browser recognises the page's own script.
    """
    library = '<script src="plotly.js"></script>' if chart_library() is not None else ""
    settings = {"csrf": csrf, "hint": "" if library else WITHOUT_CHARTS}
    return _document(kind, settings, library=library, nonce=nonce)


def report(values: Mapping[str, Any]) -> str:
    """Return a document that shows a run without a server.

    Args:
        values: the values of the run's record.
    """
    script = chart_library()
    library = "" if script is None else f"<script>{script}</script>"
    settings = {"run": values, "hint": "" if library else WITHOUT_CHARTS}
    return _document("run", settings, library=library, nonce="")


def closed(refusal: str) -> str:
    """Return the page for a browser that may not see the run.

    Args:
        refusal: the reason, and what to do.
    """
    body = _filled("page.closed.html", {"refusal": html.escape(refusal)})
    return _in_shell("sparkdl: this page is not open", body)


@cache
def chart_library() -> str | None:
    """Return the JavaScript of plotly; None if the package is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return str(get_plotlyjs())


def _document(kind: str, settings: Mapping[str, Any], *, library: str, nonce: str) -> str:
    # "</script>" in a value would end the element that holds the settings.
    values = json.dumps({**settings, "activities": ACTIVITIES}).replace("<", "\\u003c")
    parts = {
        "library": library,
        "settings": values,
        "nonce": f' nonce="{nonce}"' if nonce else "",
        "script": _text("page.common.js") + _text(f"page.{kind}.js"),
        "sections": _text(f"page.{kind}.html"),
        "stop": STOP[kind],
    }
    return _in_shell("sparkdl", _filled("page.common.html", parts))


def _in_shell(title: str, body: str) -> str:
    return _filled("page.shell.html", {"title": title, "style": _text("page.css"), "body": body})


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """Return a file of this package with its placeholders replaced."""
    # In one pass, because a part may contain text like a placeholder, such as "{style}".
    return re.sub(r"\{([a-z]+)\}", lambda found: parts[found[1]], _text(name))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
