"""What goes wrong with the precision of a linear operator; a branch of the tree in `strata_runtime.errors`.

InputError
└── PrecisionError                  fix the input: a weight, a shape or a format that cannot be stored
    ├── WeightNotFiniteError        the checkpoint holds NaN or infinity: load another copy of it
    ├── ActivationNotFiniteError    the model diverges on the calibration text: calibrate in float32, or check the checkpoint
    └── NotCalibratedError          a static format was asked for, and no calibration of this model is there: make one
"""

from strata_runtime.errors import InputError


class PrecisionError(InputError):
    """A linear operator cannot be stored or computed as asked."""


class WeightNotFiniteError(PrecisionError):
    """A weight holds NaN or infinity, which no integer format can store."""


class ActivationNotFiniteError(PrecisionError):
    """An activation seen in calibration is NaN or infinite."""


class NotCalibratedError(PrecisionError):
    """There is no calibration of a linear's activations that fits the model."""
