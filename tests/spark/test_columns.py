"""Column names resolve as in Spark; a list of columns is one array, or the error names the valid types."""

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ConfigError, ModelError
from sparkdl.ml import KerasEstimator, KerasTransformer

MASTERS = ("local", "connect")
NUMBERS = np.random.default_rng(3).integers(1, 9, (40, 24)).astype("float32")
PARTS = {  # each column's place in a row of numbers, and its shape
    "age": (0, ()),
    "count": (1, ()),
    "flag": (2, ()),
    "left": (3, (3,)),
    "right": (6, (3,)),
    "dense": (9, (3,)),
    "short": (12, (2,)),
    "board": (14, (2, 3)),
    "s.u": (20, ()),
    "s.`v.w`": (21, (3,)),
}


def part(name):
    """Return the values of a column, shape (rows, ...)."""
    if name == "wide":
        return np.stack([wide_of(row).toArray() for row in NUMBERS])
    start, shape = PARTS[name]
    values = NUMBERS[:, start : start + int(np.prod(shape, dtype=int))].reshape(-1, *shape)
    return values > 4 if name == "flag" else values


def wide_of(row):
    return Vectors.sparse(64, [(int(row[0]), float(row[1])), (40, float(row[2]))])


@pytest.fixture(scope="module")
def frame(spark):
    rows = []
    for index, row in enumerate(NUMBERS):
        own = {name: part(name)[index].tolist() for name in PARTS}
        nested = own.pop("s.u"), own.pop("s.`v.w`")
        own["dense"], own["count"] = Vectors.dense(own["dense"]), int(own["count"])
        rows.append((index, *own.values(), nested, wide_of(row), float(index % 2), nested[0]))
    kinds = ["double", "int", "boolean", "array<double>", "array<float>", "vector", "array<double>"]
    kinds.append("array<array<float>>")
    names = ["row bigint", *(f"{name} {kind}" for name, kind in zip(PARTS, kinds, strict=False))]
    text = ", ".join(name for name in names if "vector" not in name)
    plain = spark.createDataFrame(
        [tuple(v for i, v in enumerate(row) if i not in (6, 10)) for row in rows],
        f"{text}, s struct<u: double, `v.w`: array<double>>, Label double, `s.u.x` double",
    )
    vectors = spark.createDataFrame([(row[0], row[6], row[10]) for row in rows], ["row", "dense", "wide"])
    return plain.join(vectors, "row").repartition(2, "row").cache()


def flat(*shape):
    """Return a model that predicts the numbers of a row in the order of its input."""
    given = keras.Input(shape)
    model = keras.Model(given, keras.layers.Flatten()(given), name="flat")
    model.compile("sgd", "mse")
    return model


def rows_of(frame, column):
    found = frame.orderBy("row").select(column).collect()
    return np.array([row[0] for row in found])


FIRST, LAST = (lambda parts: np.stack(parts, 1)), (lambda parts: np.stack(parts, -1))


def joined_(parts):
    return np.concatenate([each.reshape(len(each), -1) for each in parts], axis=1)


LISTS = [
    (["dense"], (3,), joined_),
    (["left"], (3,), joined_),
    (["age"], (1,), joined_),
    (["board"], (2, 3), joined_),
    (["wide"], (64,), joined_),
    (["age", "count", "flag"], (3,), joined_),
    (["age", "left"], (4,), joined_),
    (["age", "dense", "flag"], (5,), joined_),
    (["short", "dense", "left"], (8,), joined_),
    (["short", "dense", "age"], (3, 2), joined_),
    (["left", "right"], (6,), joined_),
    (["left", "right"], (2, 3), FIRST),
    (["left", "right"], (3, 2), LAST),
    (["left", "dense", "right"], (3, 3), FIRST),
    (["left", "right"], (3, 2, 1), LAST),
    (["board", "board"], (2, 3, 2), LAST),
    (["board", "board", "board"], (3, 2, 3), FIRST),
    (["board", "board"], (12,), joined_),
    (["age", "wide", "left"], (68,), joined_),
    (["s.u", "s.`v.w`"], (4,), joined_),
]


