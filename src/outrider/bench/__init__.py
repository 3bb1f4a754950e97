"""Benchmarks: models, data, modes, peers, statistics."""
