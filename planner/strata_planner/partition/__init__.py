"""How one layer may be cut over a group of devices: the algebra of tensor states, the search over it, the lengths to switch at."""
