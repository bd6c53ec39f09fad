"""What attention to selected runs of tokens has in common, whatever its heads."""
