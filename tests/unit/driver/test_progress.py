"""Progress output of a run."""

import io

import numpy as np
from rich.console import Console

from sparkdl.driver.progress import BarDisplay, LineDisplay

LOGS = {"loss": 0.5, "f1": np.array([0.25, 0.5])}


def test_an_epoch_is_one_line(capsys):
    """An epoch is one line with every metric, also those of several values."""
    LineDisplay(3, Console()).end(0, 10, LOGS)
    line = capsys.readouterr().out

    assert line.startswith("Epoch 1/3 - ")
    assert line.endswith(" rows/s - loss: 0.5000 - f1: [0.25 0.5 ]\n")


def test_a_bar_shows_speed_and_results_and_leaves_the_line_of_each_epoch():
    """The bar shows speed and results so far, and leaves a line for each epoch."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = BarDisplay(1, console)
    display.begin(0, 0)
    display.update(5, 10, {"loss": 0.75})
    display.progress.refresh()
    assert [(5, 10)] == [(task.completed, task.total) for task in display.progress.tasks]
    assert "loss: 0.7500" in console.file.getvalue()
    display.end(0, 10, LOGS)
    display.close()

    assert [] == display.progress.tasks
    assert "loss: 0.5000 - f1: [0.25 0.5 ]" in console.file.getvalue()


def test_an_epoch_whose_rows_become_known_has_one_bar():
    """The first bar is drawn before the number of rows is known, and there is one bar per epoch."""
    display = BarDisplay(2, Console(file=io.StringIO(), force_terminal=True))
    display.begin(0, 0)
    display.begin(0, 10)

    assert [10] == [task.total for task in display.progress.tasks]
    display.close()