def seldom(cases, *often):
    """Return cases as parameters; all but those listed run in the full test suite only."""
    return [
        pytest.param(*case, marks=[] if i in often else [pytest.mark.whole]) for i, case in enumerate(cases)
    ]


@pytest.mark.one_case
@pytest.mark.parametrize(("columns", "shape", "joined"), seldom(LISTS, 12, 18))
def test_a_list_of_columns_is_one_array(spark, frame, columns, shape, joined):
    """A list of one column is that column; numbers, arrays and vectors are joined, equal arrays stacked."""
    expected = joined([part(name) for name in columns]).reshape(len(NUMBERS), -1)
    predictions = SparkModel(flat(*shape)).predict(frame, features_col=columns)
    transformed = KerasTransformer(model=flat(*shape), featuresCol=columns).transform(frame)
    function = predict_udf(flat(*shape))(*columns)

    for table, column in ((predictions, "prediction"), (transformed, "prediction"), (frame, function)):
        np.testing.assert_array_equal(expected, rows_of(table, column).reshape(len(NUMBERS), -1))


@pytest.mark.whole
def test_lists_of_all_kinds_are_read_by_one_job(spark, frame):
    """predict_udf reads lists of columns of every kind in one pass over the rows."""
    functions_ = [
        predict_udf(flat(*shape))(*columns).alias(f"p{i}") for i, (columns, shape, _) in enumerate(LISTS)
    ]
    found = frame.orderBy("row").select(*functions_).collect()

    for i, (columns, _, joined) in enumerate(LISTS):
        expected = joined([part(name) for name in columns]).reshape(len(NUMBERS), -1)
        np.testing.assert_array_equal(expected, np.array([row[i] for row in found]).reshape(len(NUMBERS), -1))


def dense(*shape):
    """Return a model whose weights depend on each place in a row and on the last dimension."""
    keras.utils.set_random_seed(5)
    given = keras.Input(shape)
    scores = keras.layers.Dense(2, name="each")(given)
    model = keras.Model(given, keras.layers.Dense(1, "sigmoid", name="all")(keras.layers.Flatten()(scores)))
    model.compile(keras.optimizers.SGD(0.01), "binary_crossentropy")
    return model


def trained(shape, fit):
    model = dense(*shape)
    fitted = fit(model)
    return (fitted if fitted is not None else model).get_weights()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("columns", "shape", "joined"),
    seldom(
        [
            (["left", "right"], (3, 2), LAST),
            (["age", "wide"], (65,), joined_),
            (["wide"], (64,), joined_),
            (["age", "left"], (4,), joined_),
            (["board", "board"], (2, 2, 3), FIRST),
        ],
        0,
        1,
    ),
)
def test_lists_train_as_the_array_does(spark, frame, columns, shape, joined):
    """SparkModel and an Estimator train on a list of columns to the weights of Keras's fit."""
    x, y = joined([part(name) for name in columns]).reshape(-1, *shape), np.arange(len(NUMBERS)) % 2
    settings = {"epochs": 2, "batch_size": len(NUMBERS)}

    def estimate(model):
        estimator = KerasEstimator(
            model=model, featuresCol=columns, batchSize=len(NUMBERS), epochs=2, numWorkers=2
        )
        return estimator.fit(frame).getModel()

    def fit(model):
        SparkModel(model, num_workers=2).fit(frame, features_col=columns, verbose=0, **settings)
        assert SparkModel(model).evaluate(frame, features_col=columns) == pytest.approx(
            model.evaluate(x, y, verbose=0), rel=1e-4
        )

    expected = trained(shape, lambda model: model.fit(x, y, verbose=0, **settings) and None)
    for ours in (fit, estimate):
        for mine, theirs in zip(trained(shape, ours), expected, strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-5)


