"""Functions for pages in a real browser, which the fixture ``browser`` starts."""

import re
from importlib.resources import files

import pytest


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
    )


def drawn(browser, chart="loss"):
    """Return the values of each line of a chart, by its name."""
    return dict(
        browser.execute_script(
            "return document.getElementById(arguments[0]).data.map((each) => [each.name, each.y])",
            f"chart-{chart}",
        )
    )


def show_as(browser, width, scheme):
    """Give the browser's window a width, and its pages a color scheme."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def overflow(browser):
    """Return the number of pixels by which the page is wider than the window."""
    return browser.execute_script(
        "const all = document.documentElement; return all.scrollWidth - all.clientWidth"
    )


def press(browser, selector):
    """Reach a button with the key Tab, and press it with Enter."""
    selenium = pytest.importorskip("selenium.webdriver")
    for _ in range(20):
        selenium.ActionChains(browser).send_keys(selenium.Keys.TAB).perform()
        if browser.execute_script("return document.activeElement.matches(arguments[0])", selector):
            selenium.ActionChains(browser).send_keys(selenium.Keys.ENTER).perform()
            return
    pytest.fail(f"Tab does not reach {selector}.")


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
