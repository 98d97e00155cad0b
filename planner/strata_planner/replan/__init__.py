"""A new plan from a running one: how little must move, whether it is worth it, and in which order it happens."""
