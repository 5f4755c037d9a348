"""The cost of importing the package, and its public names. `make lint` checks imports between modules."""

import subprocess
import sys

import pytest

import sparkdl


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sparkdl", ["keras", "tensorflow", "pyspark", "flask", "cheroot"]),
        ("sparkdl.server.coordinator", ["keras", "tensorflow", "pyspark", "flask", "cheroot"]),
        ("sparkdl.worker.loop", ["pyspark", "flask", "cheroot"]),
        # sparkdl.run needs only NumPy and optree on the executors.
        ("sparkdl.worker.tasks", ["keras", "ml_dtypes", "pyarrow", "pyspark", "flask", "cheroot"]),
        ("sparkdl.api.run", ["keras", "tensorflow"]),
        ("sparkdl.scheduling.simulation", ["keras", "tensorflow", "pyspark"]),
    ],
)
def test_importing_stays_cheap(module, absent):
    """Arithmetic modules import no Keras, and the worker's side imports no Spark."""
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_a_worker_imports_keras_without_what_it_does_not_use(tmp_path):
    """Importing Keras in a worker leaves its optional packages importable and garbage collection enabled."""
    for name in ("IPython", "sklearn"):  # on many clusters, but perhaps not on this machine
        (tmp_path / f"{name}.py").write_text("raise RuntimeError(__name__)")
    code = (
        f"import gc, sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from sparkdl.worker import tasks; tasks.import_keras(); there = sys.modules.keys();"
        "print('keras' in there, {'matplotlib', 'pandas', 'pyarrow'} & there, gc.isenabled()); import pandas"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.stdout.strip() == "True set() True", result.stderr


def test_the_public_names_are_these():
    """The public names are exactly these, so that adding or removing one is deliberate."""
    expected = [
        "CheckpointConfig",
        "Ensemble",
        "FaultTolerance",
        "History",
        "Network",
        "SparkDLError",
        "SparkModel",
        "Stragglers",
        "WorkerContext",
        "__version__",
        "load_spark_model",
        "plan",
        "plot",
        "predict_udf",
        "run",
        "to_simple_rdd",
    ]

    assert expected == sorted(sparkdl.__all__)
    assert all(hasattr(sparkdl, name) for name in expected)


def test_tests_that_share_an_application_share_a_process(request):
    """All tests on one Spark application have one group for pytest-xdist, so they share a process."""
    grouped = getattr(request.config.option, "loadgroup", False)

    assert not grouped or request.node.nodeid.endswith(f"@{request.node.path}")
