"""The first line of the error names the memory limit of an executor's Python and the setting to raise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
SETTING, ULIMIT = "spark.executor.pyspark.memory", "ulimit -v"
CASES = {
    "Spark's, for the import of TensorFlow": (SETTING, 300, 8, "ImportError"),
    "Spark's, for the model": (SETTING, 2000, 9000, "OOM when allocating tensor"),
    "the system's, for the import of TensorFlow": (ULIMIT, 300, 8, "ImportError"),
    "the system's, for the model": (ULIMIT, 2000, 9000, "OOM when allocating tensor"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_the_limit_and_what_to_raise_are_named(name):
    """The error names the limit of an executor's Python, wherever it is exceeded and whoever sets it."""
    setting, mebibytes, units, said = CASES[name]
    script = Path(__file__).with_name("short_of_memory.py")

    done = subprocess.run(
        [sys.executable, script, setting, str(mebibytes), str(units)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    shown = done.stdout.strip()
    assert re.match(r"WorkerError: Memory ran out", shown), shown
    size = f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB"
    named = f"{SETTING}, RLIMIT_AS" if setting == SETTING else "RLIMIT_AS"
    assert f"of its address space limit of {size} ({named})" in shown.partition(said)[0], shown
    assert said in shown, shown
    assert re.search(rf"\. Raise [^.]*{setting}", shown), shown
