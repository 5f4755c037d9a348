"""The doctor's checks of an installation, and its command line; they need no Keras and no JVM."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sparkdl
from sparkdl.doctor import installation, report
from sparkdl.doctor.options import parse

PACKAGE = Path(sparkdl.__file__).parent


def test_the_doctor_knows_the_supported_versions():
    """The Python and Java versions of the doctor are those that the metadata and the docs state."""
    root = PACKAGE.parent
    metadata, page = (root / "setup.cfg").read_text(), (root / "docs/reference/versions.md").read_text()
    oldest, newest = (".".join(map(str, version)) for version in installation.PYTHONS)

    assert f"python_requires = >={oldest}\n" in metadata
    assert f"Programming Language :: Python :: {newest}\n" in metadata
    assert metadata.count("Programming Language :: Python :: 3.") == 1 + int(newest[2:]) - int(oldest[2:])
    assert f"| Python | {oldest} | {newest} |" in page


def run(*arguments, **environment):
    """Run ``python -m sparkdl`` with no Java; return its exit status, and its output by line."""
    environment = {**os.environ, "PATH": "/nowhere", "JAVA_HOME": "", **environment}
    command = [sys.executable, "-m", "sparkdl", *arguments]
    done = subprocess.run(command, env=environment, cwd=PACKAGE.parent, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def java(folder, commands):
    """Return a JAVA_HOME whose java is a shell script."""
    path = folder / "bin" / "java"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return folder


def test_a_machine_without_java_is_told_what_to_install():
    """Without Java the doctor prints one line with the remedy, and the checks that it left out."""
    status, lines = run("doctor")

    assert 1 == status
    assert [line for line in lines if " failed " in line] == lines[-2:-1]
    assert lines[-2].startswith(
        "Java       failed   JAVA_HOME is not set, and PATH has no java. Install Java "
    )
    assert lines[-1] == "Failed: Java. Not checked: Keras, Spark, Slots, Executors, Endpoint, Fit."


@pytest.mark.parametrize(
    ("pyspark", "printed", "mark", "text"),
    [
        ("4.1.0", 'openjdk version "17.0.15" 2025-04-15', "ok", "17.0.15"),
        (
            "4.1.0",
            'java version "1.8.0_452"',
            "failed",
            "Spark needs Java 17 or newer. Install Java 17 or newer",
        ),
        ("3.5.0", 'java version "1.8.0_452"', "ok", "1.8.0_452"),
        (
            "3.5.0",
            'openjdk version "21" 2023-09-19',
            "warning",
            "the newest for this Spark is 17. Install Java 17,",
        ),
        ("4.1.0", "no such library", "failed", "(JAVA_HOME) does not run. Install Java 17 or newer"),
    ],
)
def test_java_has_to_be_one_that_spark_runs_on(tmp_path, monkeypatch, pyspark, printed, mark, text):
    """The version that java prints is compared with the versions that Spark supports."""
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path, f"echo '{printed}' >&2")))
    monkeypatch.setattr(installation, "version_of", lambda name: pyspark)

    finding = installation.java()

    assert mark == finding.mark
    assert text in finding.text


def test_packages_that_do_not_fit_are_named_with_a_command(monkeypatch):
    """One line names each package with a wrong version or none, and the command that installs all of them."""
    needed = [Requirement("numpy<1.0"), Requirement("no-such-package>=2"), Requirement("flask>=3.0")]
    monkeypatch.setattr(installation, "requirements", lambda extra="": needed if extra else [])

    finding = installation.packages()

    assert "failed" == finding.mark
    assert "no-such-package is missing" in finding.text
    assert finding.text.endswith("Run pip install 'numpy<1.0' 'no-such-package>=2'.")


def test_the_requirements_of_an_extra_are_its_own():
    """The requirements of the package and those of an extra have no name in common."""
    own, extra = ({each.name for each in installation.requirements(name)} for name in ("", "spark"))

    assert {"keras", "cheroot"} < own
    assert {"pandas", "pyspark"} == extra


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("openvino", "KERAS_BACKEND should be one of tensorflow, jax, torch for sparkdl; got openvino."),
        ("jax", "Keras needs jax, which is not installed. Run pip install 'sparkdl-keras[jax]'."),
    ],
)
def test_a_backend_that_cannot_be_imported_is_named(tmp_path, backend, message):
    """A missing or an unsupported backend of Keras is one line with a remedy."""
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')")
    code = (
        "import sys; from sparkdl.doctor import installation, report;"
        "report.Report(sys.stdout).check('Keras', installation.keras)"
    )
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert done.stdout.startswith(f"Keras      failed   {message}")


@pytest.fixture
def installed(tmp_path):
    """A folder with a copy of the package as pip installs it."""
    shutil.copytree(PACKAGE, tmp_path / "sparkdl", ignore=shutil.ignore_patterns("__pycache__"))
    files = [path.relative_to(tmp_path) for path in (tmp_path / "sparkdl").rglob("*.py")]
    distribute(tmp_path, "sparkdl-keras", files)
    return tmp_path


def distribute(folder, name, files):
    """Write the metadata with which pip records an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-0.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2.2\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def name_in(folder):
    """Run the doctor's check of the package's name on a folder; return its finding as text."""
    code = "from sparkdl.doctor import installation; print(installation.name())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_package_of_its_own_is_fine(installed):
    """A folder with this package's files alone passes."""
    assert "mark='ok'" in name_in(installed)


def test_another_sparkdl_elsewhere_is_a_warning(installed, tmp_path_factory):
    """Another distribution in a folder of its own gives a warning, because Python takes the first one."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    distribute(elsewhere, "sparkdl", ["sparkdl/__init__.py"])

    shown = name_in(f"{installed}{os.pathsep}{elsewhere}")

    assert "mark='warning'" in shown
    assert "sparkdl 0.2.2 is also installed, in a different folder. Run pip uninstall sparkdl." in shown


def test_an_unexpected_exception_is_one_line():
    """An exception in a check is a failed check with its reason, and no traceback."""
    out = io.StringIO()
    made = report.Report(out)

    def fail():
        raise OSError("no such\ndevice")

    passed = made.check("Disk", fail)

    assert not passed
    assert ["Disk"] == made.failed
    assert "Disk       failed   OSError: no such. See the log named below.\n" == out.getvalue()


def test_a_disk_that_is_nearly_full_is_a_warning(monkeypatch):
    """Little free space for temporary files gives a warning."""
    monkeypatch.setattr(installation, "LEAST_SPACE", 1 << 60)

    assert "warning" == installation.disk().mark


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["doctor", "--num-workers", "0"], "expected a whole number of at least 1; got '0'"),
        (["doctor", "--timeout", "soon"], "expected a number of seconds above 0; got 'soon'"),
        (["doctor", "--conf", "spark.ui.port"], "expected KEY=VALUE; got 'spark.ui.port'"),
    ],
)
def test_bad_arguments_are_refused(capsys, arguments, message):
    """An argument that cannot be honoured ends the command with status 2 and one line."""
    with pytest.raises(SystemExit) as caught:
        parse(arguments)

    assert 2 == caught.value.code
    assert message in capsys.readouterr().err


def test_options_of_spark_belong_to_spark_submit(capsys, monkeypatch):
    """A master or a setting is refused if spark-submit has already started Spark."""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")

    with pytest.raises(SystemExit):
        parse(["doctor", "--master", "local[2]"])

    assert "pass --master and --conf to spark-submit" in capsys.readouterr().err


def test_the_version_is_printed():
    """``--version`` prints the version."""
    assert (0, [f"sparkdl {sparkdl.__version__}"]) == run("--version")
