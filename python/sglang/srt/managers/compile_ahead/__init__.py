"""Compiles the Triton kernels that a start will launch, in parallel processes, while the weights are read.

`start.py` runs in the rank that is first on its machine. It starts `python -m sglang.srt.managers.compile_ahead`, where
`job.py` rehearses the start without a GPU (`model_executor/rehearsal.py`) and has `workers.py` compile each form as
soon as it is launched there. The results lie in Triton's own cache, where the rank finds them. What the rehearsal
misses is compiled when it is launched.
"""
