"""Checks of this machine's installation: Python, packages, the name ``sparkdl``, disk space, Java, Keras."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import sparkdl
from sparkdl.doctor.report import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "sparkdl-keras"
PYTHONS = (3, 11), (3, 13)  # the oldest that is supported, the newest that was tested
JAVAS = {"3": (8, 17)}  # the oldest and the newest Java, by the major version of Spark
JAVAS_SINCE_4 = 17, 99  # 99: no limit
SHOWN = "pyspark", "keras", "numpy", "pandas", "pyarrow"
LEAST_SPACE = 1 << 30  # bytes
EXTRA = "Run pip install '{distribution}[{extra}]'."


def python() -> Finding:
    """Check the version of this Python."""
    oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
    found = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    if sys.version_info[:2] < PYTHONS[0]:
        return Finding("failed", f"{found}; sparkdl needs Python {oldest} or newer. Install it.")
    if sys.version_info[:2] > PYTHONS[1]:
        return Finding("warning", f"{found}; the newest tested Python is {newest}. Use that if a fit fails.")
    return Finding("ok", found)


def packages() -> Finding:
    """Check the versions of the packages that sparkdl and Spark need, except the Keras backend."""
    if version_of("packaging") is None:
        return Finding("failed", f"packaging is not installed. {_install('spark')}")
    try:
        needed = [*requirements(), *requirements("spark")]
    except metadata.PackageNotFoundError:
        return Finding(
            "warning",
            f"{DISTRIBUTION} is not installed with pip, so the required versions of packages are unknown. "
            f"{_install('spark')}",
        )
    unmet = {each: version_of(each.name) for each in needed if not _is_met(each)}
    if unmet:
        versions = ", ".join(f"{each.name} {found or 'is missing'}" for each, found in unmet.items())
        wanted = " ".join(f"'{each.name}{each.specifier}'" for each in unmet)
        return Finding("failed", f"{versions}; sparkdl needs {wanted}. Run pip install {wanted}.")
    return Finding("ok", ", ".join(f"{name} {version_of(name)}" for name in SHOWN))


def requirements(extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements of sparkdl; with ``extra``, only those that the extra adds.

    Raises:
        PackageNotFoundError: sparkdl is not installed with pip.
    """
    from packaging.requirements import Requirement

    for text in metadata.requires(DISTRIBUTION) or ():
        each = Requirement(text)
        extras = [
            name for name in ("", extra) if each.marker is None or each.marker.evaluate({"extra": name})
        ]
        if extra == next(iter(extras), None):
            yield each


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        if name != "pyspark" or importlib.util.find_spec(name) is None:
            return None
        return str(importlib.import_module(name).__version__)  # Spark's own copy, which pip does not know


def _is_met(requirement: Requirement) -> bool:
    found = version_of(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _install(extra: str) -> str:
    return EXTRA.format(distribution=DISTRIBUTION, extra=extra)


def name() -> Finding:
    """Check that no other distribution installs a package named sparkdl.

    If one used the same folder, the import of ``sparkdl`` would already have failed.
    """
    package = Path(sparkdl.__file__).parent
    others = sorted(set(metadata.packages_distributions().get("sparkdl", ())) - {DISTRIBUTION})
    if others:
        shown = " and ".join(f"{each} {version_of(each)}" for each in others)
        remedy = f"Run pip uninstall {' '.join(others)}."
        return Finding("warning", f"{shown} is also installed, in a different folder. {remedy}")
    return Finding("ok", f"{sparkdl.__version__} ({package})")


def keras() -> Finding:
    """Import Keras, and check its backend."""
    from sparkdl.modeling.backends.choice import require_supported

    require_supported(os.environ.get("KERAS_BACKEND") or "tensorflow")
    try:
        module = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        known = missing in ("tensorflow", "jax", "torch")
        remedy = _install(missing) if known else f"Install {missing}."
        other = " Or set KERAS_BACKEND to a backend that is installed." if known else ""
        return Finding("failed", f"Keras needs {missing}, which is not installed. {remedy}{other}")
    backend = str(module.backend.backend())
    require_supported(backend)  # Keras's configuration file may set the backend too
    found = str(sys.modules[backend].__version__)
    for each in _of_backend(backend):
        if not each.specifier.contains(found, prereleases=True):
            text = f"{backend} {found}; sparkdl needs {each}. Run pip install '{each.name}{each.specifier}'."
            return Finding("failed", text)
    return Finding("ok", f"{module.__version__} on {backend} {found}")


def _of_backend(backend: str) -> list[Requirement]:
    try:
        return list(requirements(backend))
    except metadata.PackageNotFoundError:
        return []


def java() -> Finding:
    """Check the Java that Spark starts: that of JAVA_HOME, or else the one in PATH."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return Finding("ok", "spark-submit has started it")
    oldest, newest = JAVAS.get((version_of("pyspark") or "").split(".")[0], JAVAS_SINCE_4)
    wanted = f"Java {oldest} or newer" if newest == 99 else f"Java {newest}"
    install = f"Install {wanted}, and set JAVA_HOME to its folder."
    home = os.environ.get("JAVA_HOME")
    command = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if command is None:
        return Finding("failed", f"JAVA_HOME is not set, and PATH has no java. {install}")
    found = _java_version(command)
    if found is None:
        return Finding("failed", f"{command} ({'JAVA_HOME' if home else 'PATH'}) does not run. {install}")
    number = int(re.split(r"\D", found.removeprefix("1."))[0])
    if number < oldest:
        return Finding("failed", f"{found} ({command}); Spark needs Java {oldest} or newer. {install}")
    if number > newest:
        return Finding("warning", f"{found} ({command}); the newest for this Spark is {newest}. {install}")
    return Finding("ok", f"{found} ({command})")


def _java_version(command: str) -> str | None:
    """Return the version that a Java prints, such as 17.0.15 or 1.8.0_452; None if it does not run."""
    try:
        done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d[^"]*)"', done.stderr)
    return found[1] if found else None


def disk() -> Finding:
    """Check the free space of the folder for temporary files."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    text = f"{free / (1 << 30):.1f} GiB free in {folder}"
    if free < LEAST_SPACE:
        return Finding("warning", f"{text}. Free some space, or set TMPDIR to another folder.")
    return Finding("ok", text)
