"""The user's data, and how it becomes the partitions of workers."""
