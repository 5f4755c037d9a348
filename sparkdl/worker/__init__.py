"""Code that runs in Spark tasks: the training loop, its strategies, and prediction."""
