"""Workers, executors and drivers that are killed or stopped in every phase of a call.

What is trained is counted exactly: every row adds an amount of its own to the only weight.
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
from turns import by_turns

MASTERS = ("local-cluster",)
PROGRAM = Path(phases.__file__)
SHORT, LONG = FAULTS[:2], FAULTS[2:]
pytestmark = [pytest.mark.classic, pytest.mark.timeout(900)]


def name_of(case):
    return "-".join(case).replace(" ", "_")


CASES = [
    *by_turns(list(itertools.product(PHASES, SHORT, SETTINGS)), name_of),
    *(
        pytest.param(case, id=name_of(case), marks=pytest.mark.whole)
        for case in itertools.product(PHASES, LONG, SETTINGS)
    ),
]


@pytest.fixture(scope="module", autouse=True)
def pickled_by_value():
    """Executors have no tests."""
    cloudpickle.register_pickle_by_value(phases)
    yield
    cloudpickle.unregister_pickle_by_value(phases)


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    """Return what a call gives that nothing happens to."""
    known = {}

    def result(setting, phase):
        key = setting, phase == "predict"
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[key] = call(spark.sparkContext, setting, folder, phase=phase)
        return known[key]

    return result


@pytest.mark.parametrize("victim", ["worker", "executor"])
@pytest.mark.parametrize("case", CASES)
def test_a_worker_or_an_executor_is_killed_or_stopped(spark, undisturbed, tmp_path, case, victim):
    """The run goes on, and counts each update once."""
    phase, fault, setting = case
    expected = undisturbed(setting, phase)
    act = Act(tmp_path, phase, victim, fault)

    result = call(spark.sparkContext, setting, tmp_path / "checkpoints", act, phase=phase)

    assert expected == result
    assert Path(tmp_path, "done").exists()


@pytest.mark.parametrize("case", CASES)
def test_a_driver_is_killed_or_stopped(undisturbed, tmp_path, case):
    """It goes on, or the next one does from the last checkpoint."""
    phase, fault, setting = case
    command = [sys.executable, str(PROGRAM), str(tmp_path), phase, fault, setting]

    first = subprocess.run(command, check=False, timeout=400)
    assert Path(tmp_path, "done").exists()
    assert fault != "kill" or first.returncode == -9
    if fault == "kill":
        subprocess.run(command, check=True, timeout=400)

    assert undisturbed(setting, phase) == json.loads(Path(tmp_path, "result.json").read_text())
