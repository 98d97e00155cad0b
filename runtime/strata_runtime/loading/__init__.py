"""A slice of any supported checkpoint as a model that computes one stage, quantized while it streams in."""
