"""The public functions and SparkModel."""
