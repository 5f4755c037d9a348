"""Several fits of one Spark application: priorities, fair shares, pauses at epoch ends, back-fill."""
