"""A model's blocks as transformers builds them, adapted to run as slices over paged keys and values. Knows no placement, no precision."""

from strata_runtime.model.lean_imports import import_lean

import_lean()
