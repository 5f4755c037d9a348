"""A worker's rows: their schema, blocks in memory and on disk, and the order of batches."""
