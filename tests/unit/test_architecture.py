"""The house: a module imports only from those above it, and each outside library has its doors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sparkdl

ROOT = Path(sparkdl.__file__).parent
ORDER = [
    "interrupts", "memory", "reasons", "errors", "config", "weights", "structure", "batches", "wire",
    "rules", "slices", "merging", "divergence", "packing", "sparse", "fingerprint", "books", "store", "sums",
    "exchange", "hosted", "heads", "arrays", "backends.base", "schema", "feed", "faults", "spool",
    "rebalance", "frames", "code",
    "optimizers", "live", "models", "proof", "losses",
    "backends.common", "backends.stateful", "backends.tensorflow", "backends.torch", "backends.jax",
    "backends.outer", "backends", "devices",
    "tls", "strangers", "server", "client", "files", "member", "collective", "steppers", "worker", "hosting",
    "tasks", "inference", "preflight", "interpreter", "repeats", "cluster", "failures", "launch", "gang",
    "running", "sources", "columns", "tables", "inputs", "prediction", "progress", "callbacks", "batch_hooks",
    "epochs",
    "lease", "checkpoint", "description", "training", "spark_model",
    "ml.params", "ml.persistence", "ml.transformer", "ml.estimator", "ml", "mllib",
    "records", "tfrecords", "",
]  # fmt: skip
DOORS = {
    "flask": {"server"},
    "cheroot": {"server", "strangers"},
    "keras": {
        "live",
        "models",
        "optimizers",
        "proof",
        "losses",
        "callbacks",
        "description",
        "batch_hooks",
        "epochs",
        "spark_model",
        "backends",
        "backends.common",
        "backends.outer",
        "backends.stateful",
        "backends.jax",
        "backends.tensorflow",
        "backends.torch",
    },
    "tensorflow": {"backends.tensorflow"},
    "jax": {"backends.jax"},
    "torch": {"backends.torch"},
    "pyspark": {
        "files",
        "cluster",
        "failures",
        "launch",
        "sources",
        "spark_model",
        "preflight",
        "mllib",
        "tfrecords",
        "columns",
        "tables",
        "inputs",
        "ml.params",
        "ml.persistence",
        "ml.transformer",
        "ml.estimator",
    },
    "py4j": {"files"},
    "pandas": {"launch"},
    "pyarrow": {"frames"},
    "rich": {"progress"},
    "cryptography": {"tls"},
    "google": {"records"},
    "google_crc32c": {"records"},
    "pickle": set(),
}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports_of(path, *, inside_functions=True):
    """Yield every module that a file names in an import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("sparkdl.") in MODULES else node.module


def place(module):
    return ORDER.index("rules" if module.startswith("rules") else module)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_a_module_imports_only_from_those_above_it(module):
    """What is low stays simple: it cannot know what is built on it."""
    for imported in imports_of(MODULES[module], inside_functions=False):
        if imported.startswith("sparkdl."):
            inner = imported.removeprefix("sparkdl.")

            assert inner == module or place(inner) <= place(module), f"{module} imports {inner}"


@pytest.mark.parametrize("library", DOORS)
def test_an_outside_library_is_met_only_at_its_doors(library):
    """A change of a library is a change of its doors alone."""
    met = {
        module
        for module, path in MODULES.items()
        if any(imported.split(".")[0] == library for imported in imports_of(path))
    }

    assert met <= DOORS[library]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sparkdl", ["keras", "tensorflow", "pyspark", "flask", "cheroot"]),
        ("sparkdl.store", ["keras", "tensorflow", "pyspark", "flask", "cheroot"]),
        ("sparkdl.worker", ["pyspark", "flask", "cheroot"]),
        ("sparkdl.running", ["keras", "tensorflow"]),
    ],
)
def test_importing_stays_cheap(module, absent):
    """Arithmetic pays for no Keras, and the worker's side runs where there is no Spark."""
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_a_worker_imports_keras_without_what_it_does_not_use(tmp_path):
    """What Keras takes where it is there stays importable, and garbage is collected again."""
    for name in ("IPython", "sklearn"):  # on many clusters, but perhaps not here
        (tmp_path / f"{name}.py").write_text("raise RuntimeError(__name__)")
    code = (
        f"import gc, sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from sparkdl import tasks; tasks.import_keras(); there = sys.modules.keys();"
        "print('keras' in there, {'matplotlib', 'pandas', 'pyarrow'} & there, gc.isenabled()); import pandas"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.stdout.strip() == "True set() True", result.stderr


def test_the_public_names_are_these():
    """A public name is added or taken away on purpose."""
    expected = [
        "CheckpointConfig",
        "SparkDLError",
        "SparkModel",
        "__version__",
        "load_spark_model",
        "predict_udf",
        "run",
        "to_simple_rdd",
    ]

    assert expected == sorted(sparkdl.__all__)
    assert all(hasattr(sparkdl, name) for name in expected)


def test_tests_that_share_an_application_share_a_process(request):
    """Where several run them pytest-xdist has to know their groups, which it does not with every pytest."""
    grouped = getattr(request.config.option, "loadgroup", False)

    assert not grouped or request.node.nodeid.endswith(f"@{request.node.path}")
