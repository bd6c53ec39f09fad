"""A name that trainers import."""


def monkey_patch_torch_reductions() -> None:
    """Does nothing: tensors reach this server in files, and not by torch's reductions."""
