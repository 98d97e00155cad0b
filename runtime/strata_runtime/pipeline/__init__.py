"""Names that pods are started by, the same in every release: an operator and its slots' image may be of different ones."""
