"""The first line of the error names the memory limit of an executor's Python and the setting to raise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
CASES = {
    "for the import of TensorFlow": ("300m", 8, "ImportError"),
    "for the model": ("2000m", 9000, "OOM when allocating tensor"),
}
PARAMS = [
    pytest.param(name, marks=() if name.endswith("TensorFlow") else pytest.mark.whole) for name in CASES
]


@pytest.mark.whole
@pytest.mark.parametrize("name", PARAMS)
def test_the_limit_and_its_setting_are_named(name):
    """The error names the limit of spark.executor.pyspark.memory, wherever TensorFlow exceeds it."""
    limit, units, said = CASES[name]
    script = Path(__file__).with_name("short_of_memory.py")

    done = subprocess.run(
        [sys.executable, script, limit, str(units)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    shown = done.stdout.strip()
    assert re.match(r"WorkerError: Memory ran out", shown), shown
    assert "spark.executor.pyspark.memory" in shown.partition(said)[0], shown
    assert said in shown, shown
    assert ". Raise spark.executor.pyspark.memory" in shown, shown
