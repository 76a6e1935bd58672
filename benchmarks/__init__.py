"""Measurements, as ratios against a named peer or floor of the same run. Run one with `python -m benchmarks.NAME`."""
