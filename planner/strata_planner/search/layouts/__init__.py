"""Layouts: which devices form which replica, and how each replica's devices form its stages (HexGen, ICML 2024)."""
