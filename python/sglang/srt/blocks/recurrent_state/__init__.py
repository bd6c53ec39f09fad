"""What blocks with one state of fixed size for each request share: convolution, recurrence, gated norm."""
