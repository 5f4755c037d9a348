"""The summaries of History and SparkModel, and the plots of a fit."""

import copy
import io
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_type_hints

import cloudpickle
import keras
import numpy as np
import pytest
from matplotlib import pyplot

import sparkdl
from sparkdl import SparkModel
from sparkdl.driver.training_record import TrainingRecord
from sparkdl.errors import ConfigError, DataError
from sparkdl.ml.estimator import TrainingSummary
from sparkdl.rules import RULES
from sparkdl.transport.messages import ACTIVITIES
from sparkdl.ui.history import History

COUNTS = {
    "workers": 2,
    "rows": 18_000,
    "worker_rows": [9_000, 9_000],
    "batch_size": 64,
    "merge": None,
    "learning_rate_scale": 1.0,
    "epoch_rows": [18_000, 18_000, 18_000],
    "epoch_seconds": [2.0, 1.0, 0.5],
    "losses": [[0.5] * 282] * 3,
    "bytes_sent": 1_500_000,
    "bytes_received": 0,
    "restarts": 1,
    "lost": 0,
}
SUMMARY = """\
workers           2
rows              18,000
rows by worker    9,000, 9,000
batch size        64
seconds by epoch  2.0, 1.0, 0.5
rows/s by epoch   9,000, 18,000, 36,000
sent to workers   1.5 MB
restarts          1"""


@pytest.fixture
def history():
    """A History of three epochs, of which the second has validation results."""
    history = History()
    history.set_model(SimpleNamespace())
    history.on_train_begin()
    for epoch, loss in enumerate((0.5, 0.25, 0.125)):
        held = {"val_loss": 0.75} if epoch == 1 else {}
        history.on_epoch_end(epoch, {"loss": loss, "f1": np.array([loss, 1.0])} | held)
    history.training = TrainingRecord(COUNTS)
    return history


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    return model


def test_a_history_prints_as_a_sentence(history):
    """The text of a History has each result's first and last value, the rows, the workers and the seconds."""
    expected = (
        "History of 3 epochs: loss 0.5000 → 0.1250, f1 [0.5 1. ] → [0.125 1.   ], val_loss 0.7500; "
        "18,000 rows, 2 workers, 3.5 s"
    )

    assert expected == repr(history)
    assert "History of no epochs" == repr(History())


def test_the_counts_of_a_run_print_as_a_summary(history):
    """A run's counts are a dict whose text is a table, without the losses of updates and without zeros."""
    assert SUMMARY == str(history.training)
    assert COUNTS == history.training == dict(history.training)
    assert "<td" in history.training._repr_html_()
    assert "" == repr(TrainingRecord())


def test_many_workers_and_epochs_are_cut_short():
    """Long lists in the summary have the first ones, the last one and their number."""
    summary = TrainingRecord(COUNTS | {"worker_rows": list(range(100))}).summary()

    assert "0, 1, 2, 3, 4, 5, …, 99 (100)" == summary["rows by worker"]


def test_a_history_in_a_notebook_is_a_table(history):
    """A validation result stands in the row of its epoch, also if other epochs have none."""
    html = history._repr_html_()
    body = html.partition("<tbody>")[2].partition("</tbody>")[0].split("</tr>")

    assert ["0.7500" in row for row in body[:3]] == [False, True, False]
    assert "<polyline" in html


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda h: cloudpickle.loads(cloudpickle.dumps(h))]
)
def test_a_history_is_copied_and_pickled_as_keras_s(history, copied):
    """A copy of a History is a Keras History with the same content."""
    other = copied(history)

    assert isinstance(other, keras.callbacks.History)
    assert (repr(history), history.epoch, history.training) == (repr(other), other.epoch, other.training)


def test_a_spark_model_prints_its_settings(model):
    """The text of a SparkModel has the model, the settings and the number of epochs of the last fit."""
    expected = (
        "SparkModel(model: small (3 parameters), mode: synchronous, frequency: batch, workers: one per slot, "
        "merge: mean of gradients, placement: driver, last fit: none)"
    )
    other = SparkModel(model, mode="asynchronous", frequency=4, num_workers=2)
    other.history = History()

    assert expected == repr(SparkModel(model))
    assert "merge: bmuf" in repr(SparkModel(model, frequency=4))
    assert "workers: 2" in repr(other)
    assert "last fit: 0 epochs" in repr(other)
    assert "<td" in other._repr_html_()


def test_a_plot_has_the_curves_and_the_speed(history):
    """A figure has one plot for each result that is a number, and one for the rows per second."""
    figure = sparkdl.plot(history)
    loss, speed = figure.axes

    assert ["loss", "rows/s"] == [axis.get_ylabel() for axis in figure.axes]
    assert [[1, 2, 3], [2]] == [list(line.get_xdata()) for line in loss.lines]
    assert [[0.5, 0.25, 0.125], [0.75]] == [list(line.get_ydata()) for line in loss.lines]
    assert [9_000, 18_000, 36_000] == [bar.get_height() for bar in speed.patches]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [] == pyplot.get_fignums()


