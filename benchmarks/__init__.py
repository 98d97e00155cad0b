"""Every performance claim as a command: `python -m benchmarks.<name> [--json FILE]`, all of them: `python -m benchmarks`."""
