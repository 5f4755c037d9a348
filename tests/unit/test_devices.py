"""Which GPUs a task gets, and what of its environment is taken back afterwards."""

import os
import sys

import pytest

from sparkdl import devices
from sparkdl.errors import StaleWorkerError

GIVEN = [
    (None, ["0", "3"], None, ("0", "3")),  # as Spark says
    ("4,5,6", ["0", "2"], None, ("4", "6")),  # counted within those that are visible
    ("GPU-a,GPU-b", ["1"], None, ("GPU-b",)),
    ("4,5", [], 0, ("4",)),  # local mode: tasks take turns
    ("4,5", [], 3, ("5",)),
    ("4,5", [], None, ()),  # a cluster whose Spark gives no GPUs
    ("-1", [], 0, ()),
    ("", [], 1, ()),
]


@pytest.fixture
def visible(monkeypatch, tmp_path):
    """A function that sets which GPUs are visible, on a machine without any."""
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "none")
    monkeypatch.setattr(devices, "_bound", None)

    def show(listed):
        if listed is None:
            monkeypatch.delenv(devices.VISIBLE, raising=False)
        else:
            monkeypatch.setenv(devices.VISIBLE, listed)

    return show


@pytest.mark.parametrize(("listed", "addresses", "place", "expected"), GIVEN)
def test_a_task_gets_the_gpus_that_are_its_own(visible, listed, addresses, place, expected):
    """Spark's addresses, within what was visible already; else turns in local mode."""
    visible(listed)

    assert expected == devices.choose_gpus(addresses, place)


def test_gpus_are_counted_where_none_are_named(visible, monkeypatch, tmp_path):
    """The driver's folder has an entry for each GPU of the machine."""
    visible(None)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "gpus")

    assert devices.visible_gpus() == ["0", "1"]


def test_the_environment_is_as_it_was_afterwards(visible):
    """What a task sets it takes back, and the GPUs are no longer held."""
    visible("4,5")
    before = dict(os.environ)
    with devices.hold("no_such_backend", 3, ["1"]) as gpus:
        inside = dict(os.environ)
        assert gpus == devices.held() == ("5",)

    assert (inside["CUDA_VISIBLE_DEVICES"], inside["KERAS_BACKEND"]) == ("5", "no_such_backend")
    assert "3" == inside["NPROC"]
    assert before == dict(os.environ)
    assert devices.held() == ()


def test_a_process_is_bound_to_the_gpus_that_its_backend_saw(visible, monkeypatch):
    """The same GPUs again are fine; others need a fresh process."""
    visible("4,5")
    with devices.hold("some_backend", 1, ["0"]):
        monkeypatch.setitem(sys.modules, "some_backend", sys)
    with devices.hold("some_backend", 1, ["0"]):
        pass

    with (
        pytest.raises(StaleWorkerError, match=r"bound to the GPUs \('4',\), and its task was given \('5',\)"),
        devices.hold("some_backend", 1, ["1"]),
    ):
        pass
