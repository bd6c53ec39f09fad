"""A residual stream and a block's output, weighted channel by channel."""
