"""``python -m sparkdl doctor``: checks of an installation and of a Spark application, for people."""
