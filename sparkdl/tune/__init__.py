"""Search for hyper-parameters: the trials of an Optuna study are fits on the slots of the Spark application.

Example:
    >>> result = search(build, (x, y), validation_split=0.2, num_trials=20, epochs=10)  # doctest: +SKIP
    >>> result.best_model.predict(x)  # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Parameters": "sparkdl.tune.parameters",
    "SearchResult": "sparkdl.tune.result",
    "search": "sparkdl.tune.searching",
}
__all__ = ["Parameters", "SearchResult", "search"]

if TYPE_CHECKING:
    from sparkdl.tune.parameters import Parameters
    from sparkdl.tune.result import SearchResult
    from sparkdl.tune.searching import search


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkdl.tune' has no attribute {name!r}")
    try:
        with warnings.catch_warnings():
            # In a notebook without ipywidgets: of Optuna's progress bars, which a search does not use.
            warnings.filterwarnings("ignore", "IProgress not found")
            return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "optuna":
            raise
        raise ModuleNotFoundError(
            f"sparkdl.tune.{name} needs optuna. Install it: pip install 'sparkdl-keras[tune]'", name="optuna"
        ) from error
