"""Encoders of images and videos, a folder each.

`spec.py`: the description that planning reads: sizes, weights, shards. No torch.
`encoder.py`: the encoder itself, made of that description.
`processor.py`: how pictures and videos become patches and parts of a prompt, in a process without torch.

`registry` has a record for each. `base` holds what encoders share, `pictures` what processors share.
"""
