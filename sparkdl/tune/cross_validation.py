"""Cross-validation of the trials of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from sparkdl.core.validation import whole_number
from sparkdl.errors import ConfigError, short
from sparkdl.tune.rows import TrainingRows, count_of, folds_of, require_samples


@dataclass(frozen=True)
class CrossValidated:
    """A function that builds a model, for a search that cross-validates each trial.

    Attributes:
        build: the function.
        num_folds: the number of folds.
    """

    build: Any
    num_folds: int

    def folds(self, rows: TrainingRows, seed: int) -> Iterator[tuple[TrainingRows, TrainingRows]]:
        """Yield the rows outside of each fold, and those in it."""
        return folds_of(rows, self.num_folds, seed)

    def require(self, data: Any, *, validation_data: Any = None, validation_split: float = 0.0) -> None:
        """Require rows that can be divided into folds, and no others for validation.

        Args:
            data: the rows, as ``search`` takes them.
            validation_data: as in ``search``.
            validation_split: as in ``search``.

        Raises:
            ConfigError: there are no rows, they are of another kind or too few, or rows for validation are
                given.
        """
        given = "validation_data" if validation_data is not None else "validation_split"
        if validation_data is not None or validation_split:
            raise ConfigError(
                f"{given} should be left out with cross_validated, which validates on the rows of each fold."
            )
        if data is None:
            raise ConfigError("cross_validated needs rows; got none. Pass data=.")
        rows = TrainingRows(*data) if isinstance(data, tuple) else TrainingRows(data)
        require_samples(rows, "cross_validated")
        count = count_of(rows)
        if count is not None and count < self.num_folds:
            raise ConfigError(f"folds should be at most the number of rows, {count}; got {self.num_folds}.")


@short
def cross_validated(build: Any, folds: int = 3) -> CrossValidated:
    """Return a function for ``search`` whose trials are cross-validated.

    The rows are divided at random into ``folds`` parts of about equal size, the same for all trials of a
    search. A trial trains one model per fold, on the rows outside of the fold and from the same initial
    weights, and validates it on the rows of the fold. The curve of the trial is the mean of the folds, and
    its value is the best epoch of this curve. A fold that ended before an epoch, as with EarlyStopping,
    counts there with its last result, so that each mean is over the same rows. After a fold has diverged, the
    mean is NaN. The pruner may end a trial after each fold. No model is kept.

    Args:
        build: the function that ``search`` would call for a model, or a HyperModel of KerasTuner, of which
            only ``build`` is called.
        folds: the number of folds, at least 2.

    Raises:
        ConfigError: ``build`` is not a function, or ``folds`` not a whole number of at least 2.

    Example:
        >>> found = tune.search(tune.cross_validated(build, 5), (x, y), space, epochs=10)  # doctest: +SKIP
        >>> model = build(**found.best_params)  # doctest: +SKIP
    """
    require_build(build)
    return CrossValidated(getattr(build, "build", build), whole_number("folds", folds, least=2))


def require_build(build: Any) -> Any:
    """Return a function that builds a model, or a HyperModel.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(build, keras.Model) or not callable(build) and not hasattr(build, "build"):
        raise ConfigError(f"build should be a function, or a HyperModel of KerasTuner; got {build!r:.100}.")
    return build
