"""Speculative decoding: a folder for each way to draft.

`spec.py`: the description that planning reads: what the draft reads of its target, its weights. No torch.
`reader.py`: makes the description from config.json, where families use `spec.py` and it cannot stand there. No torch.
`model.py`: the draft's layers, made of that description.
`drafter.py`: proposes tokens, with the model if there is one.

`registry.py` says which algorithm has which reader, and the form in `spec.py` which model and drafter it has.
"""
