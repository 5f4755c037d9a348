"""Executors whose clock is not that of the driver train over TLS, whose certificates have dates."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def fit(folder, day, placement):
    """Return the hours by which the workers' clock is ahead, and the weights, as the program prints them."""
    folder.mkdir()
    program = Path(__file__).with_name("other_clock.py")
    command = [sys.executable, str(program), str(folder), day, placement]
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return done.stdout.split()


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
@pytest.mark.parametrize("placement", ["driver", "executors"])
def test_workers_of_another_day_train(tmp_path, placement):
    """A fit over TLS ends with the same bits if the clock of the workers is a day ahead or behind."""
    _, expected = fit(tmp_path / "same", "", placement)

    assert ["24", expected] == fit(tmp_path / "ahead", "+1 day", placement)
    assert ["-24", expected] == fit(tmp_path / "behind", "-1 day", placement)
