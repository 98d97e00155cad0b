"""Quantized experts on their way from a checkpoint into a layer: read one by one, each put into its place among all of the layer.

Used by `load_stage`: `read` in the reading thread, `store` in the one that loads.
"""

import torch
from torch import Tensor

from strata_planner.contract.formats import STORED_FORMATS
from strata_runtime.errors import InputError
from strata_runtime.formats import QuantLinear, make_linear
from strata_runtime.formats.expert_stack import ExpertProjection
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.stored_linears import QuantizedCheckpoint
from strata_runtime.loading.units import ExpertUnit
from strata_runtime.model.adapter import ModelSlice


class ExpertLoader:
    """Replaces fused parameters of `stage` by projections, on `device`."""

    def __init__(self, stage: ModelSlice, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._stage = stage
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def read(self, unit: ExpertUnit) -> Tensor | QuantLinear:
        """On the CPU: the dense matrix [N, K], or the linear as the checkpoint stores it."""
        if unit.format not in STORED_FORMATS or not isinstance(self._checkpoint, QuantizedCheckpoint):
            return self._checkpoint.read_rows(unit.rows, self._dtype)
        _, rows, columns = unit.fused_shape
        return self._checkpoint.read_linear({"weight": unit.rows[0].name}, (rows // unit.parts, columns), self._dtype)

    def store(self, unit: ExpertUnit, read: Tensor | QuantLinear) -> None:
        """In the unit's format. `read`: is not needed any more."""
        count, *expected = unit.fused_shape
        if isinstance(read, Tensor):
            name = f"expert {unit.expert} of {unit.key}"
            if list(read.shape) != expected:
                raise InputError(
                    f"the checkpoint does not fit config.json: {name} has the shape {list(read.shape)}, {expected} is expected"
                )
            linear = make_linear(read.to(self._device, non_blocking=True), None, unit.format, self._dtype, name=name)
        else:
            linear = read.to(self._device)
        assert isinstance(linear, QuantLinear)
        parent, attribute = self._stage.experts(unit.layer)[unit.key]
        projection = getattr(parent, attribute)
        if not isinstance(projection, ExpertProjection):
            projection = ExpertProjection(count)
            delattr(parent, attribute)  # a parameter gives way to no module
            setattr(parent, attribute, projection)
        projection.put(unit.expert, unit.part, linear)
