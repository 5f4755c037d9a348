"""Sources of training data, and their division into one partition per worker."""
