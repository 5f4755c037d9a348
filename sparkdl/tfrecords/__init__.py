"""TFRecord files as DataFrames, both ways: on executors, without a jar and without TensorFlow."""

from sparkdl.tfrecords.dataframe import read_tfrecords, write_tfrecords

__all__ = ["read_tfrecords", "write_tfrecords"]
