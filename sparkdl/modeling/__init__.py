"""Keras models: their variables, serialization, losses, optimizers and backends."""
