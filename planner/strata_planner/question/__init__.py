"""What is asked: a model, a cluster, a load, and the wishes of `spec`."""
