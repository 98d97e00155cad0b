"""What is said of a plan: what was not chosen, and how people read and see it."""
