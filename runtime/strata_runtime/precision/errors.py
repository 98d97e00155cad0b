"""What goes wrong with the precision of a linear operator.

PrecisionError (ValueError)     fix the input: a weight, a shape or a format that cannot be stored
`-- WeightNotFiniteError        the checkpoint holds NaN or infinity: load another copy of it
"""


class PrecisionError(ValueError):
    """A linear operator cannot be stored or computed as asked. Fix the input; retrying does not help."""


class WeightNotFiniteError(PrecisionError):
    """A weight holds NaN or infinity, which no integer format can store."""
