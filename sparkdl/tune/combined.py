"""The Keras model of an ensemble: a functional model whose layers are the members and a combination of them.

The members are copies, so that later changes of the originals do not change the ensemble, and one model may
be a member twice. They are frozen, and called as in inference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from sparkdl.core.tree import leaves
from sparkdl.errors import ConfigError, ModelError
from sparkdl.modeling import checks, keras_internals, losses, serialization, signature
from sparkdl.modeling.ensemble_layers import LearnedShares, Spread, Vote
from sparkdl.modeling.keras_variables import dtype_of
from sparkdl.modeling.object_pickling import copied

PREDICTION, UNCERTAINTY = "prediction", "uncertainty"  # the names of the outputs
MEMBER = "member_{}"


class Score(NamedTuple):
    """The loss and the metrics of a model's only output, as arguments of ``compile``.

    Attributes:
        loss: the loss; None for a model that is not compiled with one.
        metrics: the metrics.
        weighted_metrics: the metrics that sample weights weigh.
    """

    loss: Any = None
    metrics: Sequence[Any] = ()
    weighted_metrics: Sequence[Any] = ()


class Votes(NamedTuple):
    """The combination of an ensemble's members.

    Attributes:
        voting: "soft" or "hard".
        shares: the weight of each member; they sum to 1.
        spread: whether the members' standard deviation is an output too.
    """

    voting: str
    shares: list[float]
    spread: bool


def combine(models: Sequence[keras.Model], votes: Votes, scored: keras.Model | None = None) -> keras.Model:
    """Return the compiled model of an ensemble.

    Args:
        models: the members.
        votes: their combination.
        scored: the model whose loss and metrics the ensemble gets; None: the first compiled member.

    Raises:
        ConfigError: "hard" was requested for models that do not classify, or that return logits and have a
            metric of the user's own, which may take only logits.
        ModelError: a member is not a Keras model, its inputs are not known, it has several outputs, it cannot
            be copied, or its inputs or its output do not match those of the first member.
    """
    _require_alike(models)
    scored = scored or next((model for model in models if getattr(model, "loss", None)), models[0])
    score, logits = score_of(scored), False
    if votes.voting == "hard":
        logits = _require_classes(scored)
        score = _of_votes(score, logits=logits)
    inputs, outputs = _outputs(models)
    options = {"dtype": dtype_of(outputs[0])}
    prediction = Vote(votes.shares, votes.voting, logits, name=PREDICTION, **options)(outputs)
    made: Any = prediction
    if votes.spread:
        made = {
            PREDICTION: prediction,
            UNCERTAINTY: Spread(votes.shares, name=UNCERTAINTY, **options)(outputs),
        }
    model = keras.Model(inputs, made, name="ensemble")
    _compile(model, score, keras.optimizers.SGD())
    return model


def votes_of(model: keras.Model) -> Votes:
    """Return the combination of members in a model that ``combine`` made.

    Raises:
        ModelError: the model is not an ensemble.
    """
    last = next((layer for layer in model.layers if isinstance(layer, Vote)), None)
    if last is None:
        raise ModelError(
            f'The model "{model.name}" is not an ensemble: it has no layer that combines members. Use '
            "sparkdl.load_spark_model, or pass a list of models to sparkdl.Ensemble."
        )
    return Votes(last.voting, list(last.shares), len(model.outputs) > 1)


def members_of(model: keras.Model) -> list[keras.Model]:
    """Return the members of a model that ``combine`` made, in order."""
    return [model.get_layer(MEMBER.format(place)) for place in range(len(votes_of(model).shares))]


def without_spread(model: keras.Model) -> keras.Model:
    """Return the part of an ensemble that has the prediction as its only output, compiled."""
    if len(model.outputs) == 1:
        return model
    inputs = keras_internals.input_structure(model)
    part = keras.Model(inputs, model.get_layer(PREDICTION).output, name=model.name)
    _compile(part, score_of(model), keras.optimizers.SGD())
    return part


def learner(model: keras.Model, learning_rate: float) -> tuple[keras.Model, LearnedShares]:
    """Return a model that trains the weights of an ensemble's members, and its layer with the weights."""
    inputs, outputs = _outputs(members_of(model))
    layer = LearnedShares(name=PREDICTION, dtype=dtype_of(outputs[0]))
    made = keras.Model(inputs, layer(outputs), name="stacking")
    _compile(made, score_of(model), keras.optimizers.Adam(learning_rate))
    return made, layer


