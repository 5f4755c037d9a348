"""A worker's rows: their schema, blocks of them in memory and on disk, and the order of batches."""
