"""How pictures and videos become patches: what the processors of several towers share."""
