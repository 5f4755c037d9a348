"""One Python process: Ctrl-C, its limits of memory, and the text of what went wrong."""
