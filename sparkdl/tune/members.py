"""The members of an ensemble, which are trained at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sparkdl.api.spark_model import SparkModel
from sparkdl.errors import ConfigError
from sparkdl.modeling import checks
from sparkdl.modeling.keras_types import Model
from sparkdl.spark.application import application_of
from sparkdl.spark.failures import explained_if_stopped
from sparkdl.tune.rows import TrainingRows, require_samples, resampled
from sparkdl.tune.side_by_side import own_callbacks, run_threads, seeded, settings_of
from sparkdl.ui.history import History

OF_ONE_FIT = "checkpoint", "resume"  # arguments of fit that several fits cannot share


class Training(NamedTuple):
    """The settings with which members are trained.

    Attributes:
        settings: arguments of each member's SparkModel.
        fit: arguments of each member's ``fit``.
        bootstrap: whether each member gets a bootstrap sample of the rows.
    """

    settings: Mapping[str, Any]
    fit: Mapping[str, Any]
    bootstrap: bool


def train(
    build: Callable[[], Model], rows: TrainingRows, seeds: Sequence[int], training: Training
) -> tuple[list[Model], list[History]]:
    """Return trained models, one per seed, and the History of each.

    Args:
        build: a function that returns a compiled model.
        rows: the rows.
        seeds: for each member, the seed of its initial weights, its sample of the rows, and their order.
        training: the settings of the members.

    Raises:
        ConfigError: an argument cannot be honoured. ``SparkModel.fit`` lists the other errors; the first one
            ends the training of all members.
    """
    shared = [name for name in OF_ONE_FIT if training.fit.get(name)]
    if shared:
        raise ConfigError(
            f"{shared[0]} is for one fit; got an ensemble of {len(seeds)} fits. Leave it out, or fit the "
            "members one by one and pass them to sparkdl.Ensemble."
        )
    settings = settings_of(training.settings)
    if training.bootstrap:
        require_samples(rows, "bootstrap=True")
    cluster = application_of(getattr(rows.x, "sparkSession", None))
    with explained_if_stopped(cluster):
        at_once = len(seeds) if cluster.dynamic else max(1, cluster.slots() // settings["num_workers"])
    own_callbacks(training.fit.get("callbacks"))  # refuses those that cannot be copied
    members = [SparkModel(built(build, seed), **settings) for seed in seeds]

    def fit(place: int) -> History:
        seed, options = seeds[place], dict(training.fit)
        own = resampled(rows, seed) if training.bootstrap else rows
        options["callbacks"] = own_callbacks(options.get("callbacks"))
        return members[place].fit(**own._asdict(), **{"verbose": 0, "seed": seed} | options)

    def stop() -> None:
        for member in members:
            member.model.stop_training = True

    calls = [partial(fit, place) for place in range(len(seeds))]
    with explained_if_stopped(cluster):
        histories = side_by_side(cluster, calls, at_once, stop)
    return [member.model for member in members], histories


def built(build: Callable[[], Model], seed: int) -> Model:
    """Return the model of a function, with initial weights that a seed determines.

    Raises:
        ModelError: the function does not return a compiled Keras model.
    """
    with seeded(seed):
        model = build()
    checks.require_compiled(model)
    return model


def side_by_side(
    cluster: Any, calls: Sequence[Callable[[], Any]], at_once: int, stop: Callable[[], None]
) -> list[Any]:
    """Return the results of some calls, each made in a thread.

    Args:
        cluster: the Spark application.
        calls: the calls.
        at_once: the number of calls at the same time.
        stop: asks the calls that are under way to end soon; called until they have.

    Raises:
        BaseException: the first error of a call, also SystemExit, which would end only its thread. The calls
            that are under way then end, and no other begins.
    """
    left = deque(enumerate(calls))
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                place, call = left.popleft()
            except IndexError:
                return
            try:
                results[place] = call()
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                error.add_note(f"Member {place} of the ensemble failed, so no member was trained further.")
                errors.append(error)

    def end() -> None:
        left.clear()
        stop()

    run_threads(
        cluster,
        work,
        min(at_once, len(calls)),
        name="sparkdl-member",
        stop=end,
        failed=lambda: bool(errors),
    )
    if errors:
        raise errors[0]
    return results
