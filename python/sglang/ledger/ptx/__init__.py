"""Executes PTX on a CPU: the code that Triton makes for a GPU which is not there, instruction by instruction.

A tool of the ledger, never imported by serving. `launch.py` runs a kernel over torch tensors, `driver.py` makes Triton
launch its kernels that way. Sections are those of the PTX ISA, version 9.0.
"""
