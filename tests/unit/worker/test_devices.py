"""Assignment of GPUs to tasks, and restoring of the environment afterwards."""

import os
import sys

import pytest

from sparkdl.errors import ConfigError, StaleWorkerError
from sparkdl.worker import devices

GIVEN = [
    (None, ["0", "3"], 0, ("0", "3")),  # assigned by Spark
    ("4,5,6", ["0", "2"], 1, ("4", "6")),  # counted within the visible ones
    ("GPU-a,GPU-b", ["1"], 0, ("GPU-b",)),
    ("GPU-a,GPU-b", ["GPU-b"], 0, ("GPU-b",)),  # or named
    ("4,5", [], 0, ("4",)),  # local mode: tasks take turns
    ("4,5", [], 3, ("5",)),
    ("4,5", [], None, ()),  # a cluster whose Spark assigns no GPUs
    ("-1", [], 0, ()),
    ("", [], 1, ()),
]


@pytest.fixture
def visible(monkeypatch, tmp_path):
    """A function that sets the visible GPUs on a machine without any."""
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
    """A task gets Spark's GPUs within the visible ones; in local mode tasks take turns."""
    visible(listed)

    assert expected == devices.choose_gpus(addresses, place)


def test_a_gpu_that_is_not_visible_is_an_error(visible):
    """GPU addresses of a discovery script that ignores CUDA_VISIBLE_DEVICES are refused."""
    visible("4,5")

    with pytest.raises(
        ConfigError, match=r"assigned GPU 2 to the task, but CUDA_VISIBLE_DEVICES has only 2 GPUs \(4,5\)"
    ):
        devices.choose_gpus(["2"], 0)


def test_gpus_are_counted_where_none_are_named(visible, monkeypatch, tmp_path):
    """Without CUDA_VISIBLE_DEVICES, GPUs are counted in the driver's folder."""
    visible(None)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(devices, "NVIDIA", tmp_path / "gpus")

    assert devices.visible_gpus() == ["0", "1"]


def test_the_environment_is_as_it_was_afterwards(visible):
    """After a task its environment variables are restored and its GPUs are free."""
    visible("4,5")
    before = dict(os.environ)
    with devices.hold("no_such_backend", 3, ["1"]) as gpus:
        inside = dict(os.environ)
        assert gpus == devices.held() == ("5",)

    assert (inside["CUDA_VISIBLE_DEVICES"], inside["KERAS_BACKEND"]) == ("5", "no_such_backend")
    assert "3" == inside["NPROC"]
    assert ("true", "false") == (inside["TF_FORCE_GPU_ALLOW_GROWTH"], inside["XLA_PYTHON_CLIENT_PREALLOCATE"])
    assert before == dict(os.environ)
    assert devices.held() == ()


def test_a_variable_that_the_task_has_removed_stays_away(visible):
    """Restoring the environment accepts that user code has removed a variable."""
    visible(None)
    before = dict(os.environ)
    with devices.hold("no_such_backend", 3, []):
        del os.environ["NPROC"], os.environ["KERAS_BACKEND"]

    assert before == dict(os.environ)


def test_a_process_is_bound_to_the_gpus_that_its_backend_saw(visible, monkeypatch):
    """A process accepts the GPUs that its backend has seen; others need a fresh process."""
    visible("4,5")
    with devices.hold("some_backend", 1, ["0"]):
        monkeypatch.setitem(sys.modules, "some_backend", sys)
    with devices.hold("some_backend", 1, ["0"]):
        pass

    with (
        pytest.raises(StaleWorkerError, match="bound to the GPUs 4, but its task was assigned the GPUs 5"),
        devices.hold("some_backend", 1, ["1"]),
    ):
        pass


def test_a_process_may_stay_with_its_gpu_where_tasks_need_not_be_apart(visible, monkeypatch):
    """A prediction may stay on its process's GPU: a fresh process would lose compiled models."""
    visible("4,5")
    with devices.hold("some_backend", 1, [], 0):
        monkeypatch.setitem(sys.modules, "some_backend", sys)

    with devices.hold("some_backend", 1, [], 1, apart=False) as gpus:
        assert gpus == ("4",)
    with pytest.raises(StaleWorkerError), devices.hold("some_backend", 1, [], 1):
        pass