@pytest.mark.whole
def test_names_are_resolved_as_spark_does(spark, frame):
    """Struct fields, other case, backticks and names with dots resolve wherever a name is given."""
    for name, start in (("AGE", 0), ("S.U", 20), ("`s`.`u`", 20), ("s.u.x", 20), ("`s.u.x`", 20)):
        found = SparkModel(flat(1)).predict(frame, features_col=name)
        np.testing.assert_array_equal(NUMBERS[:, start], rows_of(found, "prediction"))
    halves = frame.withColumn("part", functions.struct((functions.col("row") % 4 == 0).alias("out")))
    names = {"label_col": ["LABEL"], "sample_weight": ["Age"], "validation_indicator_col": "Part.OUT"}
    model = dense(3)

    history = SparkModel(model, num_workers=1).fit(
        halves,
        features_col=["S.`V.W`"],
        decode={"s.`v.w`": np.array},
        batch_size=40,
        seed=1,
        verbose=0,
        **names,
    )

    held = np.arange(len(NUMBERS)) % 4 == 0
    x, y, weight = part("s.`v.w`"), np.arange(len(NUMBERS)) % 2, part("age")
    expected = dense(3).fit(
        x[~held],
        y[~held],
        40,
        sample_weight=weight[~held],
        validation_data=(x[held], y[held], weight[held]),
        verbose=0,
    )
    for name, values in expected.history.items():
        np.testing.assert_allclose(values, history.history[name], rtol=1e-5)


def test_case_is_told_apart_where_spark_is_set_to(spark, frame):
    """The setting spark.sql.caseSensitive applies to our column names as to Spark's."""
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(ConfigError, match="Expected a column 'AGE'; the DataFrame has row, age"):
            SparkModel(flat(1)).predict(frame, features_col="AGE")
        both = frame.withColumn("AGE", functions.col("count"))
        found = SparkModel(flat(1)).predict(both, features_col="AGE")
        np.testing.assert_array_equal(NUMBERS[:, 1], rows_of(found, "prediction"))
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


REFUSED = [
    (["age", "words"], (2,), "column 'words' to hold numbers"),
    (
        ["age", "board"],
        (7,),
        "got age double, board array<array<float>>. The columns in a list may hold numbers",
    ),
    ("s.z", (1,), "Expected a column 's.z'; the DataFrame has .* Spark says: .*FIELD_NOT_FOUND"),
    ("nothing", (1,), "Expected a column 'nothing'; the DataFrame has row, age"),
    (
        "twice",
        (1,),
        "Expected one column 'twice'; Spark finds several in the DataFrame: twice, TWICE. Rename",
    ),
    (["age", "*"], (2,), r"Expected a column '\*'"),
    ("`age", (1,), "Expected a column '`age'"),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("columns", "shape", "message"), REFUSED)
def test_what_cannot_be_a_column_is_refused_by_name(spark, frame, jobs, columns, shape, message):
    """An invalid column is refused by name in fit, evaluate, predict and transform, before any job."""
    odd = frame.select(
        "*", functions.lit("a").alias("words"), *(functions.lit(1.0).alias(n) for n in ("twice", "TWICE"))
    )
    model, before = dense(*shape), jobs()
    calls = [
        lambda: SparkModel(model).fit(odd, features_col=columns, verbose=0),
        lambda: SparkModel(model).evaluate(odd, features_col=columns),
        lambda: SparkModel(model).predict(odd, features_col=columns),
        lambda: KerasTransformer(model=model, featuresCol=columns).transform(odd),
    ]

    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call()
    assert before == jobs()


@pytest.mark.whole
def test_what_a_list_may_hold_is_said_where_it_does_not_fit(spark, frame):
    """A list of columns of the wrong shape raises on the driver for the first row, else with the row."""
    nested = frame.withColumn("more", functions.array("board", "board")).withColumn(
        "odd", functions.array(functions.array("age"))
    )
    with pytest.raises(
        ConfigError,
        match=r"takes rows of shape \(5,\); the columns age, left form rows of shape \(4,\). The columns in",
    ):
        SparkModel(dense(5)).fit(frame, features_col=["age", "left"], verbose=0)
    with pytest.raises(
        ConfigError, match=r"the first row has shapes \(2, 3\), \(1, 1\). The columns in a list may"
    ):
        SparkModel(dense(2, 2, 3)).fit(nested, features_col=["board", "odd"], verbose=0)
    for call in (
        lambda: SparkModel(flat(5)).predict(frame, features_col=["age", "left"]).collect(),
        lambda: frame.select(predict_udf(flat(5))("age", "left")).collect(),
    ):
        with pytest.raises(
            Exception,
            match=r"to form shape \(5,\) \(5 values\); row 0 of a batch has 1 \+ 3 values. The columns",
        ):
            call()


