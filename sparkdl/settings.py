"""Groups of the settings of a SparkModel: its network, its fault tolerance, and its stragglers.

Each group is a frozen dataclass, which states its fields and their defaults once. Spark Params, the files of
saved models and the arguments of older programs are flat: ``GROUP_OF`` maps each setting to its group.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

from sparkdl.core.validation import (
    as_int,
    as_number,
    check_fields,
    checked,
    one_of,
    positive_seconds,
    require_flag,
    text,
    whole_number,
)
from sparkdl.errors import ConfigError

PortChoice = int | range
OnWorkerLoss = Literal["fail", "continue"]
LateUpdates = Literal["drop", "merge"]


def parse_port(name: str, port: object) -> PortChoice:
    """Return the port, or the ports to try in turn; 0 lets the system choose.

    Args:
        name: the name of the setting, for the error.
        port: a port number, a range or "first:last".

    Raises:
        ConfigError: ``port`` is none of these, or a number in it is not a port, or the range is empty.
    """
    found = port
    if isinstance(found, str) and found.count(":") == 1:
        first, last = found.split(":")
        found = range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else found
    if isinstance(found, str) and found.isdecimal():
        found = int(found)
    numbers = found if isinstance(found, range) else [found]
    for number in numbers:
        if (port := as_int(number)) is None or not 0 <= port <= 65535:
            raise ConfigError(
                f'{name} should be a number from 0 to 65535, a range or a string "first:last"; got {found!r}.'
            )
    if isinstance(found, range) and not found:
        raise ConfigError(f"{name} should be a range of at least one port; got the empty {found!r}.")
    return found  # type: ignore[return-value]


def parse_quorum(quorum: object, num_workers: int | None) -> int:
    """Return the number of workers in a quorum.

    Args:
        quorum: a number of workers, or a share of all workers as a float.
        num_workers: number of workers; None if not known yet.

    Raises:
        ConfigError: ``quorum`` is neither a number from 1 to ``num_workers`` nor a float above 0 and up to 1.
    """
    most = math.inf if num_workers is None else num_workers
    number = as_number(quorum)
    if isinstance(number, float) and 0 < number <= 1:
        return math.ceil(number * (num_workers or 1))
    if isinstance(number, int) and 1 <= number <= most:
        return number
    workers = "num_workers" if num_workers is None else f"{num_workers}"
    raise ConfigError(
        f"quorum should be a whole number of workers from 1 to {workers}, or a share of all workers as a "
        f"float above 0.0 and up to 1.0; got {quorum!r}."
    )


def _quorum(name: str, value: Any) -> Any:
    parse_quorum(value, None)
    return value


@dataclass(frozen=True)
class Network:
    """The address, the port and the encryption of the endpoint, to which workers send their updates.

    Over Spark Connect, the local address from which the client reaches the server takes the place of
    ``spark.driver.bindAddress`` and ``spark.driver.host``. With ``placement="worker"`` only ``tls`` has an
    effect.

    Attributes:
        bind_address: the address that the endpoint listens on. None means ``spark.sparkdl.bindAddress`` or,
            if that is not set, ``spark.driver.bindAddress``.
        advertised_host: the host that executors connect to. None means ``spark.sparkdl.advertisedHost`` or,
            if that is not set, ``spark.driver.host``.
        port: the endpoint's port, or ports to try in turn: a range or "first:last". 0 means
            ``spark.sparkdl.port`` or, if that is not set, any free port.
        tls: whether the endpoint uses TLS 1.3, with a certificate made for the fit. TLS needs the package
            cryptography on the driver; with ``placement="worker"`` on the executors instead, with
            ``placement="executors"`` on both. None follows ``spark.sparkdl.tls``; if that is not set, TLS is
            on if Spark itself encrypts (``spark.network.crypto.enabled``, ``spark.ssl.enabled``,
            ``spark.ssl.rpc.enabled``, ``spark.authenticate.enableSaslEncryption``).

    Raises:
        ConfigError: a setting is invalid.

    Example:
        >>> SparkModel(model, network=Network(port="7100:7120", tls=True))  # doctest: +SKIP
    """

    bind_address: str | None = checked(None, text)
    advertised_host: str | None = checked(None, text)
    port: int | range | str = checked(0, parse_port)
    tls: bool | None = checked(None, require_flag)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class FaultTolerance:
    """The waiting times for workers, and the reaction to the loss of a worker.

    With ``placement="worker"`` a run that lost a worker does not restart.

    Attributes:
        start_timeout: seconds to wait for executors to register, and for the remaining workers once the
            first has joined.
        stall_timeout: seconds without a heartbeat after which a worker is considered lost: its process hangs,
            or its machine is gone or cut off. Heartbeats are sent every 0.5 s, even during a long step.
        max_restarts: maximum number of consecutive restarts of the worker group after a worker is
            lost. A completed epoch resets the count.
        on_worker_loss: "fail": all workers restart, up to ``max_restarts`` times; "continue": the other
            workers continue, and the lost worker returns if Spark starts its task again; see
            docs/explanation/fault-tolerance.md.
        recovery_every: in synchronous mode, the number of rounds between snapshots within an epoch. A run
            that lost a worker restarts from the last snapshot. None: a snapshot within an epoch is made only
            for a checkpoint, for a callback that saves after batches, or for a worker that returns. A
            snapshot at the end of each epoch is always made.

    Raises:
        ConfigError: a setting is invalid.

    Example:
        >>> SparkModel(model, fault_tolerance=FaultTolerance(max_restarts=10))  # doctest: +SKIP
    """

    start_timeout: float = checked(300.0, positive_seconds)
    stall_timeout: float = checked(60.0, positive_seconds)
    max_restarts: int = checked(3, partial(whole_number, least=0))
    on_worker_loss: OnWorkerLoss = checked("fail", partial(one_of, choices=get_args(OnWorkerLoss)))
    recovery_every: int | None = checked(None, whole_number)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Stragglers:
    """The limits on how long workers wait for slower ones.

    Attributes:
        staleness: in asynchronous and hogwild modes, the number of exchanges by which a worker may be ahead
            of the slowest one before it waits (stale-synchronous parallel). None is unlimited.
        quorum: in synchronous mode, the number of workers with rows (from 1), or the share of all workers (a
            float up to 1.0), that suffices for a round; the others are backup workers. None is all.
        straggler_timeout: in synchronous mode, seconds from the first update of a round until the round
            closes with the updates it has. None is no limit.
        late_updates: the action for an update whose round closed without it: "drop", or "merge" into the
            round that is open when it arrives.

    Raises:
        ConfigError: a setting is invalid.

    Example:
        >>> SparkModel(model, stragglers=Stragglers(quorum=0.9, straggler_timeout=5))  # doctest: +SKIP
    """

    staleness: int | None = checked(None, partial(whole_number, least=0))
    quorum: int | float | None = checked(None, _quorum)
    straggler_timeout: float | None = checked(None, positive_seconds)
    late_updates: LateUpdates = checked("drop", partial(one_of, choices=get_args(LateUpdates)))

    def __post_init__(self) -> None:
        check_fields(self)


GROUPS: dict[str, type[Any]] = {
    "network": Network,
    "fault_tolerance": FaultTolerance,
    "stragglers": Stragglers,
}


# The group of each setting.
GROUP_OF: dict[str, str] = {each.name: group for group, kind in GROUPS.items() for each in fields(kind)}


def flattened(group: Any) -> dict[str, Any]:
    """Return the settings of a group by name."""
    return {each.name: getattr(group, each.name) for each in fields(group)}


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, with the settings of each group replaced by one object of the group.

    Raises:
        ConfigError: a setting of a group is invalid.
    """
    others: dict[str, Any] = {}
    values: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in flat.items():
        if name in GROUP_OF:
            values[GROUP_OF[name]][name] = value
        else:
            others[name] = value
    return others | {group: GROUPS[group](**values[group]) for group in values}


def with_deprecated(
    function: str, groups: Mapping[str, Any], deprecated: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the groups of a call, in which some settings may be given as flat arguments.

    Args:
        function: the name of the called function, for messages.
        groups: the groups that the function takes, by argument; None for those that are not given.
        deprecated: the flat arguments, by name.

    Raises:
        TypeError: a flat argument belongs to none of these groups.
        ConfigError: a flat argument is invalid, or is given together with its group.
    """
    for name in deprecated:
        if GROUP_OF.get(name) not in groups:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    given = {name: group for name, group in groups.items() if group is not None}
    for group in groups:
        names = [name for name in deprecated if GROUP_OF[name] == group]
        if not names:
            continue
        old = ", ".join(f"{name}=..." for name in names)
        new = f"{group}=sparkdl.{GROUPS[group].__name__}({old})"
        if group in given:
            raise ConfigError(f"{function}({old}) cannot be combined with {group}=; use {new} alone.")
        _warn(f"{function}({old}) is deprecated; use {new}.")
    return given | grouped(deprecated)


def _warn(message: str) -> None:
    """Issue a DeprecationWarning at the line of the user's program that called this package."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and frame.f_globals.get("__name__", "").startswith("sparkdl."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, DeprecationWarning, stacklevel=level)
