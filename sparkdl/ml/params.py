"""The Params of the Estimator and the Transformers: their names, descriptions and converters.

Setters, getters and the signatures of constructors are made from them. The Params of settings are made from
the fields of ``TrainConfig``, its groups and ``FitConfig``. Setting a Param converts and checks its value, if
the Param has a converter. ``SparkModel`` checks combinations of values when a fit begins.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from pyspark.ml.param import Param, Params, TypeConverters

from sparkdl.config import OF_PLACE as FLAT_OF_PLACE
from sparkdl.config import CheckpointConfig, FitConfig, TrainConfig
from sparkdl.core.validation import Check, choose, whole_number
from sparkdl.errors import ConfigError
from sparkdl.rules import RULES, Rule
from sparkdl.settings import GROUPS
from sparkdl.spark import spark_internals

Self = TypeVar("Self", bound="KerasParams")
Convert = Callable[[str, Any], Any]


DEFAULTS: dict[str, Any] = {
    "featuresCol": "features",
    "labelCol": "label",
    "predictionCol": "prediction",
    "probabilityCol": "probability",
    "rawPredictionCol": "rawPrediction",
    "task": "auto",
    "inferenceBatchSize": 1024,
    "mode": TrainConfig.mode.value,
    "frequency": TrainConfig.frequency,
    "batchSize": FitConfig.batch_size,
    "epochs": FitConfig.epochs,
    "shuffle": FitConfig.shuffle,
    "verbose": 0,
    "validationSplit": FitConfig.validation_split,
    "preservePartitions": FitConfig.preserve_partitions,
    "nan": FitConfig.nan,
}


class ModelTask(StrEnum):
    """Meanings of a model's output."""

    AUTO = "auto"
    CLASSIFICATION = "classification"
    REGRESSION = "regression"


def _param(doc: str, convert: Convert | None = None) -> Any:
    """Return a Param that is named after its class attribute."""
    made: Any = Param(spark_internals.no_parent(), "", doc)
    made.convert = convert
    return made


def _plain(convert: Callable[[Any], Any]) -> Convert:
    return lambda name, value: convert(value)


TEXT, FLAG, SHARE = map(_plain, (TypeConverters.toString, TypeConverters.toBoolean, TypeConverters.toFloat))


def _whole(name: str, value: Any) -> int:
    return whole_number(name, TypeConverters.toInt(value))


def _natural(name: str, value: Any) -> int:
    return whole_number(name, TypeConverters.toInt(value), least=0)


def _one_of(choices: type[StrEnum]) -> Convert:
    return lambda name, value: choose(name, value, choices).value


def _columns(name: str, value: Any) -> Any:
    """Convert the name of a column, a list of names, or a dict of names."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        return [_columns(name, each) for each in value]
    if isinstance(value, dict) and value and all(isinstance(each, str) for each in value):
        return {key: _columns(name, each) for key, each in value.items()}
    raise TypeError(f"Could not convert {value!r} to the name of a column, or a list or dict of names.")


def _classes(name: str, value: Any) -> dict[int, float]:
    """Convert weights by class; class numbers may be strings, as in JSON."""
    if not isinstance(value, dict):
        raise TypeError(f"Could not convert {value!r} to a dict of numbers by class index.")
    return {int(label): float(weight) for label, weight in value.items()}


def _thresholds(name: str, value: Any) -> list[float]:
    """Convert the thresholds of classes; as in Spark, at most one may be 0."""
    numbers: list[float] = TypeConverters.toListFloat(value)
    if not numbers or not all(number >= 0 for number in numbers) or numbers.count(0) > 1:
        raise ConfigError(
            f"{name} should be a list of numbers of at least 0, one for each class, with at most one 0; got "
            f"{value!r}."
        )
    return numbers


def _rule(name: str, value: Any) -> Any:
    if not isinstance(value, Rule) and value not in RULES:
        raise ConfigError(f"{name} should be one of {', '.join(map(repr, RULES))}, or a Rule; got {value!r}.")
    return value


def _python(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


SPARK: dict[Any, Callable[[Any], Any]] = {
    int: TypeConverters.toInt,
    float: TypeConverters.toFloat,
    bool: TypeConverters.toBoolean,
    str: TypeConverters.toString,
}


def _converter(hint: Any, check: Check) -> Convert:
    """Return the converter for a field.

    Args:
        hint: the type of the field. If it is a type in SPARK, with or without None, Spark's
            converter is used. Otherwise a value is not converted, except that NumPy scalars become
            Python numbers.
        check: the check of the field.
    """
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    plain = SPARK.get(kinds[0], _python) if len(kinds) == 1 else _python

    def convert(name: str, value: Any) -> Any:
        value = plain(value)
        check(name, value)
        return value

    return convert


def _camel(text: str) -> str:
    return re.sub(r"_(\w)", lambda found: found[1].upper(), text)


def _descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of fields in a dataclass's docstring, with names in Spark's spelling."""
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(kind.__doc__ or ""), re.MULTILINE)
    return {name: _camel(" ".join(text.replace("``", "").split())) for name, text in entries}


