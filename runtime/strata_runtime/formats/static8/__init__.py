"""Eight-bit weights and activations whose scales are known beforehand."""
