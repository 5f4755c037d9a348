"""The report at the start of a run: refusals of rows, and log lines."""

import logging
from types import SimpleNamespace

import keras
import pytest

from sparkdl.config import FitConfig, TrainConfig
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.driver import start_report
from sparkdl.driver.start_report import Start
from sparkdl.errors import DataError
from sparkdl.rules import choose
from sparkdl.server.state import Member


def start_of(
    rows=(40, 40),
    *,
    held=(0, 0),
    notes=({}, {}),
    indicator=None,
    fixed=None,
    fit=None,
    loss="binary_crossentropy",
    label="int64",
    **config,
):
    """Return the start of a run whose workers have these training rows, validation rows and notes."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    config = TrainConfig(**{"frequency": 4} | config)
    plans = [
        BatchPlan(
            rows=tuple(rows),
            worker=worker,
            batch_size=16,
            window=config.window,
            joint=config.joint,
            shuffle=True,
            seed=0,
        )
        for worker in range(len(rows))
    ]
    members = {
        worker: Member(0, host="a", pid=0, heard=0.0, validation_rows=count, notes=noted)
        for worker, (count, noted) in enumerate(zip(held, notes, strict=True))
    }
    request = SimpleNamespace(
        config=config,
        fit=FitConfig(**fit or {}),
        model=model,
        num_workers=len(rows),
        reason="one per slot",
        source=SimpleNamespace(indicator=indicator),
        fixed_batch_size=fixed,
        schema=Schema((Column("x", (1,), "float32"), Column("y", (), label)), (0, 1)),
        classes={},
        switch=None,
        continues=False,
        held=(),
    )
    choice = choose(config.merge, mode=config.mode.value, window=config.window)
    return Start(request=request, choice=choice, plans=plans, members=members)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (start_of(indicator="held"), "The column 'held' marks none of the 80 rows"),
        (start_of(fit={"validation_split": 0.001}), "validation_split=0.001 holds out none of the 80 rows"),
        (start_of(fixed=32), "only batches of 32 rows; 80 rows leave a last batch of 16"),
        (
            start_of(fixed=16, held=(8, 0)),
            "16 rows; 8 validation rows leave a last batch of 8",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(start, words):
    """The error for rows that cannot be trained on has their number and the reason."""
    with pytest.raises(DataError, match=words):
        start_report.check(start)


def test_rows_that_can_be_trained_on_pass():
    """Held-out rows and whole batches raise no error."""
    start_report.check(start_of(held=(16, 0), fixed=16, indicator="held", fit={"validation_split": 0.1}))


DIVISION = "INFO 2 workers (one per slot) on 80 rows, batch_size=16 per worker: 6 steps per epoch."
SCALED = (
    "INFO Workers train separately between exchanges, at 1.41 times the learning rate, with "
    'merge="bmuf". If you pass merge= yourself, the learning rate is not scaled.'
)
ONE_CLASS = "WARNING Workers with rows of only one class: [1]."


@pytest.mark.parametrize(
    ("start", "lines"),
    [
        (start_of(), [DIVISION, SCALED]),
        (start_of(merge="average"), [DIVISION]),
        (
            start_of(frequency="batch"),
            ["INFO 2 workers (one per slot) on 80 rows, batch_size=16 over all workers: 5 steps per epoch."],
        ),
        (
            start_of((80, 0), notes=({"empty": 3}, {"empty": 1}), merge="average"),
            [
                "INFO 2 workers (one per slot) on 80 rows, batch_size=16 per worker: 5 steps per epoch.",
                "WARNING Workers without rows: 1 of 2.",
                "WARNING Partitions without rows: 4.",
            ],
        ),
        (
            start_of(notes=({}, {"one_class": True}), merge="average", fit={"shuffle": False}),
            [DIVISION, f"{ONE_CLASS} Use shuffle=True to mix the rows."],
        ),
        (
            start_of(notes=({}, {"one_class": True}), merge="average", fit={"preserve_partitions": True}),
            [DIVISION, f"{ONE_CLASS} Use shuffle=True without preserve_partitions to mix the rows."],
        ),
        (start_of(notes=({}, {"one_class": True}), merge="average"), [DIVISION]),
    ],
)
def test_the_lines_are_these(start, lines, caplog):
    """Each line is logged at its level, the summary is also shown, and empty lines are left out."""
    caplog.set_level(logging.INFO, "sparkdl")
    shown = []

    start_report.report(start, shown.append)

    assert [line.removeprefix("INFO ") for line in lines if line.startswith("INFO")] == shown
    assert lines == [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def my_loss(y, predicted):
    return keras.ops.abs(y - predicted)


@pytest.mark.parametrize(
    ("loss", "label", "named"),
    [
        ("categorical_crossentropy", "float32", True),
        ("mse", "float32", False),
        ("poisson", "int64", False),
        (my_loss, "int64", True),
        (my_loss, "float32", False),
    ],
)
def test_equal_labels_are_one_class_only_if_labels_are_classes(loss, label, named, caplog):
    """Equal labels are one class under a classification loss, and integers also under an unknown loss."""
    notes = ({}, {"one_class": True})
    start_report.report(start_of(notes=notes, fit={"shuffle": False}, loss=loss, label=label), str)

    assert named == ("Workers with rows of only one class: [1]." in caplog.text)


def test_settings_below_plain_keras_and_more_workers_than_studied_are_named(caplog):
    """Two warnings name too many workers that train separately, and a setting that fell short."""
    workers = 9
    start = start_of((16,) * workers, held=(0,) * workers, notes=({},) * workers, merge="sum")

    start_report.report(start, str)

    studied, below = caplog.messages
    assert "this run has 9." in studied
    assert 'merge="sum", SGD and 8 workers diverged' in below


def test_weights_of_float64_are_rounded_with_a_warning():
    """A model with variables of dtype float64 causes a warning that names one of them."""
    start = start_of()
    start.request.model = keras.Sequential([keras.layers.Dense(1, dtype="float64", name="wide")])
    start.request.model.build((None, 2))

    assert "2 variables of dtype float64, such as " in start_report.rounded_weights(start)
    assert start_report.rounded_weights(start_of()) is None
