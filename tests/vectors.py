"""Vectors of Spark ML in their Arrow form, without Spark."""

import pyarrow as pa

INDICES, VALUES = pa.list_(pa.int32()), pa.list_(pa.float64())
VECTORS = pa.struct([("type", pa.int8()), ("size", pa.int32()), ("indices", INDICES), ("values", VALUES)])


def dense(*values):
    return {"type": 1, "size": None, "indices": None, "values": values}


def sparse(size, **values):
    return {
        "type": 0,
        "size": size,
        "indices": [int(key[1:]) for key in values],
        "values": list(values.values()),
    }
