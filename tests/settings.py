"""Settings of Keras's own objects: each constructor argument away from its default, one at a time.

Classes and arguments come from Keras by introspection. This module has the values: by the name of the
argument, or by class and argument if one value does not suit all classes.
"""

import inspect
from typing import NamedTuple

import keras

VALUES = {
    "adam_beta_1": 0.5,
    "adam_beta_2": 0.7,
    "adam_lr_ratio": 0.3,
    "adam_weight_decay": 0.5,
    "alpha": 0.7,
    "amsgrad": True,
    "apply_class_balancing": True,
    "average": "macro",
    "axis": 1,
    "beta": 0.8,
    "beta_1": 0.5,
    "beta_2": 0.7,
    "beta_2_decay": -0.5,
    "centered": True,
    "class_aggregation": "variance_weighted_average",
    "class_id": 1,
    "clip_threshold": 0.5,
    "clipnorm": 0.02,
    "clipvalue": 0.01,
    "curve": "PR",
    "cycle": True,
    "delta": 0.3,
    "dtype": "float64",
    "dynamic_growth_steps": 1,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 2,
    "end_learning_rate": 0.03,
    "epsilon": 0.1,
    "epsilon_1": 1e-1,
    "epsilon_2": 0.5,
    "exclude_embeddings": False,
    "exclude_layers": ["second"],
    "factor": 0.3,
    "from_logits": True,
    "from_sorted_ids": True,
    "gamma": 1.5,
    "global_clipnorm": 0.03,
    "gradient_accumulation_steps": 2,
    "ignore_class": 1,
    "initial_accumulator_value": 0.4,
    "initial_scale": 4.0,
    "k": 2,
    "l1": 0.2,
    "l1_regularization_strength": 0.1,
    "l2": 0.3,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.1,
    "label_smoothing": 0.2,
    "label_weights": [0.1, 0.2, 0.3, 0.9],
    "learning_rate": 0.02,
    "learning_rate_power": -0.3,
    "loss_scale_factor": 8.0,
    "m_mul": 0.5,
    "max_value": 0.5,
    "min_value": 0.99,
    "mode": "columns",
    "momentum": 0.7,
    "multi_label": True,
    "muon_a": 3.2,
    "muon_b": -4.9,
    "muon_c": 1.9,
    "name": "other",
    "nesterov": True,
    "ns_steps": 2,
    "num_labels": 4,
    "num_regressors": 2,
    "num_thresholds": 5,
    "power": 2.0,
    "q": 0.8,
    "rate": 0.6,
    "reduction": "sum",
    "relative_step": False,
    "rho": 0.7,
    "rms_rate": 0.4,
    "sparse_y_pred": False,
    "sparse_y_true": False,
    "staircase": True,
    "summation_method": "minoring",
    "t_mul": 1.0,
    "target_class_ids": [1],
    "threshold": 0.3,
    "thresholds": [0.2, 0.6],
    "top_k": 2,
    "use_ema": True,
    "warmup_steps": 3,
    "warmup_target": 0.2,
    "weight_decay": 0.5,
}
VALUES_OF = {
    ("CosineDecay", "alpha"): 0.5,
    ("CosineDecayRestarts", "alpha"): 0.5,
    ("FBetaScore", "beta"): 2.0,
    ("Ftrl", "beta"): 0.3,
    ("Muon", "nesterov"): False,
    ("OneHotIoU", "sparse_y_pred"): True,
    ("OneHotMeanIoU", "sparse_y_pred"): True,
    ("SparseCategoricalCrossentropy", "axis"): 2,
}
NEEDED = {  # by arguments without a default
    "boundaries": [1, 2],
    "decay_rate": 0.5,
    "decay_steps": 2,
    "first_decay_steps": 2,
    "fn": keras.losses.mean_absolute_error,
    "initial_learning_rate": 0.1,
    "num_classes": 4,
    "precision": 0.3,
    "recall": 0.5,
    "sensitivity": 0.5,
    "specificity": 0.5,
    "target_class_ids": [0, 2],
    "values": [0.1, 0.05, 0.02],
}
# Passed with every argument, because the class's defaults are documented as different.
BASE = {
    "Dice": {"axis": (1, 2)},
    "Tversky": {"axis": (1, 2)},
}
WITH = {  # other arguments without which an argument has no effect
    ("MaxNorm", "axis"): {"max_value": 0.5},
    ("CosineDecay", "warmup_steps"): {"warmup_target": 0.2},
    ("BinaryFocalCrossentropy", "alpha"): {"apply_class_balancing": True},
    "amsgrad": {"beta_2": 0.3},
    "ema_momentum": {"use_ema": True},
    "ema_overwrite_frequency": {"use_ema": True},
    "from_sorted_ids": {"k": 2},
    "label_weights": {"multi_label": True},
    "nesterov": {"momentum": 0.8},
    "num_labels": {"multi_label": True},
    "warmup_target": {"warmup_steps": 3},
}
# Classes that are not trained, with the reason; those in DOCUMENTED are in docs/explanation/modes.md.
LEFT = {
    "Loss": "the base class",
    "Metric": "the base class",
    "Optimizer": "the base class",
    "LearningRateSchedule": "the base class",
    "Constraint": "the base class",
    "Regularizer": "the base class",
    "MultiOptimizer": "a ModelError",
    "Circle": "compares the rows of a batch with one another",
    "Mean": "takes values; compile is for labels and predictions",
    "Sum": "takes values; compile is for labels and predictions",
}
UNUSABLE = {  # arguments with which plain Keras fails, with the reason
    f"{name}(axis)": "result() sums a vector over the same axis"
    for name in ("IoU", "MeanIoU", "OneHotIoU", "OneHotMeanIoU")
}
DOCUMENTED = ("MultiOptimizer", "Circle", "Dice", "Tversky", "ScheduleFreeAdamW", "OrthogonalRegularizer")
# Arguments that do not change results, with the reason; "argument" or "argument of class".
SAME = {
    "name": "only names the object",
    "dtype": "changes rounding only",
    "loss_scale_factor": "the loss is multiplied by it, and gradients are divided by it",
    "num_labels": "repeats the number of labels",
    "initial_scale": "cancels out as loss_scale_factor does; it is in the optimizer's variables",
    "dynamic_growth_steps": "cancels out as loss_scale_factor does; it is in the optimizer's variables",
    "axis of SparseCategoricalCrossentropy": "TensorFlow accepts the last axis only",
    "axis of BinaryCrossentropy": "a mean over the other axes follows",
    "axis of BinaryFocalCrossentropy": "a mean over the other axes follows",
    "beta_1 of ScheduleFreeAdamW": "cancels out on TensorFlow, where the old momentum is read too late",
    "clipnorm of Lion": "only the signs of gradients count",
    "sparse_y_true": "describes the same labels",
    "relative_step of Adafactor": "Keras takes the smaller rate either way",
}


