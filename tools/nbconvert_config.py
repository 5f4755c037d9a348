"""The settings of `make notebooks`: outputs hold nothing about the machine or the time.

Java and TensorFlow's C++ code log to the file descriptors of the kernel's process. These lines go to the
terminal. Warnings of Python stay in the output.
"""

from traitlets.config import get_config

c = get_config()
c.ExecutePreprocessor.extra_arguments = ["--IPKernelApp.capture_fd_output=False"]
c.ExecutePreprocessor.record_timing = False
c.ClearMetadataPreprocessor.enabled = True
c.ClearMetadataPreprocessor.clear_cell_metadata = False
c.ClearMetadataPreprocessor.preserve_nb_metadata_mask = {"kernelspec", ("language_info", "name")}
