"""Rates that no device has measured yet: what loads, takeovers and restarts are predicted by until one has been seen.

Used by the tables of plans, by benchmarks and by whoever controls a deployment.
"""

# Measured by this project (docs/benchmarks.md, `loading`): an any-precision copy that lies in the page cache, on two threads. A disk or a hub is slower.
READ_BYTES_PER_SECOND = 1.58 * (1 << 30) / 0.74
# Not measured by us: a PCIe 3.0 x16 port, as datasheets have it with what its protocol takes.
PORT_BYTES_PER_SECOND = 12e9