class Setting(NamedTuple):
    """A Keras class with one argument away from its default.

    Attributes:
        kind: the class.
        argument: the argument away from its default; "" for none.
        values: the arguments of the constructor.
        base: the arguments without that one.
    """

    kind: type
    argument: str
    values: dict
    base: dict

    def __str__(self):
        """Return the name for tests, such as "Huber(delta)"."""
        return f"{self.kind.__name__}({self.argument})"

    @property
    def changes(self):
        """True if the argument changes results."""
        mine = {self.argument, f"{self.argument} of {self.kind.__name__}"}
        return bool(self.argument) and not SAME.keys() & mine

    def without(self):
        """Return the setting without the argument."""
        return self._replace(values=self.base)


def classes(module, base):
    """Return the classes of a Keras module, each once and without those in LEFT."""
    found = [one for one in vars(module).values() if inspect.isclass(one) and issubclass(one, base)]
    return sorted({kind for kind in found if kind.__name__ not in LEFT}, key=lambda kind: kind.__name__)


def arguments(kind):
    """Return the parameters of a constructor, by name."""
    found = inspect.signature(kind).parameters.values()
    return {one.name: one for one in found if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def unknown(kind):
    """Return the arguments of a class for which this module has no value."""
    known = NEEDED.keys() | VALUES.keys() | {"inner_optimizer"}
    return [f"{kind.__name__}({name})" for name in arguments(kind) if name not in known]


def settings(kind):
    """Yield the setting with all defaults, then one for each argument."""
    found, title = arguments(kind), kind.__name__
    base = {name: NEEDED[name] for name, one in found.items() if one.default is one.empty and name in NEEDED}
    base |= BASE.get(title, {})
    yield Setting(kind, "", base, base)
    for name in found:
        if name not in base and name in VALUES:
            beside = base | WITH.get((title, name), WITH.get(name, {}))
            value = VALUES_OF.get((title, name), VALUES[name])
            yield Setting(kind, name, {**beside, name: value}, beside)


def settings_of(module, base):
    """Return all settings of all classes of a module."""
    return [setting for kind in classes(module, base) for setting in settings(kind)]
