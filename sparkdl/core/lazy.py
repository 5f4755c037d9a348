"""Public names of a package that are loaded on first use, so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

# The extra of the distribution that installs a package.
EXTRAS = {"pyspark": "spark", "tensorflow": "tensorflow", "jax": "jax", "torch": "torch", "optuna": "tune"}


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: the name of the package.
        homes: the module of each public name.
    """

    def load(name: str) -> Any:
        """Return a public name.

        Raises:
            AttributeError: the package has no such name.
            ModuleNotFoundError: the name needs a package that is not installed.
        """
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in EXTRAS:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {missing}. Install it: pip install "
                f"'sparkdl-keras[{EXTRAS[missing]}]'",
                name=missing,
            ) from error

    return load
