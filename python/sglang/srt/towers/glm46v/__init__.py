"""How GLM-4.6V prepares pictures for the encoder of `glm4v`."""
