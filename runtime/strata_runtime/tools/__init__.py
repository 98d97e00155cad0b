"""Tools that make or examine a model's files: quantizers and calibrations, each a command. Slots never import them."""
