"""Weights as eight-bit floating point numbers."""
