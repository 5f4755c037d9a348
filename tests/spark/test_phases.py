"""Workers, executors and drivers are killed or stopped in every phase of a call.

Updates are counted exactly: every row adds its own amount to the only weight.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import phases
import pytest
from phases import FAULTS, PHASES, SETTINGS, Act, call
from pyspark import cloudpickle

MASTERS = ("local-cluster",)
PROGRAM = Path(phases.__file__)
LONG = FAULTS[2:]
pytestmark = [pytest.mark.classic, pytest.mark.timeout(900)]


def name_of(case):
    return "-".join(case).replace(" ", "_")


CASES = [
    pytest.param(case, id=name_of(case), marks=[pytest.mark.whole] if case[1] in LONG else [])
    for case in itertools.product(PHASES, FAULTS, SETTINGS)
]


@pytest.fixture(scope="module", autouse=True)
def pickled_by_value():
    """Pickle the helpers by value: executors cannot import the tests."""
    cloudpickle.register_pickle_by_value(phases)
    yield
    cloudpickle.unregister_pickle_by_value(phases)


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    """Return a function that returns the result of a call without faults."""
    known = {}

    def result(setting, phase):
        key = setting, phase == "predict"
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[key] = call(spark.sparkContext, setting, folder, phase=phase)
        return known[key]

    return result


@pytest.mark.whole
@pytest.mark.parametrize("victim", ["worker", "executor"])
@pytest.mark.parametrize("case", CASES)
def test_a_worker_or_an_executor_is_killed_or_stopped(spark, undisturbed, tmp_path, case, victim):
    """A run with a killed or stopped worker or executor continues and counts each update once."""
    phase, fault, setting = case
    expected = undisturbed(setting, phase)
    act = Act(tmp_path, phase, victim, fault)

    result = call(spark.sparkContext, setting, tmp_path / "checkpoints", act, phase=phase)

    assert expected == result
    assert Path(tmp_path, "done").exists()


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_a_driver_is_killed_or_stopped(undisturbed, tmp_path, case):
    """A stopped driver continues; after a killed one, the next driver resumes from the last checkpoint."""
    phase, fault, setting = case
    command = [sys.executable, str(PROGRAM), str(tmp_path), phase, fault, setting]

    first = subprocess.run(command, check=False, timeout=400)
    assert Path(tmp_path, "done").exists()
    assert fault != "kill" or first.returncode == -9
    if fault == "kill":
        subprocess.run(command, check=True, timeout=400)

    assert undisturbed(setting, phase) == json.loads(Path(tmp_path, "result.json").read_text())
