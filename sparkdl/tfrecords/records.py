"""TFRecord files: records with checksums, each a serialized Example or SequenceExample.

A record is, in little-endian order::

    uint64          length of the data
    uint32          masked CRC-32C of those eight bytes
    length bytes    data
    uint32          masked CRC-32C of the data

The masked value is ((crc >> 15) | (crc << 17)) + 0xa282ead8, modulo 2 ** 32.

An Example is a map from names to features. Each feature is a list of byte strings, of 32-bit floats or of
64-bit integers. A SequenceExample has such a map, its context, and a second map from names to lists of
features.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from sparkdl.errors import DataError

if TYPE_CHECKING:
    from _typeshed import SupportsRead, SupportsWrite

Value = bytes | float | int
Proto: TypeAlias = message.Message  # a description of a file, of a message or of a field
KINDS = ("bytes_list", "float_list", "int64_list")


class Record(NamedTuple):
    """The values of a record.

    Attributes:
        features: the list of values of each feature, by name; for a SequenceExample the context.
        lists: the feature lists of a SequenceExample, by name; None for an Example.
    """

    features: dict[str, list[Value]]
    lists: dict[str, list[list[Value]]] | None = None


def read(file: SupportsRead[bytes], name: str) -> Iterator[bytes]:
    """Yield the data of each record.

    Args:
        file: the open file or file-like object, positioned at a record.
        name: the file's name in error messages.

    Raises:
        DataError: a checksum is wrong, or the file ends within a record.
    """
    number = 0
    while head := file.read(12):
        length, crc = struct.unpack("<QI", head) if len(head) == 12 else (0, -1)
        if crc != _masked(head[:8]):
            raise DataError(
                f"Record {number} of {name} has an incomplete or damaged header. Check that this is a "
                "TFRecord file."
            )
        data, tail = file.read(length), file.read(4)
        if len(tail) != 4 or struct.unpack("<I", tail)[0] != _masked(data):
            raise DataError(
                f"Record {number} of {name} is incomplete or damaged: its checksum does not match."
            )
        yield data
        number += 1


def write(file: SupportsWrite[bytes], records: Iterable[bytes]) -> None:
    """Write records."""
    for data in records:
        head = struct.pack("<Q", len(data))
        file.write(head + struct.pack("<I", _masked(head)) + data + struct.pack("<I", _masked(data)))


def _masked(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def parse(data: bytes, place: str, *, sequence: bool) -> Record:
    """Return the values of a serialized Example or SequenceExample.

    Args:
        data: the data of a record.
        place: the record's place in error messages, such as "record 0 of PATH".
        sequence: whether it is a SequenceExample.

    Raises:
        DataError: the data cannot be parsed.
    """
    kind = f"{'Sequence' * sequence}Example"
    parsed = (SequenceExample if sequence else Example)()
    try:
        parsed.ParseFromString(data)
    except message.DecodeError as error:
        raise DataError(
            f"Expected {place} to be a serialized {kind}; got other data ({error}). Leave the file out, or "
            f"write its records as {kind}s."
        ) from error
    if not sequence:
        return Record(_values(parsed.features))
    lists = {
        name: [_value(feature) for feature in found.feature]
        for name, found in parsed.feature_lists.feature_list.items()
    }
    return Record(_values(parsed.context), lists)


def _values(features: message.Message) -> dict[str, list[Value]]:
    return {name: _value(feature) for name, feature in features.feature.items()}


def _value(feature: message.Message) -> list[Value]:
    kind = feature.WhichOneof("kind")
    return list(getattr(feature, kind).value) if kind else []


def serialize(record: Record) -> bytes:
    """Return a record as the bytes of an Example, or of a SequenceExample if it has lists.

    Raises:
        DataError: a feature has values of several kinds, or values that a record cannot hold.
    """
    made = Example() if record.lists is None else SequenceExample()
    features = made.features if record.lists is None else made.context
    for name, values in record.features.items():
        _fill(features.feature[name], name, values)
    for name, lists in (record.lists or {}).items():
        entry = made.feature_lists.feature_list[name]
        for values in lists:
            _fill(entry.feature.add(), name, values)
    return bytes(made.SerializeToString(deterministic=True))


def _fill(feature: message.Message, name: str, values: list[Value]) -> None:
    if not values:
        feature.SetInParent()
        return
    kind = "bytes_list" if isinstance(values[0], bytes) else "float_list"
    kind = "int64_list" if isinstance(values[0], int) else kind
    try:
        getattr(feature, kind).value.extend(values)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The feature {name!r} has values of several kinds, or values that a record cannot hold: {error}."
        ) from error


def _messages() -> tuple[type[message.Message], ...]:
    """Return the message classes Example and SequenceExample, built without a .proto file."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="sparkdl_tfrecord.proto", package="sparkdl", syntax="proto3"
    )

    def add(parent: Proto, name: str) -> Proto:
        made = parent.nested_type.add() if hasattr(parent, "nested_type") else parent.message_type.add()
        made.name = name
        return made

    def put(owner: Proto, name: str, number: int, kind: int, *, many: bool = False, of: str = "") -> Proto:
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        made = owner.field.add(name=name, number=number, label=label)
        made.type = kind
        if of:
            made.type_name = f".sparkdl.{of}"
        return made

    def put_map(owner: Proto, name: str, of: str) -> None:
        entry = add(owner, f"{''.join(part.title() for part in name.split('_'))}Entry")
        entry.options.map_entry = True
        put(entry, "key", 1, field.TYPE_STRING)
        put(entry, "value", 2, field.TYPE_MESSAGE, of=of)
        put(owner, name, 1, field.TYPE_MESSAGE, many=True, of=f"{owner.name}.{entry.name}")

    types = field.TYPE_BYTES, field.TYPE_FLOAT, field.TYPE_INT64
    feature = add(file, "Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(zip(KINDS, types, strict=True), start=1):
        values = add(file, "".join(part.title() for part in name.split("_")))
        put(values, "value", 1, kind, many=True)
        put(feature, name, number, field.TYPE_MESSAGE, of=values.name).oneof_index = 0
    put_map(add(file, "Features"), "feature", "Feature")
    put(add(file, "FeatureList"), "feature", 1, field.TYPE_MESSAGE, many=True, of="Feature")
    put_map(add(file, "FeatureLists"), "feature_list", "FeatureList")
    put(add(file, "Example"), "features", 1, field.TYPE_MESSAGE, of="Features")
    sequence = add(file, "SequenceExample")
    put(sequence, "context", 1, field.TYPE_MESSAGE, of="Features")
    put(sequence, "feature_lists", 2, field.TYPE_MESSAGE, of="FeatureLists")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"sparkdl.{name}"))
        for name in ("Example", "SequenceExample")
    )


Example, SequenceExample = _messages()
