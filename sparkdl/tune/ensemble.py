"""Ensembles: several models that predict together, as one Keras model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np

from sparkdl.api.spark_model import SparkModel
from sparkdl.core.validation import one_of, positive_number, require_flag, whole_number
from sparkdl.errors import ConfigError, ModelError, short
from sparkdl.modeling import signature
from sparkdl.modeling.keras_types import Model
from sparkdl.tune import combined, members
from sparkdl.tune.rows import TrainingRows
from sparkdl.ui.history import History

Voting: TypeAlias = Literal["soft", "hard"]
VOTINGS = "soft", "hard"


class Ensemble:
    """Models for the same task, whose predictions are combined.

    ``model`` is one Keras model: its inputs are those of the members, the members are its layers, and its
    output combines theirs. So it works wherever a Keras model does: in ``SparkModel``, ``predict_udf`` and
    ``sparkdl.ml.KerasTransformer``. Rows pass through Spark once, however many members there are. The members
    are copies, and do not train any more.

    Args:
        models: the members, compiled or not, with the same inputs and one output of the same shape. The
            ensemble has the loss and the metrics of the first one that is compiled with a loss.
        voting: "soft" for the mean of the members' outputs; "hard" for the share of members that vote for
            each class, for members that are compiled with a cross-entropy.
        weights: the weight of each member, at least 0; by default equal. They are divided by their sum.
        spread: whether the members' standard deviation is a second output. ``model`` then returns a
            dict of "prediction" and "uncertainty", and ``predict`` a struct column with these fields.

    Attributes:
        model: the Keras model of the ensemble, which is compiled.
        histories: the History of each member if ``fit`` trained them; after ``stack``, that of the training
            of the weights; otherwise empty.

    Raises:
        ConfigError: an argument cannot be honoured.
        ModelError: a member is not a Keras model, its inputs are not known, it has several outputs, it cannot
            be copied, or its inputs or its output do not match those of the first member.

    Example:
        >>> ensemble = Ensemble.fit(build, x, y, num_members=5, epochs=10)  # doctest: +SKIP
        >>> ensemble.predict(frame)  # doctest: +SKIP
    """

    histories: Sequence[History] = ()

    @short
    def __init__(
        self,
        models: Sequence[Model],
        *,
        voting: Voting = "soft",
        weights: Sequence[float] | None = None,
        spread: bool = False,
    ) -> None:
        models = _sequence("models", models)
        shares = _shares(weights, len(models))
        votes = combined.Votes(one_of("voting", voting, VOTINGS), shares, require_flag("spread", spread))
        self.model: Model = combined.combine(models, votes)

    def __repr__(self) -> str:
        votes = combined.votes_of(self.model)
        weights = ", ".join(f"{share:.3g}" for share in votes.shares)
        return (
            f"Ensemble(members: {len(votes.shares)}, voting: {votes.voting}, weights: [{weights}], "
            f"spread: {votes.spread})"
        )

    @property
    def members(self) -> list[Model]:
        """The members, in order; not compiled and not trainable."""
        return combined.members_of(self.model)

    @property
    def voting(self) -> str:
        """The kind of combination: "soft" or "hard"."""
        return combined.votes_of(self.model).voting

    @property
    def weights(self) -> list[float]:
        """The weight of each member; they sum to 1."""
        return combined.votes_of(self.model).shares

    @property
    def spread(self) -> bool:
        """True if the members' standard deviation is a second output."""
        return combined.votes_of(self.model).spread

    @classmethod
    @short
    def fit(  # noqa: PLR0913 - the rows, the members, and how they vote
        cls,
        build: Callable[[], Model],
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        num_members: int = 5,
        bootstrap: bool = False,
        seed: int | None = None,
        voting: Voting = "soft",
        spread: bool = False,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Ensemble:
        """Train several models that one function builds, and return their ensemble.

        The members differ in their initial weights and the order of their rows, and with ``bootstrap`` also
        in their rows (Breiman, Bagging Predictors, 1996). By default one worker trains each member. As many
        members are trained at the same time as the slots allow; with dynamic allocation, all of them.

        Args:
            build: a function without arguments that returns a compiled model. Layers without a seed of
                their own get a different one for each member.
            x: as in ``SparkModel.fit``.
            y: as in ``SparkModel.fit``.
            sample_weight: as in ``SparkModel.fit``.
            num_members: number of members.
            bootstrap: whether each member is trained on rows drawn with replacement: exactly as many as there
                are in arrays, approximately as many in an RDD or a DataFrame. Pass ``validation_data`` with
                it, not ``validation_split``, whose rows would have copies among the training rows.
            seed: the seed of all random choices; None draws one.
            voting: as in ``Ensemble``.
            spread: as in ``Ensemble``.
            settings: arguments of each member's ``SparkModel``. The defaults here are ``num_workers=1``
                and ``dashboard=False``, and ``frequency="epoch"`` if ``num_workers`` is 1.
            options: other arguments of ``SparkModel.fit``, such as ``epochs``. Callbacks are copied for each
                member. ``verbose`` is 0 by default.

        Returns:
            The ensemble. Its ``histories`` has the History of each member.

        Raises:
            ConfigError: an argument cannot be honoured.
            ModelError: ``build`` does not return a compiled Keras model of which an ensemble can be made.
            SparkDLError: as ``SparkModel.fit`` raises for the first member that fails. The other members are
                then stopped.
        """
        count = whole_number("num_members", num_members)
        one_of("voting", voting, VOTINGS)
        require_flag("spread", spread)
        if seed is not None:
            whole_number("seed", seed, least=0)
        seeds = [int(each) for each in np.random.SeedSequence(seed).generate_state(count)]
        training = members.Training(settings or {}, options, require_flag("bootstrap", bootstrap))
        rows = TrainingRows(x, y, sample_weight)
        models, histories = members.train(build, rows, seeds, training)
        ensemble = cls(models, voting=voting, spread=spread)
        ensemble.histories = histories
        return ensemble

    @short
    def stack(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        epochs: int = 20,
        learning_rate: float = 0.1,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Ensemble:
        """Learn the weights of the members on rows that they were not trained on; return a new ensemble.

        The weights minimize the loss of the combined prediction. They begin equal, stay positive and sum to
        1, which keeps stacked models from fitting the noise of the held-out rows (Breiman, Stacked
        Regressions, 1996). Adam trains them, while the members are frozen.

        Args:
            x: held-out rows, as in ``SparkModel.fit``.
            y: as in ``SparkModel.fit``.
            sample_weight: as in ``SparkModel.fit``.
            epochs: number of passes over the rows.
            learning_rate: the learning rate of Adam.
            settings: arguments of the ``SparkModel`` that learns the weights.
            options: other arguments of ``SparkModel.fit``. ``verbose`` is 0 by default.

        Raises:
            ConfigError: an argument cannot be honoured, or the members vote hard.
            ModelError: no member was compiled with a loss.
            SparkDLError: as ``SparkModel.fit`` raises.
        """
        votes = combined.votes_of(self.model)
        if votes.voting == "hard":
            raise ConfigError(
                'stack needs voting="soft", since votes say nothing of how sure a member is; got '
                'voting="hard". Make the ensemble with voting="soft".'
            )
        self._require_loss("stack")
        rate = positive_number("learning_rate", learning_rate, unit="weight per step")
        learner, layer = combined.learner(self.model, rate)
        spark_model = SparkModel(learner, **{"dashboard": False} | dict(settings or {}))
        history = spark_model.fit(
            x, y, sample_weight=sample_weight, epochs=epochs, **{"verbose": 0} | options
        )
        stacked = self._of(combined.combine(self.members, votes._replace(shares=layer.learned()), self.model))
        stacked.histories = [history]
        return stacked

    def predict(self, x: Any, batch_size: int | None = None, **options: Any) -> Any:
        """Return the predictions of the ensemble, computed on the executors.

        Args:
            x: arrays, an RDD or a DataFrame, as in ``SparkModel.predict``.
            batch_size: rows per forward pass; 32 by default.
            options: the other arguments of ``SparkModel.predict``.

        Returns:
            As ``SparkModel.predict``. With ``spread``, for arrays a dict of arrays, for an RDD such a dict
            per row, and for a DataFrame a struct column with the fields "prediction" and "uncertainty".

        Raises:
            SparkDLError: as ``SparkModel.predict`` raises.
        """
        return SparkModel(self.model).predict(x, batch_size, **options)

    @short
    def evaluate(self, x: Any, y: Any = None, batch_size: int | None = None, **options: Any) -> Any:
        """Return the loss and the metrics of the ensemble's prediction, computed on the executors.

        Args:
            x: as in ``SparkModel.evaluate``.
            y: as in ``SparkModel.evaluate``.
            batch_size: rows per forward pass; 32 by default.
            options: the other arguments of ``SparkModel.evaluate``.

        Returns:
            As ``SparkModel.evaluate``.

        Raises:
            ModelError: no member was compiled with a loss.
            SparkDLError: as ``SparkModel.evaluate`` raises.
        """
        self._require_loss("evaluate")
        return SparkModel(combined.without_spread(self.model)).evaluate(x, y, batch_size, **options)

    @short
    def save(self, path: str, overwrite: bool = False) -> None:
        """Write the ensemble as one Keras file. It makes the same predictions wherever it is loaded.

        Args:
            path: a local path, or a URI of any file system that Spark can reach; ends with ".keras".
            overwrite: whether an existing file may be replaced.

        Raises:
            ConfigError: the path does not end with ".keras".
            FileExistsError: the file exists, and ``overwrite`` is False.
        """
        SparkModel(self.model).save(path, overwrite)

    @classmethod
    @short
    def load(
        cls, path: str, custom_objects: dict[str, Any] | None = None, *, safe_mode: bool = True
    ) -> Ensemble:
        """Return an ensemble that ``save`` wrote.

        Args:
            path: the path or URI of the ".keras" file.
            custom_objects: classes and functions that the members need, by name.
            safe_mode: whether to refuse models that contain code, such as Lambda layers.

        Raises:
            ConfigError: the path does not end with ".keras".
            FileNotFoundError: there is no such file.
            ModelError: Keras cannot restore a model from the file, or the model is not an ensemble.
        """
        model = SparkModel.load(path, custom_objects, safe_mode=safe_mode).model
        combined.votes_of(model)
        return cls._of(model)

    @classmethod
    def _of(cls, model: Model) -> Ensemble:
        """Return the ensemble whose Keras model this is."""
        ensemble = cls.__new__(cls)
        ensemble.model = model
        return ensemble

    def _require_loss(self, method: str) -> None:
        """Require members that were compiled with a loss.

        Raises:
            ModelError: no member was.
        """
        if not signature.needs_labels(self.model):
            raise ModelError(
                f"{method} needs a loss; none of the members was compiled with one. Compile a member before "
                "you pass it to sparkdl.Ensemble."
            )


def _sequence(name: str, value: Any) -> list[Any]:
    """Return a list of at least one value.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{name} should be a list or a tuple with at least one element; got {value!r}.")
    return list(value)


def _shares(weights: Any, count: int) -> list[float]:
    """Return the weight of each of ``count`` members, divided by the sum of all.

    Raises:
        ConfigError: there is not one number per member, one is negative or not finite, or all are 0.
    """
    if weights is None:
        return [1 / count] * count
    given = weights.tolist() if hasattr(weights, "tolist") else weights
    given = _sequence("weights", given)
    if len(given) != count:
        raise ConfigError(
            f"weights should have a number for each of the {count} members; got {len(given)}: {given!r}."
        )
    if not all(map(_is_weight, given)) or not 0 < sum(given) < math.inf:
        raise ConfigError(
            f"weights should be finite numbers of at least 0, and not all of them 0; got {given!r}."
        )
    return [float(each / sum(given)) for each in given]


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return 0 <= float(value) < math.inf
