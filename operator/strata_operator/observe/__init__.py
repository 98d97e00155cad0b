"""What there is: the API server, nodes, devices and model files as values."""