def _frozen(model: keras.Model, place: int) -> keras.Model:
    """Return a copy of a model with its weights, as member ``place``: not compiled and not trainable."""
    copy = serialization.thaw(*serialization.freeze(model, trains=False))
    # The copy is compiled as the original is. A new model of the same layers is not.
    member = keras.Model(_inputs_of(copy), copy.outputs[0], name=MEMBER.format(place))
    member.trainable = False
    return member


def score_of(model: keras.Model) -> Score:
    """Return copies of the loss and the metrics of a model's only output, or of an ensemble's prediction."""
    if not getattr(model, "loss", None):
        return Score()
    given = keras_internals.compile_arguments(model)
    parts = [[each for each in leaves(given.get(name)) if each is not None] for name in Score._fields]
    loss, *metrics = copied(parts)  # a metric has a state, so two models cannot share one
    return Score(loss[0], *metrics)


def _compile(model: keras.Model, score: Score, optimizer: keras.optimizers.Optimizer) -> None:
    """Compile a model with the loss and the metrics of its prediction."""
    given = {name: part for name, part in score._asdict().items() if part}
    if len(model.outputs) > 1:
        given = {name: {PREDICTION: part} for name, part in given.items()}
    model.compile(optimizer, **given)


def _outputs(models: Sequence[keras.Model]) -> tuple[Any, list[Any]]:
    """Return new inputs, in the first member's structure, and the output of a copy of each model for them."""
    inputs = keras.tree.map_structure(_input_like, _inputs_of(models[0]))
    flat = keras.tree.flatten(inputs)
    return inputs, [
        _frozen(model, place)(keras.tree.pack_sequence_as(_inputs_of(model), flat), training=False)
        for place, model in enumerate(models)
    ]


def _input_like(tensor: Any) -> Any:
    shape, dtype, name = tensor.shape, dtype_of(tensor), tensor.name
    return keras.Input(batch_shape=shape, dtype=dtype, name=name, sparse=getattr(tensor, "sparse", False))


def _inputs_of(model: keras.Model) -> Any:
    """Return the inputs of a model in their structure."""
    structure = keras_internals.input_structure(model)
    return model.inputs[0] if structure is None else structure


def _require_alike(models: Sequence[Any]) -> None:
    """Require members that take the same inputs and return one output of the same shape.

    Raises:
        ModelError: a member is not such a model.
    """
    for model in models:
        checks.require_model(model)
        if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
            raise ModelError(
                f'The inputs of the model "{model.name}" are not known. Build it from keras.Input, as a '
                "functional or a sequential model."
            )
        if losses.is_own(model, "call"):
            raise ModelError(
                f'The model "{model.name}" has its own call method, which an ensemble would not use. Move it '
                "into a layer of a functional model."
            )
        if len(model.outputs) > 1:
            raise ModelError(
                f'A member of an ensemble should have one output; the model "{model.name}" has '
                f"{len(model.outputs)}: {', '.join(signature.output_names(model))}. Make an ensemble of "
                "models with one of them each."
            )
    first = models[0]
    for place, model in enumerate(models[1:], 1):
        for what, own, other in zip(("inputs", "output"), _form(model), _form(first), strict=True):
            if own != other:
                raise ModelError(
                    f"The members of an ensemble should have the same {what}: member 0 "
                    f'("{first.name}") has {_shown(other)}, and member {place} ("{model.name}") has '
                    f"{_shown(own)}. Leave one of them out, or give them the same {what}."
                )


