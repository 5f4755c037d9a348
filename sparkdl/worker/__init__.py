"""What runs in a Spark task: the training loop, its strategies, and prediction."""
