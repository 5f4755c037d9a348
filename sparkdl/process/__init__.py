"""Services for one Python process: Ctrl-C, memory limits, and the messages of exceptions."""
