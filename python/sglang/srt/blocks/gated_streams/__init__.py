"""Several residual streams, weighted channel by channel by gates."""
