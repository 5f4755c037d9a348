"""``python -m sparkdl doctor``: a line for each check, and a remedy for each that failed."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

ROOT = Path(__file__).parents[2]
CHECKS = [
    "Python",
    "Packages",
    "sparkdl",
    "Disk",
    "Java",
    "Keras",
    "Spark",
    "Slots",
    "Executors",
    "Endpoint",
    "Fit",
]
pytestmark = pytest.mark.spark


def doctor(*arguments, **environment):
    """Run the doctor; return its exit status, each check's mark and finding, and its last line."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK_CONNECT"))
    }
    command = [sys.executable, "-m", "sparkdl", "doctor", *arguments]
    done = subprocess.run(
        command, env=kept | environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    first, *lines, last = done.stdout.splitlines()
    parts = [re.fullmatch(r"(\w+) +(ok|warning|failed) +(\S.*)", line) for line in lines]

    assert "" == done.stderr
    assert first.startswith("sparkdl ")
    assert None not in parts, done.stdout  # nothing of Spark, Keras or Python is between the lines
    return done.returncode, {part[1]: (part[2], part[3]) for part in parts}, last


def test_a_healthy_machine_passes():
    """On two threads of this machine all checks pass, without any setting."""
    status, found, last = doctor()

    assert 0 == status, found
    assert CHECKS == list(found)
    assert {"ok"} == {mark for mark, _ in found.values()}
    assert " at local[2], " in found["Spark"][1]
    assert "A fit works here." == last


@pytest.mark.whole
def test_executor_processes_pass():
    """With executors in processes of their own all checks pass, and settings are passed on to Spark."""
    status, found, _ = doctor("--master", "local-cluster[2,1,1024]", "--conf", "spark.sparkdl.tls=true")
    # local-cluster writes there, whatever Spark is configured for.
    shutil.rmtree(Path(pyspark.__file__).parent / "work", ignore_errors=True)

    assert 0 == status, found
    assert found["Endpoint"][1].endswith(" with TLS")


@pytest.fixture
def taken():
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(name, found, last):
    """Return the finding of the only check that failed."""
    failed = [check for check, (mark, _) in found.items() if mark == "failed"]

    assert [name] == failed
    assert last.startswith(f"Failed: {name}.")
    return found[name][1]


def test_a_master_that_does_not_answer_is_named():
    """An unreachable master fails at once, with its address, and the checks after it are left out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    status, found, last = doctor("--master", f"spark://127.0.0.1:{port}")

    assert 1 == status
    assert f"Nothing answers at 127.0.0.1:{port} " in refused("Spark", found, last)
    assert "Not checked: Slots, Executors, Endpoint, Fit." in last


@pytest.mark.whole
def test_a_master_that_is_silent_is_given_up(taken):
    """A master that accepts a connection and says nothing is given up after the timeout."""
    status, found, last = doctor("--master", f"spark://127.0.0.1:{taken}", "--timeout", "5")

    assert 1 == status
    assert "Spark did not start in 5 s. " in refused("Spark", found, last)


@pytest.mark.whole
def test_the_reason_why_spark_does_not_start_is_found():
    """The reason comes from the output of Spark, which is in the file that the last line names."""
    status, found, last = doctor("--master", "nowhere")

    assert 1 == status
    assert "SparkException: " in refused("Spark", found, last)
    assert Path(re.search(r" is in (\S+\.log)\.", last)[1]).stat().st_size


@pytest.mark.whole
def test_executors_with_another_python_are_refused(tmp_path):
    """A Python without Keras is named, with the setting that changes it."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -P "$@"\n')
    python.chmod(0o755)
    status, found, last = doctor(PYSPARK_PYTHON=str(python))

    assert 1 == status
    assert " has no keras; the driver has keras " in refused("Executors", found, last)
    assert f"set PYSPARK_PYTHON={sys.executable} " in found["Executors"][1]
    assert "Not checked: Endpoint, Fit." in last


@pytest.mark.whole
def test_a_taken_port_is_named(taken):
    """A port that another program uses fails the endpoint's check, with the setting to change."""
    status, found, last = doctor("--conf", f"spark.sparkdl.port={taken}")

    assert 1 == status
    assert f"tried port {taken}: " in refused("Endpoint", found, last)
    assert "Set port= to 0 or to a free range" in found["Endpoint"][1]


@pytest.mark.whole
def test_with_too_few_slots_the_fit_is_tried_with_fewer_workers():
    """One slot for two workers fails, and the checks go on with one worker."""
    status, found, last = doctor("--master", "local[1]")

    assert 1 == status
    assert "num_workers=2 needs 2 slots; the application has 1 " in refused("Slots", found, last)
    assert found["Fit"][1].startswith("1 worker in ")


@pytest.mark.whole
@pytest.mark.parametrize(("visible", "mark"), [("0", "warning"), ("0,1", "ok")])
def test_workers_that_share_a_gpu_are_a_warning(visible, mark):
    """The GPUs of the workers are listed, with a warning if there are too few."""
    status, found, _ = doctor(CUDA_VISIBLE_DEVICES=visible)

    assert 0 == status
    assert mark == found["GPUs"][0]
    assert found["GPUs"][1].startswith("GPU 0 on ")


@pytest.mark.whole
def test_a_cluster_without_executors_is_given_up(standalone):
    """Executors that do not start fail the check of the slots after the timeout."""
    status, found, last = doctor(
        "--master", standalone, "--conf", "spark.executor.memory=900g", "--timeout", "20"
    )

    assert 1 == status
    assert "the application has 0 " in refused("Slots", found, last)
    assert "Not checked: Executors, Endpoint, Fit." in last


@pytest.mark.whole
def test_tasks_that_never_start_are_given_up(standalone):
    """Under dynamic allocation, tasks that get no executor are cancelled after the timeout."""
    dynamic = [f"spark.dynamicAllocation.{name}=true" for name in ("enabled", "shuffleTracking.enabled")]
    settings = [part for each in (*dynamic, "spark.executor.memory=900g") for part in ("--conf", each)]
    status, found, last = doctor("--master", standalone, *settings, "--timeout", "20")

    assert 1 == status
    assert "Tasks did not end in 20 s; " in refused("Executors", found, last)
