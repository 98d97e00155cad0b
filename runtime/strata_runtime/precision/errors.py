"""What goes wrong with the precision of a linear operator; a branch of the tree in `strata_runtime.errors`.

InputError
└── PrecisionError              fix the input: a weight, a shape or a format that cannot be stored
    └── WeightNotFiniteError    the checkpoint holds NaN or infinity: load another copy of it
"""

from strata_runtime.errors import InputError


class PrecisionError(InputError):
    """A linear operator cannot be stored or computed as asked."""


class WeightNotFiniteError(PrecisionError):
    """A weight holds NaN or infinity, which no integer format can store."""
