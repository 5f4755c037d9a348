"""Progress output of a run."""

import io
import logging
import sys
import warnings

import numpy as np
import pyte
import pytest
from rich.console import Console

from sparkdl.driver.display import notebook
from sparkdl.driver.display.progress import LineDisplay, value_text
from sparkdl.driver.display.terminal import BarDisplay

LOGS = {"loss": 0.5, "f1": np.array([0.25, 0.5])}


class Terminal(io.StringIO):
    """A terminal, as its escape codes draw it.

    Args:
        width: the number of its columns.
    """

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.screen = pyte.Screen(width, 40)
        self.stream = pyte.Stream(self.screen)

    def write(self, text):
        self.stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def isatty(self):
        return True

    def lines(self):
        return [line.rstrip() for line in self.screen.display if line.strip()]


@pytest.fixture(params=[80, 120])
def terminal(request, monkeypatch):
    """A terminal that ``bar_on`` makes the standard output and the standard error of this process."""
    terminal = Terminal(request.param)
    terminal.monkeypatch = monkeypatch
    return terminal


def bar_on(terminal, epochs=2):
    """Return a display on a terminal; pytest itself replaces the streams before each test's call."""
    terminal.monkeypatch.setattr(sys, "stdout", terminal)
    terminal.monkeypatch.setattr(sys, "stderr", terminal)
    return BarDisplay(epochs, Console(force_terminal=True, width=terminal.width))


def test_an_epoch_is_one_line(capsys):
    """An epoch is one line with every metric, also those of several values."""
    LineDisplay(3).end(0, 10, LOGS)
    line = capsys.readouterr().out

    assert line.startswith("Epoch 1/3 - ")
    assert line.endswith(" rows/s - loss: 0.5000 - f1: [0.25 0.5 ]\n")


def test_a_bar_shows_speed_and_results_and_leaves_the_line_of_each_epoch(terminal):
    """The bar shows speed and results so far, and leaves a line for each epoch."""
    display = bar_on(terminal, 1)
    display.begin(0, 0)
    display.update(5, 10, {"loss": 0.75})
    display.progress.refresh()
    (bar,) = terminal.lines()
    display.end(0, 10, LOGS)
    display.close()

    assert bar.startswith("Epoch 1/1 ━━")
    assert bar.endswith("loss: 0.7500")
    (line,) = terminal.lines()
    assert line.startswith("Epoch 1/1 - ")
    assert line.endswith("loss: 0.5000 - f1: [0.25 0.5 ]")


def test_an_epoch_whose_rows_become_known_has_one_bar(terminal):
    """The first bar is drawn before the number of rows is known, and there is one bar per epoch."""
    display = bar_on(terminal)
    display.begin(0, 0)
    display.begin(0, 10)

    assert [10] == [task.total for task in display.progress.tasks]
    display.close()


def test_a_bar_says_what_the_workers_do_before_they_train(terminal):
    """Until workers train, their present state stands beside the bar."""
    display = bar_on(terminal)
    display.begin(0, 0)
    display.wait("waiting for 2 of 2 workers: they are importing Keras")
    display.progress.refresh()
    (bar,) = terminal.lines()
    display.close()

    assert bar.endswith("waiting for 2 of 2 workers: they are importing Keras")
    assert [] == terminal.lines()


def test_a_bar_is_not_torn_by_the_echo_of_ctrl_c(terminal):
    """The terminal prints ^C behind the bar, which is as wide as it gets, and the next line replaces both."""
    display = bar_on(terminal)
    display.begin(0, 10)
    display.update(5, 10, {f"metric_{index}": 0.5 for index in range(9)})
    display.progress.refresh()
    (bar,) = terminal.lines()
    terminal.write("^C")
    sys.stdout.write("Interrupted.\n")
    display.close()

    assert "metric_0: 0.5000" in bar
    assert ["Interrupted."] == terminal.lines()


def test_a_bar_is_not_torn_by_other_writers(terminal):
    """Prints, log lines of old and new handlers, and warnings appear above the bar, each on its own line."""
    display = bar_on(terminal)
    old, logger = logging.StreamHandler(), logging.getLogger("sparkdl.test_progress")
    logger.addHandler(old)
    logger.propagate = False
    display.begin(0, 10)
    display.note("2 workers")
    sys.stdout.write("a print\n")
    logger.warning("a log line")
    sys.stderr.write(warnings.formatwarning("a warning", UserWarning, "here.py", 1, "warn()"))
    display.progress.refresh()
    *above, bar = terminal.lines()
    display.close()
    logger.removeHandler(old)

    assert ["2 workers", "a print", "a log line", "here.py:1: UserWarning: a warning", "  warn()"] == above
    assert bar.startswith("Epoch 1/2 ━━")
    assert above == terminal.lines()
    assert terminal is old.stream is sys.stdout is sys.stderr


def test_a_file_gets_the_errors_that_are_redirected_to_it(terminal, monkeypatch):
    """If only the standard output is a terminal, log lines still go to the file of the standard error."""
    display = bar_on(terminal)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    display = BarDisplay(1, display.progress.console)
    display.begin(0, 10)
    sys.stderr.write("to the file\n")
    display.close()

    assert "to the file\n" == sys.stderr.getvalue()
    assert [] == terminal.lines()


def test_a_table_of_many_epochs_is_short():
    """A table in a notebook has the first and the last epochs, and every metric has its column."""
    epochs = [(str(epoch + 1), "1.0", "10") for epoch in range(50)]
    html = notebook.table(epochs, [{"loss": 0.5}] * 49 + [{"loss": 0.25, "val_<b>": 0.75}])

    assert 1 + notebook.MOST == html.count("<tr>")
    assert ">1<" in html
    assert ">50<" in html
    assert ">25<" not in html
    assert "val_&lt;b&gt;" in html


@pytest.mark.parametrize(
    ("losses", "drawn"), [([0.5], 0), ([np.nan, np.nan], 0), ([0.5, np.nan, 0.25], 1), ([0.5, 0.5], 1)]
)
def test_a_chart_has_the_finite_losses(losses, drawn):
    """The chart of a notebook has one curve from two epochs on, without losses that are not finite."""
    chart = notebook.curves([{"loss": loss} for loss in losses])

    assert drawn == chart.count("<polyline")
    assert "nan" not in chart


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5000"),
        (0.0, "0.0000"),
        (2.3e-5, "2.3000e-05"),
        (-1e-3, "-1.0000e-03"),
        (np.float32(2), "2.0000"),
    ],
)
def test_small_results_are_not_shown_as_0(value, text):
    """A result of at most a thousandth is shown with an exponent, as in Keras's bar."""
    assert text == value_text(value)
