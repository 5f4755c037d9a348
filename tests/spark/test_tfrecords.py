"""DataFrames are written to TFRecord files and read back, and TensorFlow reads and writes the same."""

import gzip
import io

import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import types

from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError
from sparkdl.spark import files
from sparkdl.tfrecords import read_tfrecords, records, write_tfrecords
from sparkdl.tfrecords.dataframe import _from_record, _records_in
from sparkdl.tfrecords.records import Record

MASTERS = ("local", "local-cluster", "standalone", "connect")
SCHEMA = (
    "whole bigint, small int, flag boolean, real float, wide double, word string, raw binary, "
    "wholes array<bigint>, reals array<float>, words array<string>"
)
ROWS = [
    (1, -2, True, 1.5, 0.25, "eins", b"\x00\xff", [1, 2], [0.5], ["a", "ä"]),
    (2**40, 0, False, -0.5, 1e10, "", b"", [], [], []),
    (None, None, None, None, None, None, None, None, None, None),
]


def as_tuples(frame):
    return sorted(map(tuple, frame.collect()), key=str)


def compared(rows):
    return sorted((tuple(bytearray(v) if isinstance(v, bytes) else v for v in row) for row in rows), key=str)


def write_here(path, *made, kind=open):
    """Write a file of records without Spark: over Spark Connect files are only read."""
    path.parent.mkdir(exist_ok=True)
    with kind(path, "wb") as file:
        records.write(file, map(records.serialize, made))


writes = pytest.mark.classic  # which needs a SparkContext


@writes
@pytest.mark.parametrize("compression", ["", "gzip"])
def test_rows_come_back_as_they_were(spark, tmp_path, compression):
    """Every type of a record, nulls and an empty partition come back, compressed or not."""
    frame = spark.createDataFrame(ROWS, SCHEMA).repartition(5)

    assert 3 == write_tfrecords(frame, str(tmp_path / "t"), compression=compression)

    assert compared(ROWS) == as_tuples(read_tfrecords(str(tmp_path / "t"), SCHEMA))
    names = [path.name for path in (tmp_path / "t").iterdir() if not path.name.startswith(".")]
    assert names
    assert all(name.endswith(".gz" if compression else ".tfrecord") for name in names)


@pytest.mark.one_case
@writes
def test_arrays_of_arrays_are_sequences(spark, tmp_path):
    """Feature lists and context of SequenceExamples come back; arrays of arrays need sequences=True."""
    rows = [(7, [[1, 2], [3]], [["a"], []]), (8, [], [["b", "c"]])]
    frame = spark.createDataFrame(rows, "id bigint, steps array<array<bigint>>, words array<array<string>>")

    with pytest.raises(ConfigError, match="'steps' is array<array<bigint>>; .* sequences=True"):
        write_tfrecords(frame, str(tmp_path / "t"))
    write_tfrecords(frame, f"file://{tmp_path}/t", sequences=True)

    found = read_tfrecords(str(tmp_path / "t"), frame.schema, sequences=True)
    assert rows == sorted(map(tuple, found.collect()))
    inferred = read_tfrecords(str(tmp_path / "t"), sequences=True)
    assert {"id": "bigint", "steps": "array<array<bigint>>", "words": "array<array<binary>>"} == dict(
        inferred.dtypes
    )


def test_columns_are_found_by_a_pass_over_all_records(spark, tmp_path):
    """A feature with one value in every record is a scalar, else an array; int and float mix to float."""
    first = {"a": [1], "b": [2], "c": [1.0], "d": [b"x"], "e": [5]}
    second = {"a": [2], "b": [2.5], "c": [1.0, 2.0], "d": [b"y"]}
    for name, features in (("one", first), ("two", second)):
        write_here(tmp_path / name / "part.tfrecord", Record(features))

    found = read_tfrecords(str(tmp_path))

    types_found = {"a": "bigint", "b": "float", "c": "array<float>", "d": "binary", "e": "bigint"}
    assert types_found == dict(found.dtypes)
    rows = [(row.a, row.b, row.c, bytes(row.d), row.e) for row in found.orderBy("a").collect()]
    assert [(1, 2.0, [1.0], b"x", 5), (2, 2.5, [1.0, 2.0], b"y", None)] == rows


@writes
@pytest.mark.backend("tensorflow")
def test_tensorflow_reads_what_we_write_and_we_what_it_writes(spark, tmp_path):
    """TensorFlow parses our records as its own Examples, and we read the records it writes."""
    import tensorflow

    frame = spark.createDataFrame([(3, [0.5, 1.5], "word")], "id bigint, x array<float>, name string")
    write_tfrecords(frame, str(tmp_path / "ours"))
    files = [str(path) for path in (tmp_path / "ours").glob("*.tfrecord")]
    (data,) = [record.numpy() for record in tensorflow.data.TFRecordDataset(files)]
    example = tensorflow.train.Example.FromString(data)
    assert [3] == list(example.features.feature["id"].int64_list.value)
    assert [b"word"] == list(example.features.feature["name"].bytes_list.value)

    with tensorflow.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        writer.write(example.SerializeToString())
    (row,) = read_tfrecords(str(tmp_path / "theirs"), frame.schema).collect()
    assert (3, [0.5, 1.5], "word") == tuple(row)


