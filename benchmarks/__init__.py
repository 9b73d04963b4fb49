"""Benchmarks: each runs as ``python -m benchmarks.<name>``, takes ``--smoke``, keeps a record."""
