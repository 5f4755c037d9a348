"""Reading and writing of TFRecord files as DataFrames, without a jar and without TensorFlow."""

from sparkdl.tfrecords.dataframe import read_tfrecords, write_tfrecords

__all__ = ["read_tfrecords", "write_tfrecords"]
