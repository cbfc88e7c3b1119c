"""Measurements of RoundPipe, each run as ``python -m benchmarks.NAME``; see docs/measurements/README.md."""
