"""An embedding of the token that each layer adds."""
