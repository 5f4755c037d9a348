"""The Spark application: its slots, jobs, files and failures."""
