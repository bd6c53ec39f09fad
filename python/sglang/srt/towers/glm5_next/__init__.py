"""GLM-5.3-Flash's form of the encoder of `glm4v`."""
