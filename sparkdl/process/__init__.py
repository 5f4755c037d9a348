"""Services for one Python process: Ctrl-C, memory limits, and the texts of exceptions."""