def _params_of(*kinds: type[Any]) -> dict[str, Any]:
    """Return a Param for each field of some dataclasses, by name, except for those in OTHERWISE."""
    made = {}
    for kind in kinds:
        hints, texts = get_type_hints(kind), _descriptions(kind)
        for each in fields(kind):
            if each.name not in OTHERWISE:
                convert = CONVERT.get(each.name) or _converter(hints[each.name], each.metadata["check"])
                made[_camel(each.name)] = _param(texts[each.name], convert)
    return made


def _epochs(name: str, value: Any) -> Any:
    return [int(each) for each in value] if isinstance(value, list | tuple) else _whole(name, value)


OTHERWISE = (*GROUPS, "profile")  # a group's fields are Params themselves; a profile is for a History
CONVERT = {
    "merge": _rule,
    "validation_freq": _epochs,
    "class_weight": _classes,
    "checkpoint": _plain(CheckpointConfig.of),
}
OF_SETTINGS = _params_of(TrainConfig, *GROUPS.values())
OF_FIT = _params_of(FitConfig)


class KerasParams(Params):
    """Params with setters and getters; the constructor takes them by keyword."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own: list[tuple[str, Any]] = [pair for pair in vars(cls).items() if isinstance(pair[1], Param)]
        for name, param in own:
            param.name = name
            if param.convert is not None:
                param.typeConverter = functools.partial(param.convert, name)
            _add_accessors(cls, param)
        names = sorted({p.name for c in cls.__mro__ for p in vars(c).values() if isinstance(p, Param)})
        keyword = inspect.Parameter.KEYWORD_ONLY
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword, default=DEFAULTS.get(name)) for name in names]
        )

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._setDefault(**{name: value for name, value in DEFAULTS.items() if self.hasParam(name)})
        self.setParams(**params)

    def setParams(self: Self, **params: Any) -> Self:
        """Set several Params by name; None clears a Param.

        Raises:
            TypeError: a Param does not exist, or the value has the wrong type.
            ConfigError: the value is invalid.
        """
        for name in params:
            if not self.hasParam(name):
                camel = _camel(name)
                hint = f" Use {camel}." if self.hasParam(camel) else ""
                raise TypeError(f"{type(self).__name__} has no Param {name!r}.{hint}")
            if params[name] is None:
                self.clear(self.getParam(name))
        return self._set(**{name: value for name, value in params.items() if value is not None})


def _add_accessors(cls: type, param: Any) -> None:
    name, suffix = param.name, param.name[0].upper() + param.name[1:]

    def set_value(self: Any, value: Any) -> Any:
        return self.setParams(**{name: value})

    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    for method, verb in ((set_value, "set"), (get_value, "get")):
        method.__name__ = f"{verb}{suffix}"
        method.__qualname__ = f"{cls.__name__}.{method.__name__}"
        method.__doc__ = f"{verb.title()} {name}: {param.doc}"
        setattr(cls, method.__name__, method)


class ModelParams(KerasParams):
    """The model of a stage."""

    model = _param("the keras.Model; an Estimator needs a compiled model, or a function that returns one")

    def held(self) -> Any:
        """Return the model; None if it is not set."""
        return self.getOrDefault("model") if self.isDefined("model") else None

    def hold(self, model: Any) -> None:
        """Set the model."""
        self._set(model=model)


class PredictionParams(KerasParams):
    """The columns and settings of predictions."""

    customObjects = _param("classes and functions that the model needs, by name")
    featuresCol = _param(
        "the column of features, or a list of columns that form one array; for several inputs, a list of "
        "columns, or a dict from inputs to columns or from columns to inputs",
        _columns,
    )
    decode = _param("functions by column that convert a value, such as the bytes of an image, to an array")
    predictionCol = _param(
        "the column of predictions: class indices, numbers, arrays, or a struct for several outputs", TEXT
    )
    probabilityCol = _param("the column of class probabilities as a vector; empty for none", TEXT)
    rawPredictionCol = _param(
        "the column of raw predictions as a vector: logits, up to a constant per row, or (-z, z) "
        "for an output of one unit with the logit z; empty for none",
        TEXT,
    )
    task = _param(
        'the kind of output: "classification", "regression", or "auto" (decided by the loss)',
        _one_of(ModelTask),
    )
    thresholds = _param(
        "a number for each class, which divides its probability; the class with the largest quotient is "
        "predicted",
        _thresholds,
    )
    inferenceBatchSize = _param(
        "rows per forward pass when predicting; by default the number that the model requires, or 1024",
        _whole,
    )


class FitParams(PredictionParams):
    """Params for settings of SparkModel and for arguments of its ``fit``."""

    vars().update(OF_SETTINGS | OF_FIT)
    distribution = _param("on JAX, a function that returns a keras.distribution object for a task's devices")

    labelCol = _param(
        "the column of labels; for several outputs a list or a dict, as for featuresCol; empty for none",
        _columns,
    )
    weightCol = _param("the column of sample weights; for several outputs a list or a dict", _columns)
    validationIndicatorCol = _param("the column of booleans that marks the validation rows", TEXT)
    callbacks = _param("Keras callbacks, which run on the driver", _plain(TypeConverters.toList))


class TrainingParams(ModelParams, FitParams):
    """The Params of an Estimator: a model, and the settings of its training."""


SETTINGS = ("customObjects", *OF_SETTINGS, "distribution")
FIT = (*OF_FIT, "labelCol", "validationIndicatorCol", "callbacks", "decode")
OF_PLACE = (*map(_camel, FLAT_OF_PLACE), "checkpoint", "resume")  # see ``config``
OBJECTS = "model", "customObjects", "callbacks", "distribution", "decode"  # not saved in the JSON metadata


def arguments(params: KerasParams, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of Params that have one, as keyword arguments of SparkModel or its ``fit``."""
    return {
        re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), name): params.getOrDefault(name)
        for name in names
        if params.isDefined(name)
    }


