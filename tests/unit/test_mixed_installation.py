"""Files of the other project named "sparkdl", beside those of this package."""

import shutil
import subprocess
import sys
from pathlib import Path

import sparkdl


def imported(folder):
    """Import sparkdl from a folder in a new process."""
    command = [sys.executable, "-c", "import sparkdl"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_mixed_installation_is_refused(tmp_path):
    """Importing sparkdl fails, with the remedy, in a folder that has packages of the other project."""
    shutil.copytree(Path(sparkdl.__file__).parent, tmp_path / "sparkdl")
    for name in ("transformers", "graph"):
        (tmp_path / "sparkdl" / name).mkdir()
        (tmp_path / "sparkdl" / name / "__init__.py").touch()
    result = imported(tmp_path)

    assert 0 != result.returncode
    assert "it also has graph, transformers of a different project" in result.stderr
    assert "pip uninstall -y sparkdl sparkdl-keras" in result.stderr


def test_an_empty_folder_is_no_mixture(tmp_path):
    """A folder that an uninstalled package left behind without its modules does not prevent the import."""
    shutil.copytree(Path(sparkdl.__file__).parent, tmp_path / "sparkdl")
    (tmp_path / "sparkdl" / "transformers" / "__pycache__").mkdir(parents=True)

    assert "" == imported(tmp_path).stderr


def test_the_package_has_no_name_of_the_other_project():
    """No package of sparkdl is taken for one of the other project."""
    folder = Path(sparkdl.__file__).parent

    assert [] == [name for name in sparkdl._FOREIGN if (folder / name).exists()]
