"""A real Kubernetes on one machine, for tests."""
