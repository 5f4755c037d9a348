"""Each private part of Spark that sparkdl uses exists in this version, and behaves as sparkdl expects."""

from pathlib import Path

import pytest
from pyspark.ml.param import Param, Params
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import functions

from sparkdl.spark import spark_internals

OTHER = "/no/such/python"


@pytest.fixture
def context(spark, eventually):
    """The application, once the tasks that earlier tests cancelled have ended."""
    context = spark.sparkContext
    assert eventually(lambda: spark_internals.running_tasks(context) == 0)
    return context


def shuffle_files(spark, number):
    folder = Path(spark.conf.get("spark.local.dir"))
    return [path.name for path in folder.rglob(f"shuffle_{number}_*")]


def test_an_application_is_known(context, eventually):
    """The running application is found, with its executors, its folder and its slots."""
    assert spark_internals.active_context() is context
    assert not spark_internals.is_stopped(context)
    assert all(each.host() for each in spark_internals.executors(context))
    assert eventually(lambda: not any(each.numRunningTasks() for each in spark_internals.executors(context)))
    assert Path(spark_internals.temporary_folder(context)).is_dir()
    assert spark_internals.concurrent_tasks(context, None) == 2


def test_the_stages_of_a_job_are_found_by_its_tag(context, eventually):
    """A tagged job has its stages and their tasks; now no task and no other job runs."""
    context.addJobTag("tagged")
    context.parallelize(range(4), 2).count()
    context.removeJobTag("tagged")

    assert [(True, 2)] == spark_internals.stages_of(context, "tagged")
    assert [] == spark_internals.stages_of(context, "unknown")
    assert [] == spark_internals.other_jobs(context, "tagged")
    assert eventually(lambda: spark_internals.running_tasks(context) == 0)


def test_the_bar_of_stages_has_the_moment_that_hides_it(context):
    """Spark's bar keeps the moment when the last job ended, which can be set."""
    bar = spark_internals.jvm(context).org.apache.spark.ui.ConsoleProgressBar(context._jsc.sc())
    bar.stop()
    spark_internals.last_finish(bar).setLong(bar, 1 << 62)

    assert 1 << 62 == spark_internals.last_finish(bar).getLong(bar)
    bar.finishAll()
    assert 1 << 62 > spark_internals.last_finish(bar).getLong(bar) > 0
    spark_internals.hide_progress_bar(context, hidden=True)
    spark_internals.hide_progress_bar(context, hidden=False)


def test_the_profile_of_a_task_reaches_the_jvm(context):
    """Spark gets the ResourceProfile of tasks, which a local master refuses."""
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build

    with pytest.raises(Exception, match="TaskResourceProfiles are only supported"):
        spark_internals.concurrent_tasks(context, profile)


def test_classes_and_settings_of_the_jvm_are_reached(context):
    """Java's classes are called by their names, and Hadoop's configuration is read."""
    assert spark_internals.jvm(context).java.lang.Integer.parseInt("7") == 7
    assert spark_internals.hadoop_configuration(context).get("fs.defaultFS")


def test_a_broadcast_is_known_by_its_file(context):
    """A broadcast variable has a file on this machine, and the JVM's broadcast is referred to."""
    shared = context.broadcast([1, 2])

    assert Path(spark_internals.broadcast_file(shared)).is_file()
    assert spark_internals.weak_reference(context, shared).get() is not None
    shared.destroy()


def test_causes_of_failures_are_kept(spark):
    """PySpark keeps the cause of a Java exception; other exceptions have none."""
    fail = functions.udf(lambda value: 1 // (value - value), "int")
    with pytest.raises(Exception, match="ZeroDivisionError") as caught:
        spark.range(1).select(fail("id")).collect()

    assert "_cause" in vars(caught.value)
    assert spark_internals.cause_of(caught.value) is vars(caught.value)["_cause"]
    assert spark_internals.cause_of(ValueError()) is None


@pytest.mark.parametrize("kind", ["RDD", "DataFrame"])
def test_functions_in_the_jvm_get_another_python(kind, spark, context):
    """``set_python`` replaces one Python by another in functions that PySpark has sent to the JVM."""

    def data():
        rdd = context.parallelize(range(4), 2).map(lambda value: (value,))
        return rdd.repartition(1) if kind == "RDD" else spark.createDataFrame(rdd, "value int")

    unchanged, changed = data(), data()
    spark_internals.set_python(unchanged, "another python", OTHER)
    spark_internals.set_python(changed, context.pythonExec, OTHER)

    assert sorted(value for (value,) in unchanged.collect()) == [0, 1, 2, 3]
    with pytest.raises(Exception, match=OTHER):
        changed.collect()


def test_shuffles_of_rdds_are_forgotten(spark, context, eventually):
    """The files of an RDD's shuffle are removed by its id."""
    rdd = context.parallelize([(1, 1), (2, 2)], 2).partitionBy(2).mapValues(lambda value: value + 1)
    rdd.collect()
    number = spark_internals.shuffle_of(rdd)
    assert shuffle_files(spark, number)

    spark_internals.forget_shuffles(context, [number])

    assert eventually(lambda: not shuffle_files(spark, number))


def test_shuffles_of_dataframes_are_forgotten(spark, context, eventually):
    """The shuffles in the plan of a DataFrame that ran are found, and none in a plan that did not run."""
    frame = spark.range(100).repartition(3)
    assert spark_internals.shuffles_of(frame, run=False) == []
    frame.collect()

    numbers = spark_internals.shuffles_of(frame, run=True)

    assert len(numbers) == 1
    assert shuffle_files(spark, numbers[0])
    spark_internals.forget_shuffles(context, numbers)
    assert eventually(lambda: not shuffle_files(spark, numbers[0]))


class Stage(Params):
    width = Param(spark_internals.no_parent(), "width", "the width")


def test_a_stage_gets_another_uid():
    """A Param of a class belongs to each of its stages, also if the stage's uid changes."""
    stage = Stage()
    assert stage.width.parent == stage.uid

    spark_internals.set_uid(stage, "another")

    assert (stage.uid, stage.width.parent) == ("another", "another")
