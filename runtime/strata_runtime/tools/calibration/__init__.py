"""Calibration: one pass of a text through a model, layer by layer: how sensitive each layer is to precision."""
