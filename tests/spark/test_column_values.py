"""Values of columns keep their meaning: exact whole numbers, decoded values, NaN and nulls."""

import datetime
import decimal
import zlib

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Matrices, Vectors
from pyspark.sql import functions

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ConfigError, DataError
from sparkdl.ml import KerasTransformer
from sparkdl.sources.columns import Found, numeric
from sparkdl.sources.dataframe import frame_source

MASTERS = ("local", "connect")


def flat(size):
    """Return a model that predicts the numbers of a row."""
    given = keras.Input((size,))
    model = keras.Model(given, keras.layers.Flatten()(given), name="flat")
    model.compile("sgd", "mse")
    return model


BIG = (1 << 24) + 1, (1 << 53) + 1


def remainders(dtype):
    """Return a model that predicts the remainders of two numbers by 1,000; its loss is 0 for exact rows."""
    given = keras.Input((2,), dtype=dtype)
    taken = keras.layers.Lambda(lambda x: keras.ops.cast(x % 1000, "float32"), output_shape=(2,))(given)
    once = keras.layers.EinsumDense("ab,b->ab", (2,), kernel_initializer="ones")(taken)
    model = keras.Model(given, once)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kinds", "dtype", "ids"),
    [
        (("bigint", "bigint"), "int64", BIG),
        pytest.param(("int", "int"), "int32", (BIG[0], BIG[0] + 2), marks=pytest.mark.whole),
        pytest.param(("bigint", "boolean"), "int64", (BIG[1], 1), marks=pytest.mark.whole),
        pytest.param(("bigint", "double"), "float32", (BIG[0] - 2, 7), marks=pytest.mark.whole),
        pytest.param(("array<bigint>", "int"), "int64", BIG[::-1], marks=pytest.mark.whole),
    ],
)
def test_whole_numbers_of_a_list_stay_exact(spark, kinds, dtype, ids):
    """Ids above 2**24 and 2**53 in a list of columns are exact in fit, evaluate, predict and transform."""
    numbers = spark.createDataFrame(
        [(*ids, [float(each % 1000) for each in ids])] * 4, "a long, b long, y array<float>"
    )
    first = functions.array("a") if "array" in kinds[0] else functions.col("a")
    table = numbers.select(first.cast(kinds[0]).alias("a"), functions.col("b").cast(kinds[1]), "y")
    names = {"features_col": ["a", "b"], "label_col": "y"}
    model, expected = SparkModel(remainders(dtype), num_workers=1), [each % 1000 for each in ids]

    assert [0.0] == model.fit(table, verbose=0, **names).history["loss"]
    assert 0.0 == model.evaluate(table, **names)
    predicted = [
        model.predict(table, features_col=["a", "b"]).select("prediction"),
        KerasTransformer(model=model.model, featuresCol=["a", "b"]).transform(table).select("prediction"),
        table.select(predict_udf(model.model)("a", "b")),
    ]
    for rows in predicted:
        assert expected == rows.first()[0]


LOCAL = datetime.datetime.fromtimestamp(1704164645)
SQL = "timestamp'2024-01-02T03:04:05Z'"
DECODED = {  # an expression of Spark SQL, or a value; and what the user's function gets
    "map('a', 1, 'b', 2)": {"a": 1, "b": 2},
    f"map('a', map(1, {SQL}))": {"a": {1: LOCAL}},
    SQL: LOCAL,
    f"array({SQL})": [LOCAL],
    "timestamp_ntz'2024-01-02 03:04:05'": datetime.datetime(2024, 1, 2, 3, 4, 5),
    "date'2024-01-02'": datetime.date(2024, 1, 2),
    "cast(1.5 as decimal(9, 2))": decimal.Decimal("1.50"),
    "binary('ab')": b"ab",
    "array(binary('ab'), null)": [b"ab", None],
    f"named_struct('a', 1, 't', {SQL}, 'm', map('k', binary('b')))": {"a": 1, "t": LOCAL, "m": {"k": b"b"}},
    "interval '1' day": datetime.timedelta(days=1),
    "'x'": "x",
    "array(true, null)": [True, None],
    "1.5D": 1.5,
    "dense": Vectors.dense([1, 2]),
    "sparse": Vectors.sparse(3, [1], [2.0]),
    "matrix": Matrices.dense(2, 2, [1, 2, 3, 4]),
    "wide": Matrices.sparse(2, 2, [0, 1, 2], [0, 1], [1.0, 2.0]),
    "array(sparse)": [Vectors.sparse(3, [1], [2.0])],
    "map('v', dense)": {"v": Vectors.dense([1, 2])},
}


def mark_of(value):
    """Return a number that depends on a value's type and content."""
    return zlib.crc32(repr(value).encode()) % (1 << 20)