def test_packed_sequences_of_others_are_read(spark, tmp_path):
    """Compressed sequences written by others are read with an inferred or a given schema."""
    made = [Record({"id": [7]}, {"steps": [[1, 2], [3]]}), Record({"id": [8]}, {"steps": []})]
    write_here(tmp_path / "t" / "part.gz", *made, kind=gzip.open)

    for schema in (None, "id bigint, steps array<array<bigint>>"):
        found = read_tfrecords(str(tmp_path / "t"), schema, sequences=True)
        assert [(7, [[1, 2], [3]]), (8, [])] == sorted(map(tuple, found.collect()))


@pytest.mark.whole
@writes
def test_vectors_are_written_as_arrays(spark, frames, tmp_path):
    """Vectors are written as arrays and read back as the arrays that they were made of."""
    write_tfrecords(frames["vector"].select("row", "features"), str(tmp_path / "t"))

    found = read_tfrecords(str(tmp_path / "t"), "row bigint, features array<float>")

    expected = frames["array"].selectExpr("row", "cast(features AS array<float>)")
    assert as_tuples(expected) == as_tuples(found)


@pytest.mark.whole
def test_a_model_trains_on_records(spark, problem, tmp_path):
    """A model trains on records as on any other DataFrame."""
    rows = [{"features": x.tolist(), "label": [int(y)]} for x, y in zip(problem.x, problem.y, strict=True)]
    for start in range(0, 203, 100):
        write_here(tmp_path / "t" / f"{start}.tfrecord", *map(Record, rows[start : start + 100]))
    found = read_tfrecords(str(tmp_path / "t"), "features array<float>, label bigint")

    history = SparkModel(problem.model(), num_workers=2).fit(
        found, epochs=2, batch_size=16, verbose=0, seed=1
    )

    assert 203 == history.training["rows"]
    assert history.history["loss"][-1] < history.history["loss"][0]


@pytest.mark.whole
@writes
def test_a_folder_that_is_there_is_kept_until_another_is_whole(spark, tmp_path):
    """An existing folder is kept without overwrite, replaced with it, and unchanged if the job fails."""
    path = str(tmp_path / "t")
    write_tfrecords(spark.range(3), path)

    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        write_tfrecords(spark.range(5), path)
    bad = spark.range(5).selectExpr("if(id = 4, cast(raise_error('bad') as bigint), id) as id")
    with pytest.raises(DataError, match="Spark could not compute the rows"):
        write_tfrecords(bad, path, overwrite=True)
    assert 3 == read_tfrecords(path, "id bigint").count()
    write_tfrecords(spark.range(5), path, overwrite=True)

    assert 5 == read_tfrecords(path, "id bigint").count()
    assert ["t"] == [each.name for each in tmp_path.iterdir()]


