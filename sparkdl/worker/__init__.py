"""The code of Spark tasks: the training loop, its strategies, and prediction."""
