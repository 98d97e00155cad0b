"""A model's blocks as transformers builds them, adapted to run as slices over paged keys and values. Knows no placement, no precision."""