def test_a_plot_has_the_time_of_the_workers_by_activity(history):
    """The last plot has a bar for each worker with times, the parts one after the other, from the top."""
    times = {0: [1.0, 4.0, 0.5, 0.25, 0.25], 2: [2.0, 3.0, 0.5, 0.0, 0.5], 1: []}
    history.run = {"workers": [{"worker": worker, "times": each} for worker, each in times.items()]}
    figure = sparkdl.plot(history)
    *_, speed, bars = figure.axes

    assert ["loss", "rows/s", "worker"] == [axis.get_ylabel() for axis in figure.axes]
    assert list(ACTIVITIES) == [text.get_text() for text in bars.get_legend().get_texts()]
    drawn = [(part.get_y() + part.get_height() / 2, part.get_x(), part.get_width()) for part in bars.patches]
    for worker in (0, 2):
        parts = [(start, length) for place, start, length in drawn if place == pytest.approx(worker)]
        assert list(zip([0.0, *np.cumsum(times[worker])], times[worker], strict=False)) == parts
    assert 10 == len(drawn)
    assert bars.yaxis_inverted()
    assert not bars.get_shared_x_axes().joined(bars, speed)
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("run", [{}, {"workers": []}, {"workers": [{"worker": 0, "times": []}]}])
def test_a_plot_without_times_of_workers_has_no_bars(history, run):
    """Without times of workers, the plot ends with the rows per second."""
    history.run = run

    assert ["loss", "rows/s"] == [axis.get_ylabel() for axis in sparkdl.plot(history).axes]


def test_the_plots_by_epoch_share_their_axis(history):
    """All plots by epoch have the same limits, and the last of them shows the numbers of the epochs."""
    history.on_epoch_end(3, {"accuracy": 0.5})
    figure = sparkdl.plot(history)
    figure.savefig(io.BytesIO())

    assert 1 == len({axis.get_xlim() for axis in figure.axes})
    shown = [[tick.label1.get_visible() for tick in axis.xaxis.get_major_ticks()][0] for axis in figure.axes]
    assert [False, False, True] == shown
    assert ["", "", "epoch"] == [axis.get_xlabel() for axis in figure.axes]


def test_a_plot_of_keras_s_own_history(model):
    """The History of ``model.fit`` is plotted too, without a speed."""
    history = model.fit(np.ones((8, 2)), np.ones(8), epochs=2, verbose=0, validation_split=0.5)
    figure = sparkdl.plot(history)
    figure.savefig(io.BytesIO())

    assert ["loss"] == [axis.get_ylabel() for axis in figure.axes]


@pytest.mark.parametrize(
    ("rows", "seconds", "epochs", "expected"),
    [
        ([10, 20], [1.0, 2.0], [0, 1], [(0, 1.0, 10.0), (1, 2.0, 10.0)]),
        ([10, 20], [1.0, 2.0], [0], [(0, 1.0, 10.0)]),
        ([20], [1.0, 2.0], [0, 1], [(1, 2.0, 10.0)]),
        ([], [1.0], [0], []),
        ([], [], [0], []),
    ],
    ids=["all", "an epoch that ended with an error", "resumed from an older version", "older", "none"],
)
def test_timings_belong_to_their_epochs(rows, seconds, epochs, expected):
    """Each epoch of a History has its own timing, also if some epochs have none or a timing has no epoch."""
    record = TrainingRecord({"epoch_rows": rows, "epoch_seconds": seconds})

    assert expected == record.timings(epochs)


def test_the_summary_of_an_estimator_is_shown_as_a_history(history):
    """A TrainingSummary shows the same as the History of its fit."""
    summary = TrainingSummary(history.history, history.training, fit=history)

    assert repr(history).replace("History of", "TrainingSummary of") == repr(summary)
    assert history._repr_html_() == summary._repr_html_()


def test_the_summary_of_an_estimator_writes_the_report_of_its_fit(history, tmp_path):
    """A TrainingSummary writes the same page as the History of its fit."""
    history.run = {"workers": []}
    TrainingSummary(history.history, history.training, fit=history).report(tmp_path / "summary.html")
    history.report(tmp_path / "history.html")

    assert (tmp_path / "history.html").read_bytes() == (tmp_path / "summary.html").read_bytes()


def test_a_summary_that_was_loaded_has_the_results_and_no_report(tmp_path):
    """A loaded TrainingSummary shows its epochs without counts, and says why it has no report."""
    loaded = TrainingSummary({"loss": [0.5, 0.25]}, {})

    assert "TrainingSummary of 2 epochs: loss 0.5000 → 0.2500" == repr(loaded)
    assert "0.2500" in loaded._repr_html_()
    with pytest.raises(ConfigError, match="a saved model does not have"):
        loaded.report(tmp_path / "report.html")


@pytest.mark.parametrize("given", [History(), None, {"loss": [1.0]}])
def test_a_plot_without_epochs_is_refused(given):
    """Anything but a History with epochs is refused."""
    with pytest.raises(DataError, match="needs the History of a fit with at least one epoch"):
        sparkdl.plot(given)


def test_a_plot_without_matplotlib_names_the_extra():
    """Without Matplotlib, everything else still works, and a plot names the package to install."""
    code = (
        "import sys; sys.modules['matplotlib'] = None; import sparkdl;"
        "from sparkdl.ui.history import History; h = History(); h.history = {'loss': [1.0]}; h.epoch = [0];"
        "sparkdl.plot(h)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    expected = "sparkdl.plot needs matplotlib. Install it: pip install 'sparkdl-keras[plot]'"
    assert expected in done.stderr.strip().split("\n")[-1]


def test_editors_know_the_values_of_settings():
    """The types of settings list their values, ``fit`` returns a Keras History, and every rule is listed."""
    settings, fit = get_type_hints(SparkModel.__init__), get_type_hints(SparkModel.fit)

    assert Literal["synchronous", "asynchronous", "hogwild"] == settings["mode"]
    assert Literal["driver", "worker", "executors"] == settings["placement"]
    assert set(RULES) == set(get_args(get_args(settings["merge"])[0]))
    assert Literal["auto", 0, 1, 2] == fit["verbose"]
    assert Literal["error", "warn"] == fit["nan"]
    assert issubclass(fit["return"], keras.callbacks.History)
    assert Any is not fit["return"]
