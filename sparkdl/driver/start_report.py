"""The report at the start of a run: checks of the workers' rows, and lines about their division.

Workers count their rows when they begin. Each line is a function that returns its text, or None if it does
not apply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkdl.config import AUTO, AUTO_MERGE, TrainConfig
from sparkdl.data.bad_values import judge, sentences_of
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.blocks import TRAINING, VALIDATION
from sparkdl.driver.known_shortfalls import shortfall, words_of
from sparkdl.driver.request import Request
from sparkdl.driver.training_record import counted
from sparkdl.errors import ConfigError, DataError
from sparkdl.modeling import keras_settings, losses, optimizers
from sparkdl.rules import STUDIED, Choice, choose
from sparkdl.server.state import Member

logger = logging.getLogger(__name__)
STUDIED_AFTER_JOINT = 16  # largest number of workers in the study of joint starts


@dataclass(frozen=True)
class Start:
    """The start of a run, when all workers have counted their rows.

    Attributes:
        request: the request of the fit.
        choice: the merge rule, and the scaling of the workers' learning rate that goes with it.
        plans: the plan of each worker.
        members: each worker as the driver sees it, by its number.
        begun_joint: whether the fit has had epochs of a joint start.
    """

    request: Request
    choice: Choice
    plans: Sequence[BatchPlan]
    members: Mapping[int, Member]
    begun_joint: bool = False

    @property
    def resumed(self) -> bool:
        """True if this is the first run of the fit in this program."""
        return not self.request.held

    @property
    def plan(self) -> BatchPlan:
        """The plan of worker 0. Like every plan, it has the row counts of all workers."""
        return self.plans[0]

    @property
    def rows(self) -> int:
        """The number of training rows."""
        return sum(self.plan.rows)

    @property
    def validation_rows(self) -> int:
        """The number of validation rows."""
        return sum(member.validation_rows for member in self.members.values())

    @property
    def rate_scale(self) -> float:
        """The factor by which ``choice`` scales the workers' learning rate."""
        _, scale = self.choice.bound(self.plan.working)
        return scale


# Checks.


def check(start: Start) -> None:
    """Require rows that can be trained on, and warn of unsuitable ones.

    Raises:
        ConfigError: no worker trains on the batches to trace.
        DataError: rows were to be held out, and none are; the model has a fixed batch size, and the last
            batch is smaller; or rows cannot be trained on.
    """
    require_validation_rows(start)
    require_whole_batches(start)
    require_traced_batches(start)
    judge_rows(start)


def require_validation_rows(start: Start) -> None:
    """Require validation rows if some of the rows were to be held out.

    Raises:
        DataError: there are no validation rows.
    """
    indicator, split = start.request.source.indicator, start.request.fit.validation_split
    if start.validation_rows:
        return
    if indicator is not None:
        raise DataError(
            f"The column {indicator!r} marks none of the {start.rows} rows for validation. Mark some rows, "
            "or leave validation_indicator_col out."
        )
    if split:
        raise DataError(
            f"validation_split={split} holds out none of the {start.rows} rows. Use a larger fraction, or "
            "pass validation_data."
        )


def require_whole_batches(start: Start) -> None:
    """Require a full last batch if the model has a fixed batch size.

    Raises:
        DataError: the last batch is smaller.
    """
    size = start.request.fixed_batch_size
    for what, count in (("rows", start.rows), ("validation rows", start.validation_rows)):
        if size and count % size:
            raise DataError(
                f"The model takes only batches of {size} rows; {count} {what} leave a last batch of "
                f"{count % size}. Leave {count % size} of them out."
            )


