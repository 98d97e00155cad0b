"""Weights rounded to nearest: a scale per output, or a scale and zero per group."""