@pytest.mark.one_case
@writes
@pytest.mark.parametrize("error", [OSError("no rename"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_that_cannot_be_replaced_stays(spark, tmp_path, monkeypatch, number, error):
    """If a move fails, the old rows stay readable and no other files are left."""
    path, move, moves = str(tmp_path / "rows"), files.move, []
    write_tfrecords(spark.range(3), path)

    def failing_move(source, target, *, context):
        moves.append(target)
        if len(moves) == number:
            raise error
        move(source, target, context=context)

    monkeypatch.setattr(files, "move", failing_move)
    with pytest.raises(type(error)):
        write_tfrecords(spark.range(5), path, overwrite=True)

    assert 3 == read_tfrecords(path, spark=spark).count()
    assert [tmp_path / "rows"] == list(tmp_path.iterdir())


FEATURES = {"id": [2], "many": [1, 2], "word": [b"x"], "large": [2**40]}


@pytest.mark.parametrize(
    ("name", "kind", "given"),
    [
        ("id", types.StringType(), "int values"),
        ("id", types.BinaryType(), "int values"),
        ("many", types.LongType(), "2 values"),
        ("word", types.LongType(), "bytes values"),
        ("large", types.IntegerType(), f"{2**40}"),
        ("id", types.BooleanType(), "2"),
        ("many", types.ArrayType(types.ArrayType(types.LongType())), "a single feature"),
        ("word", types.ArrayType(types.ArrayType(types.BinaryType())), "a single feature"),
    ],
)
def test_a_column_that_a_record_does_not_fit_is_named(name, kind, given):
    """The error for a feature that does not match the schema has its expected and its actual type."""
    with pytest.raises(
        DataError, match=f"Expected {kind.simpleString()} for the column '{name}'; record 1 has {given}"
    ):
        _from_record(Record(FEATURES), types.StructField(name, kind), "record 1")


@pytest.mark.one_case
def test_a_column_that_does_not_fit_ends_the_job_that_reads_it(spark, tmp_path):
    """The error of the reading job names the record and the file."""
    both = (Record({"odd": [odd]}) for odd in (b"x", b"\xff"))
    write_here(tmp_path / "t" / "part.tfrecord", *both)

    message = "Expected string for the column 'odd'; record 1 of .*tfrecord has bytes that are not UTF-8"
    with pytest.raises(Exception, match=message):
        read_tfrecords(str(tmp_path / "t"), "odd string").collect()


@writes
@pytest.mark.one_case
def test_a_null_vector_is_left_out_of_its_record(spark, tmp_path):
    """A vector that is null is left out of its record, and a column's name may contain a backtick."""
    rows = [(1, Vectors.dense([0.5, 2.0])), (2, None), (3, Vectors.sparse(2, [1], [4.0]))]

    write_tfrecords(spark.createDataFrame(rows, ["id", "a`b"]), str(tmp_path / "t"))

    found = read_tfrecords(str(tmp_path / "t"), "id bigint, `a``b` array<float>")
    assert [(1, [0.5, 2.0]), (2, None), (3, [0.0, 4.0])] == as_tuples(found)


@writes
@pytest.mark.one_case
@pytest.mark.parametrize(
    "value", [1e300, pytest.param([1.0, -1e39], marks=pytest.mark.whole), Vectors.dense([3.5e38])]
)
def test_a_double_that_no_record_holds_is_named(spark, tmp_path, value):
    """A double beyond the range of 32-bit floats is refused with its column and row; Inf is written."""
    frame = spark.createDataFrame([(value,)], ["far"]).coalesce(1)

    with pytest.raises(DataError, match="The column 'far' has .* in row 0 of partition 0, .* of the 32-bit"):
        write_tfrecords(frame, str(tmp_path / "t"))
    assert 1 == write_tfrecords(spark.createDataFrame([(float("-inf"),)], ["far"]), str(tmp_path / "t"))


@pytest.mark.whole
@writes
def test_a_null_within_an_array_is_named(spark, tmp_path):
    """A null within an array or a list of a sequence is refused with its column, row and partition."""
    cases = [
        ("many array<bigint>", [([1],), ([1, None],)]),
        ("steps array<array<float>>", [([[1.0]],), ([[1.0], None],)]),
    ]
    for schema, rows in cases:
        name, _ = schema.split()
        frame = spark.createDataFrame(rows, schema).coalesce(1)
        with pytest.raises(
            DataError, match=f"The column '{name}' .* null in an array of row 1 of partition 0"
        ):
            write_tfrecords(frame, str(tmp_path / "t"), sequences=True)


@pytest.mark.whole
def test_what_no_record_holds_is_refused_before_a_job(spark, tmp_path, jobs):
    """Decimals, timestamps and maps are refused before any job; truncated files fail in the job."""
    before = jobs()
    cases = {
        "decimal(3,1)": r'with df\["odd"\]\.cast\("double"\)',
        "array<decimal(3,1)>": r'with df\["odd"\]\.cast\("array<double>"\)',
        "date": r'with df\["odd"\]\.cast\("timestamp"\)\.cast\("double"\)',
        "timestamp": r'with df\["odd"\]\.cast\("timestamp"\)\.cast\("double"\)',
        "struct<a: string>": "Select the fields of the struct as columns",
        "map<string, int>": "Split the map first into arrays, with functions.map_keys and functions.map_val",
        "array<array<int>>": "Pass sequences=True",
        "array<array<array<int>>>": "Flatten the arrays first",
    }
    for kind, words in cases.items():
        schema = types.StructType.fromDDL(f"odd {kind}")
        with pytest.raises(ConfigError, match=f"The column 'odd' is .* {words}"):
            read_tfrecords(str(tmp_path), schema)
    with pytest.raises(ConfigError, match="compression should be"):
        write_tfrecords(spark.range(1), str(tmp_path / "t"), compression="zip")
    assert before == jobs()

    (tmp_path / "torn.tfrecord").write_bytes(b"this is no record of any kind")
    with pytest.raises(Exception, match="incomplete or damaged header. Check that this is a TFRecord file"):
        read_tfrecords(str(tmp_path / "torn.tfrecord"), "id bigint").collect()
    with open(tmp_path / "odd.tfrecord", "wb") as file:
        records.write(file, [records.serialize(Record({"id": [1]})), b"\xff\xff\xff"])
    for schema in (None, "id bigint"):
        with pytest.raises(Exception, match=r"record 1 of \S+odd.tfrecord to be a serialized Example"):
            read_tfrecords(str(tmp_path / "odd.tfrecord"), schema).collect()


def test_a_compressed_file_that_cannot_be_read_is_named():
    """A file that is not compressed, is truncated or is damaged is named."""
    file = io.BytesIO()
    records.write(file, [b"data" * 99])
    packed = gzip.compress(file.getvalue())
    for content in (file.getvalue(), packed[:-9], packed[:20] + b"\xff" * 99):
        batch = pa.record_batch({"path": ["folder/part.gz"], "content": [content]})
        ((_, data),) = _records_in([batch])
        with pytest.raises(DataError, match=r"Expected folder/part\.gz to be a complete gzip file"):
            list(data)
