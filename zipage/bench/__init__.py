"""Benchmarks: workloads, rooflines, offline and serving benchmarks, ablations."""
