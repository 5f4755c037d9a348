"""Public names are loaded on first use, and a missing package is named with its extra."""

import sys

import pytest

from sparkdl.core.lazy import EXTRAS, loader


@pytest.mark.parametrize("missing", EXTRAS)
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path, missing):
    """The error for a name whose module needs a missing package has the name, the package and the extra."""
    (tmp_path / "needing.py").write_text(f"import {missing}.part")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(ModuleNotFoundError) as caught:
        loader("package", {"Name": "needing"})("Name")

    assert str(caught.value) == (
        f"package.Name needs {missing}. Install it: pip install 'sparkdl-keras[{EXTRAS[missing]}]'"
    )


def test_other_missing_packages_and_names_are_reported_as_python_does(monkeypatch, tmp_path):
    """A missing package without an extra is reported as it is, and so is a name that does not exist."""
    (tmp_path / "needing.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    load = loader("package", {"Name": "needing"})

    with pytest.raises(ModuleNotFoundError, match="No module named 'nothing_of_this_name'"):
        load("Name")
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'other'"):
        load("other")