def require_traced_batches(start: Start) -> None:
    """Require a worker that trains on the first of the batches to trace.

    Raises:
        ConfigError: no worker has that many batches.
    """
    fit = start.request.fit
    each = (start.plan.steps,) if start.plan.joint else [plan.num_batches for plan in start.plans]
    switch = start.request.switch
    end = fit.epochs if switch is None else min(fit.epochs, switch.epoch)
    batches = max(each) * (end - fit.initial_epoch)
    where = "in this fit" if switch is None else "of the joint start"
    if fit.profile is not None and fit.profile[0] > batches:
        raise ConfigError(
            f"profile={fit.profile} begins after the last batch; each worker trains on at most {batches} "
            f"batches {where}. Choose earlier batches, or train for more epochs."
        )


def judge_rows(start: Start) -> None:
    """Refuse rows with values that cannot be trained on, or warn of them.

    Raises:
        DataError: there are such rows, and ``nan`` is "error".
    """
    request = start.request
    found = [fault for member in start.members.values() for fault in member.notes.get("faults", ())]
    rows_of = {TRAINING: start.rows, VALIDATION: start.validation_rows}
    judge(sentences_of(found, rows_of, request.schema, request.classes), request.fit.nan)


def gpus_of(members: Mapping[int, Member], *, shared: bool) -> list[list[str]]:
    """Return the GPUs of each worker.

    Args:
        members: each worker as the driver sees it, by its number.
        shared: whether two workers may be on one GPU.

    Raises:
        ConfigError: two workers are on one GPU, and ``shared`` is False.
    """
    taken: dict[tuple[str, str], int] = {}
    gpus = []
    for worker, member in sorted(members.items()):
        gpus.append(list(member.notes.get("gpus", ())))
        for gpu in gpus[-1] if member.notes.get("on_gpu") else ():
            other = taken.setdefault((member.host, gpu), worker)
            if other != worker and not shared:
                raise ConfigError(
                    f"Workers {other} and {worker} both use GPU {gpu} of {member.host}. Give each worker "
                    "its own GPU (spark.task.resource.gpu.amount=1, or fewer workers), or pass "
                    "share_gpus=True."
                )
    return gpus


# Lines.


def division(start: Start) -> str:
    """Return the numbers of workers (with the reason), of rows, and of the optimizer's steps per epoch."""
    plan = start.plan
    whose = "over all workers" if plan.joint else "per worker"
    steps = plan.steps if plan.joint else sum(each.num_batches for each in start.plans)
    return (
        f"{counted(start.request.num_workers, 'worker')} ({start.request.reason}) on "
        f"{counted(start.rows, 'row')}, batch_size={plan.local_batch_size or plan.batch_size} {whose}: "
        f"{counted(steps, 'step')} per epoch."
    )


def scaled_rate(start: Start) -> str | None:
    """Return the factor by which the default rule scales the learning rate."""
    if start.rate_scale == 1:
        return None
    return (
        f"Workers train separately between exchanges, at {start.rate_scale:.2f} times the learning rate, "
        f'with merge="{start.choice.rule.name}". If you pass merge= yourself, the learning rate is not '
        "scaled."
    )


def joint_start(start: Start) -> str | None:
    """Return the division of a fit into a joint start and windows of batches."""
    switch, epochs = start.request.switch, start.request.fit.epochs
    if switch is not None and switch.epoch >= epochs:
        return f'frequency="{AUTO}": workers exchange after every batch in {_all(epochs)}.'
    if switch is None and not (start.request.continues and (start.resumed or not start.begun_joint)):
        return None
    then = start.request.config if switch is None else switch.config
    rule = choose(then.merge, mode=then.mode.value, window=then.window).rule
    size = start.request.local_batch_size if switch is None else switch.local_batch_size
    rows = f" of {size} rows" if size not in (None, start.plan.batch_size) else ""
    windows = f'after every {then.window} batches{rows}, with merge="{rule.name}".'
    if switch is not None:
        begins = f"workers exchange after every batch up to epoch {switch.epoch}, and from then on"
    else:
        begins = f"from epoch {start.request.fit.initial_epoch + 1} on, workers exchange"
    return f'frequency="{AUTO}": {begins} {windows}'


def _all(epochs: int) -> str:
    return "the only epoch" if epochs == 1 else f"all {epochs} epochs"