def test_decode_gets_the_same_values_everywhere(spark):
    """A function of decode gets the values of Spark's rows, on executors too; structs are dicts."""
    made = [(Vectors.dense([1, 2]), DECODED["sparse"], DECODED["matrix"], DECODED["wide"])]
    frame = spark.createDataFrame(made * 2, ["dense", "sparse", "matrix", "wide"])
    frame = frame.select(*(functions.expr(text).alias(f"c{i:02}") for i, text in enumerate(DECODED)))
    names = dict(zip((f"c{i:02}" for i in range(len(DECODED))), DECODED.values(), strict=True))
    inputs = {name: keras.Input((1,), name=name) for name in names}
    model = keras.Model(inputs, keras.layers.Concatenate()(list(inputs.values())))
    model.compile("sgd", "mse")
    decode = dict.fromkeys(names, lambda value: np.array([zlib.crc32(repr(value).encode()) % (1 << 20)]))
    columns = {name: name for name in names}

    first = frame_source(frame, (columns,), (len(names),), decode=decode).peek()
    rows = (
        SparkModel(model).predict(frame, features_col=columns, decode=decode).select("prediction").collect()
    )

    expected = {text: mark_of(value) for text, value in DECODED.items()}
    assert expected == dict(zip(DECODED, (int(value[0]) for value in first.values), strict=True))
    for row in rows:
        assert expected == dict(zip(DECODED, map(int, row[0]), strict=True))


def test_intervals_of_months_cannot_be_decoded(spark):
    """A column of intervals of months, which Spark cannot convert to Python, is refused by name."""
    frame = spark.sql("select interval 1 month as since, map(1, make_interval(1)) as spans")
    for name in ("since", "spans"):
        with pytest.raises(ConfigError, match=f"column '{name}' whose values Spark can pass to Python"):
            SparkModel(flat(1)).predict(frame, features_col=name, decode={name: np.array})


@pytest.mark.whole
@pytest.mark.one_case
@pytest.mark.parametrize("interface", ["arrow", "pandas"])
def test_nan_is_predicted_and_a_null_is_named(spark, monkeypatch, interface):
    """NaN gives a prediction and a null an error, also if Spark passes columns as pandas, as before 4.1."""
    if interface == "pandas":
        monkeypatch.delattr(functions, "arrow_udf")
    nan = float("nan")
    frame = spark.createDataFrame([(1.0, [1.0, 2.0], 3)], "a double, v array<double>, n int")
    table = frame.unionByName(spark.createDataFrame([(nan, [nan, 2.0], 4)], frame.schema)).coalesce(1)
    nulls = spark.createDataFrame([(None, [None, 2.0], None)], frame.schema)
    bad = frame.unionByName(nulls).coalesce(1)
    for columns, size in ((["a"], 1), (["n"], 1), (["v"], 2), (["a", "n"], 2), (["a", "v"], 3)):
        model = SparkModel(flat(size))
        found = model.predict(table, features_col=columns).select("prediction").collect()
        assert 2 == len(found)
        predicted = np.array(found[1][0], float)  # pandas turns a NaN that is predicted into a null
        assert (columns != ["n"]) == np.isnan(predicted).any()
        with pytest.raises(Exception, match=f"Expected no nulls in {', '.join(columns)}; row 1 of a batch"):
            model.predict(bad, features_col=columns).collect()
    for columns in (["a"], ["a", "n"]):
        with pytest.raises(Exception, match="Expected no nulls in .*; row 1 of a batch is null"):
            bad.select(predict_udf(flat(len(columns)))(*columns)).collect()
    spark.udf.register("flat_of_two", predict_udf(flat(2)))
    assert [1.0, 3.0] == frame.selectExpr("flat_of_two(a, n)").first()[0]


@pytest.mark.parametrize("columns", [["v"], pytest.param(["v", "a"], marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "vector", [Vectors.dense([1.0] * 9), pytest.param(Vectors.sparse(9, [1], [1.0]), marks=pytest.mark.whole)]
)
def test_a_null_vector_is_named_by_its_row(spark, columns, vector):
    """A null vector is named with its row in fit and evaluate, also in a list of columns."""
    rows = [(0, vector, [2.0], 1.0), (1, vector, [2.0], 0.0), (2, None, None, 0.0)]
    table = spark.createDataFrame(rows, ["row", "v", "a", "y"]).orderBy("row").coalesce(1)
    given = keras.Input((9 + len(columns) - 1,))
    model = keras.Model(given, keras.layers.Dense(1, "sigmoid")(given))
    model.compile("sgd", "binary_crossentropy")
    ours, names = SparkModel(model, num_workers=1), {"features_col": columns, "label_col": "y"}

    for call in (ours.fit, ours.evaluate):
        with pytest.raises(
            DataError, match=f"Expected no nulls in {', '.join(columns)}; row 2 of partition 0"
        ):
            call(table, **names)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "string",
            "holds string. Convert it first, with pyspark.ml.feature.StringIndexer .*, or pass decode",
        ),
        ("array<string>", "Convert it first, with pyspark.ml.feature.HashingTF .*, or pass decode="),
        ("date", r'first, with df\["c"\].cast\("timestamp"\).cast\("double"\), or pass decode='),
        ("struct<origin: string, data: binary>", "holds struct<origin:string,data:binary>. Pass decode="),
        ("array<struct<a: string>>", "Pass decode="),
        ("map<string, int>", "Pass decode="),
        ("binary", "Pass decode="),
    ],
)
def test_advice_fits_the_type_of_a_column(spark, kind, words):
    """Only strings are to be indexed or cast; a struct, a map or a binary value needs decode."""
    column = spark.sql(f"select cast(null as {kind}) as c").schema["c"]
    with pytest.raises(ConfigError, match=words):
        numeric("c", Found(functions.col("c"), column.dataType))
