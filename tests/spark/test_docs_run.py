"""The Python blocks of the documentation run as a reader runs them."""

import os
import subprocess
import sys

import pages
import pytest

pytestmark = pytest.mark.spark


def run(folder, *names):
    """Run pages in one process, whose working directory is a folder."""
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYSPARK_PYTHON", None)  # a reader does not set it
    command = [sys.executable, pages.__file__, *names]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)

    assert 0 == result.returncode, result.stderr[-6000:]


@pytest.mark.whole
def test_the_script_of_the_readme_runs(tmp_path):
    """The script in the README runs as it stands, and prints the lines that are shown below it."""
    run(tmp_path, "README.md")


@pytest.mark.whole
def test_the_blocks_of_all_pages_run(tmp_path):
    """A reader who types in a page gets no error, and sees the output that the page shows."""
    run(tmp_path, *(name for name in pages.names() if name != "README.md"))
