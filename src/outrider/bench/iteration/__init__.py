"""Measures the time of a training iteration: without DDP, with torch's DDP, and with our policies."""
