"""Facts known about a Spark application without a request, and the files sent to it."""

import os
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import sparkdl
from sparkdl.spark import application
from sparkdl.spark.application import SparkApplication


@pytest.mark.parametrize("jump", [-3600, 0, 3600])
def test_an_application_is_as_old_as_its_jvm_at_most(monkeypatch, jump):
    """An application is at most as old as its JVM, also if the clock is set while executors register."""
    now = time.time()
    jvm = mock.MagicMock()
    jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getUptime.return_value = 12_000
    context = SimpleNamespace(startTime=1000 * (now - 10), _jvm=jvm)
    monkeypatch.setattr(time, "time", lambda: now + jump)

    assert 0 <= SparkApplication.age(SimpleNamespace(context=context)) <= 12


def test_a_package_whose_files_have_no_time_is_sent(tmp_path, monkeypatch):
    """A package whose files date from 1970, before ZIP's first year, can be sent."""
    package = tmp_path / "sparkdl"
    package.mkdir()
    for name in ("__init__.py", "store.py"):
        (package / name).write_text(name)
        os.utime(package / name, (0, 0))
    found = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(application.importlib.util, "find_spec", lambda name: found)
    (tmp_path / "made").mkdir()

    with zipfile.ZipFile(application._pack(str(tmp_path / "made"))) as archive:
        assert b"store.py" == archive.read("sparkdl/store.py")


def test_the_package_is_sent_whole(tmp_path):
    """The package is sent with every module and without compiled files."""
    with zipfile.ZipFile(application._pack(str(tmp_path))) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
        assert not any("__pycache__" in name for name in archive.namelist())

    folder = Path(sparkdl.__file__).parent
    assert {f"sparkdl/{path.relative_to(folder)}" for path in folder.rglob("*.py")} == names


def test_sparkdl_is_sent_along_once(monkeypatch, tmp_path):
    """The package is sent once: every later task of the application carries the list of sent files."""
    context = mock.MagicMock()
    monkeypatch.setattr(application.SparkFiles, "getRootDirectory", lambda: str(tmp_path))
    of_session = SparkApplication.__new__(SparkApplication)
    of_session.session = SimpleNamespace(sparkContext=context)

    of_session.ship_package()
    of_session.ship_package()

    context.addPyFile.assert_called_once()
