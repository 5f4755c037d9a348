"""Benchmarks without Spark run, at a small size, on a machine without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.whole
@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_workers_are_compared_with_plain_keras_on_whatever_there_is(model):
    """The GPU benchmark runs without Spark and has a row for every setting."""
    options = ["--models", model, "--rows", "64", "--batch-size", "32", "--size", "4", "--workers", "2"]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--rounds", "1"], capture_output=True, text=True, timeout=500
    )

    assert run.returncode == 0, run.stderr[-3000:]
    for row in ("| plain | 1 |", "| sparkdl batch | 1 |", "| sparkdl epoch | 2 |"):
        assert row in run.stdout