def _separate(start: Start) -> tuple[TrainConfig, bool] | None:
    """Return the settings of the part of a fit in which workers train separately.

    Also return True if that part follows a joint start and merges by the rule of the study. None: there is no
    such part, or the run before this one has warned of it.
    """
    request = start.request
    if request.switch is not None:
        if request.switch.epoch >= request.fit.epochs:
            return None
        return request.switch.config, request.switch.config.merge == AUTO_MERGE
    if start.plan.joint or (request.continues and start.begun_joint and not start.resumed):
        return None
    return request.config, start.begun_joint and request.config.merge == AUTO_MERGE


def unstudied(start: Start) -> str | None:
    """Return a warning about more workers than the convergence study covers."""
    separate = _separate(start)
    most = STUDIED_AFTER_JOINT if separate and separate[1] else STUDIED
    if separate is None or start.plan.working <= most:
        return None
    return (
        f"The convergence study of sparkdl covers at most {most} workers that train separately between "
        f'exchanges; this run has {start.plan.working}. mode="synchronous" with frequency="batch" matches '
        "plain Keras for any number of workers."
    )


def known_shortfall(start: Start) -> str | None:
    """Return a warning about settings that scored below plain Keras in the convergence study."""
    separate = _separate(start)
    if separate is None:
        return None
    config, joint_start = separate
    below = shortfall(
        None if joint_start else config.merge,
        mode=config.mode.value,
        window=config.window,
        joint_start=joint_start,
        workers=start.plan.working,
        adaptive=optimizers.adaptive(start.request.model),
    )
    return None if below is None else words_of(below, config.mode.value)


def idle_workers(start: Start) -> str | None:
    """Return a warning about workers without rows."""
    idle = sum(not count for count in start.plan.rows)
    return f"Workers without rows: {idle} of {start.request.num_workers}." if idle else None


def empty_partitions(start: Start) -> str | None:
    """Return a warning about partitions without rows."""
    empty = sum(member.notes.get("empty", 0) for member in start.members.values())
    return f"Partitions without rows: {empty}." if empty else None


def _labels_are_classes(request: Request) -> bool:
    """Return True if the labels of a fit are classes; if the loss does not show it, integers are classes."""
    known = losses.labels_are_classes(request.model)
    if known is not None:
        return known
    label = request.schema.template[1]
    return isinstance(label, int) and request.schema.columns[label].dtype != keras_settings.float_type()


def single_classes(start: Start) -> str | None:
    """Return a warning about workers whose rows are all of one class, if another setting would mix them."""
    fit = start.request.fit
    one = [worker for worker, member in sorted(start.members.items()) if member.notes.get("one_class")]
    if not one or not (fit.preserve_partitions or not fit.shuffle) or not _labels_are_classes(start.request):
        return None
    mixes = "shuffle=True without preserve_partitions" if fit.preserve_partitions else "shuffle=True"
    return f"Workers with rows of only one class: {one}. Use {mixes} to mix the rows."


def rounded_weights(start: Start) -> str | None:
    """Return a warning about weights that are more precise than the exchange."""
    wide = [each.path for each in start.request.model.variables if each.dtype == "float64"]
    if not wide:
        return None
    return (
        f"The model has {counted(len(wide), 'variable')} of dtype float64, such as {wide[0]}. These are "
        "rounded, since workers exchange weights and updates as float32."
    )


SUMMARY = (division, scaled_rate, joint_start)
WARNINGS = (unstudied, known_shortfall, idle_workers, empty_partitions, single_classes, rounded_weights)


def report(start: Start, note: Callable[[str], None]) -> None:
    """Log the lines that apply, and pass those of the summary to ``note``, which shows them."""
    for text in filter(None, (line(start) for line in SUMMARY)):
        logger.info("%s", text)
        note(text)
    for text in filter(None, (line(start) for line in WARNINGS)):
        logger.warning("%s", text)