def by_name(columns: Any, names: tuple[str, ...], what: str) -> Any:
    """Turn a dict from columns to inputs into a dict from inputs to columns; return other values unchanged.

    Args:
        columns: the name of a column, or a list or a dict of names.
        names: the names of the model's inputs, or of its outputs; empty if they are not known.
        what: the kind of names, "input" or "output".

    Raises:
        ConfigError: the dict can be read in both directions, or has several columns for one input.
    """
    if (
        not names
        or not isinstance(columns, dict)
        or not all(isinstance(each, str) for each in columns.values())
    ):
        return columns
    turned = {name: column for column, name in columns.items()}
    reads, turns = columns.keys() >= set(names), turned.keys() >= set(names)
    if reads and turns and turned != columns:
        raise ConfigError(
            f"{columns} is ambiguous: its keys and its values can both be the {what}s {', '.join(names)}. "
            f"Rename a column, or pass a list of columns in the order of the {what}s."
        )
    if turns and not reads and len(turned) < len(columns):
        name = next(name for name in columns.values() if list(columns.values()).count(name) > 1)
        same = ", ".join(repr(column) for column, each in columns.items() if each == name)
        raise ConfigError(
            f"Expected one column for each {what}; got {same} for the {what} {name!r}. For one array made of "
            f"several columns, pass a dict from {what}s to lists of columns."
        )
    return turned if turns else columns
