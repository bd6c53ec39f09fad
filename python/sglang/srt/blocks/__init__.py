"""Blocks of a model, a folder each.

`spec.py`: the description that planning reads: caches, weights, kernels that it needs. No torch.
`layer.py`: the block itself, made of that description.
`reference.py`: its math in plain torch, which the CPU runs and tests compare with.
`kernels/`: Triton kernels and their launchers.

`recurrent_state` holds what recurrent blocks share, `pooled_selection` what two kinds of attention share. A file with
another name has one idea that needs its own place.
"""
