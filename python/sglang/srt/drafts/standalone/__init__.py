"""A small model that drafts for a large one."""