@pytest.mark.whole
def test_labels_of_a_data_frame_get_the_shape_of_the_output(spark, frame):
    """A flat array or a list of columns with as many values can be the label of an image output."""
    y = part("board")
    names = [
        functions.flatten("board").alias("flat"),
        *(functions.col("board")[i][j].alias(f"b{i}{j}") for i in (0, 1) for j in (0, 1, 2)),
    ]
    table = frame.select("*", *names)

    def build():
        keras.utils.set_random_seed(5)
        given = keras.Input((3,))
        out = keras.layers.Reshape((2, 3))(keras.layers.Dense(6)(given))
        model = keras.Model(given, out, name="boards")
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    expected = build()
    expected.fit(part("left"), y, batch_size=len(y), verbose=0)
    for label in ("flat", [f"b{i}{j}" for i in (0, 1) for j in (0, 1, 2)]):
        model = build()
        SparkModel(model, num_workers=2).fit(
            table, features_col="left", label_col=label, batch_size=len(y), verbose=0
        )
        for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-5)


@pytest.mark.whole
def test_a_sequential_model_without_an_input_takes_one_array(spark, frame):
    """A list of columns trains a Sequential model that has no Input as one array."""
    model = keras.Sequential([keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")

    SparkModel(model, num_workers=1).fit(frame, features_col=["age", "dense"], verbose=0)

    assert (4, 1) == model.get_weights()[0].shape


@pytest.mark.whole
def test_nested_arrays_of_other_lengths_are_refused(spark):
    """A nested array with the right number of values but another shape is refused."""
    table = spark.createDataFrame(
        [(0, [[1.0, 2.0], [3.0, 4.0]]), (1, [[1.0], [2.0, 3.0, 4.0]])], "row int, x array<array<double>>"
    )

    with pytest.raises(
        Exception, match=r"Expected x of shape \(2, 2\); row . of a batch has nested arrays of other lengths"
    ):
        SparkModel(flat(2, 2)).predict(table, features_col="x").collect()


@pytest.mark.parametrize("form", [dict, list])
def test_a_function_takes_the_inputs_in_the_order_of_the_model(spark, form):
    """predict_udf gives a model its inputs in the structure that it takes, also if that is a dict."""
    wide, narrow = keras.Input((2,), name="wide"), keras.Input((1,), name="narrow")
    given = {"wide": wide, "narrow": narrow} if form is dict else [wide, narrow]
    model = keras.Model(given, keras.layers.Dense(1)(keras.layers.concatenate([wide, narrow])))
    frame = spark.createDataFrame([([1.0, 2.0], 3.0), ([4.0, 5.0], 6.0)], ["w", "n"])
    columns = {"wide": "w", "narrow": "n"}
    arrays = {"wide": np.array([[1.0, 2.0], [4.0, 5.0]]), "narrow": np.array([[3.0], [6.0]])}
    x = arrays if form is dict else [arrays["wide"], arrays["narrow"]]

    found = frame.select(predict_udf(model)(*(columns[each.name] for each in model.inputs)).alias("p"))

    expected = model.predict(x, verbose=0)[:, 0]
    np.testing.assert_allclose(expected, sorted_like(found, expected), rtol=1e-5)


def sorted_like(frame, expected):
    """Return the only column of a small DataFrame in the order of the expected values."""
    values = np.sort([row[0] for row in frame.collect()])
    return values[np.argsort(np.argsort(expected))]


def test_nested_outputs_are_refused_by_name(spark):
    """A model whose outputs are nested is refused before a job, with their shapes."""
    inputs = keras.Input((2,))
    outputs = {"pair": [keras.layers.Dense(1)(inputs), keras.layers.Dense(3)(inputs)]}
    with pytest.raises(ModelError, match=r"has nested outputs of shapes \{'pair': \[\(1,\), \(3,\)\]\}"):
        predict_udf(keras.Model(inputs, outputs))
