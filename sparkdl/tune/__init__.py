"""Search for hyper-parameters: the trials of an Optuna study are fits on the slots of the Spark application.

Example:
    >>> result = search(build, (x, y), validation_split=0.2, num_trials=20, epochs=10)  # doctest: +SKIP
    >>> result.best_model.predict(x)  # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from sparkdl.core.lazy import loader

_HOMES = {
    "Parameters": "sparkdl.tune.parameters",
    "SearchResult": "sparkdl.tune.result",
    "cross_validated": "sparkdl.tune.cross_validation",
    "search": "sparkdl.tune.searching",
}
__all__ = ["Parameters", "SearchResult", "cross_validated", "search"]

if TYPE_CHECKING:
    from sparkdl.tune.cross_validation import cross_validated
    from sparkdl.tune.parameters import Parameters
    from sparkdl.tune.result import SearchResult
    from sparkdl.tune.searching import search


_load = loader(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    with warnings.catch_warnings():
        # In a notebook without ipywidgets: of Optuna's progress bars, which a search does not use.
        warnings.filterwarnings("ignore", "IProgress not found")
        return _load(name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
