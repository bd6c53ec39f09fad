"""Which files of tests a change of the tree can break: how that is recorded, and what is chosen by it."""
