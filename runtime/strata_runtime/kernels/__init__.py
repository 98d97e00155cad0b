"""Kernels: the native library for processors and the Triton programs for GPUs, below every format. They know no weights' files."""