def _form(model: keras.Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shape of a row and the dtype of each input and of the output, by the key in a dict."""
    structure = keras_internals.input_structure(model)
    if isinstance(structure, dict):
        inputs = {f"{key!r} ": structure[key] for key in sorted(structure)}
    else:
        inputs = {
            f"input {place} " * (len(model.inputs) > 1): each for place, each in enumerate(model.inputs)
        }
    return {name: _kind(each) for name, each in inputs.items()}, {"": _kind(model.outputs[0])}


def _kind(tensor: Any) -> tuple[tuple[int | None, ...], str]:
    return tuple(tensor.shape[1:]), dtype_of(tensor)


def _shown(form: dict[str, Any]) -> str:
    return ", ".join(f"{name}{shape} {dtype}" for name, (shape, dtype) in form.items())


def _require_classes(model: keras.Model) -> bool:
    """Require a model that classifies; return True if its output is logits.

    Raises:
        ConfigError: the model does not classify.
    """
    head = losses.head_of(model, "auto", signature.known_output(model))
    if not head.classifies:
        raise ConfigError(
            'voting="hard" needs members that classify: compiled with a cross-entropy, and with one vector '
            f'per row as the output; the model "{model.name}" has a loss of '
            f"{getattr(model, 'loss', None)!r} and an output of {signature.known_output(model)}. Use "
            'voting="soft", or compile the members.'
        )
    return head.logits


def _of_votes(score: Score, *, logits: bool) -> Score:
    """Return the same loss and metrics for shares of votes, which are probabilities.

    Args:
        score: the loss and the metrics of a member.
        logits: whether the member returns logits.

    Raises:
        ConfigError: the members return logits, and it is not known whether a metric takes probabilities too.
    """
    loss = _of_probabilities(score.loss) if isinstance(score.loss, keras.losses.Loss) else score.loss
    if not logits:
        return score._replace(loss=loss)
    return Score(loss, *([_metric_of_votes(metric) for metric in given] for given in score[1:]))


def _metric_of_votes(metric: Any) -> Any:
    """Return the same metric, of members that return logits, for shares of votes.

    A threshold for logits becomes the probability of this logit. Keras's default of 0.5 is one already.

    Raises:
        ConfigError: it is not known whether the metric takes probabilities too.
    """
    wrapped = keras_internals.wrapped_function(metric)
    if wrapped and "from_logits" in (arguments := keras_internals.function_arguments(metric)):
        arguments["from_logits"] = False
        return metric
    config = metric.get_config() if isinstance(metric, keras.metrics.Metric) else {}
    if "from_logits" in config:
        return _of_probabilities(metric)
    kind = metric if wrapped is None and not config else wrapped or type(metric)
    if not isinstance(metric, str) and kind.__module__.partition(".")[0] != "keras":
        raise ConfigError(
            f'voting="hard" returns shares of votes, which are probabilities, but the metric "'
            f'{getattr(metric, "name", None) or getattr(metric, "__name__", metric)}" of the members is for '
            "their logits, as far as is known. Give it an argument from_logits that its get_config returns, "
            "or compile the first member without it."
        )
    limits = {name: config[name] for name in ("threshold", "thresholds") if config.get(name) is not None}
    if not limits:
        return metric
    changed = {
        name: list(map(_probability, each)) if isinstance(each, list | tuple) else _probability(each)
        for name, each in limits.items()
    }
    return type(metric).from_config(config | changed)


def _probability(logit: float) -> float:
    return logit if logit == 0.5 else 1 / (1 + math.exp(-logit))


def _of_probabilities(part: Any) -> Any:
    """Return the same loss or metric for probabilities, since shares of votes are not logits."""
    config = part.get_config()
    return type(part).from_config(config | {"from_logits": False}) if "from_logits" in config else part
