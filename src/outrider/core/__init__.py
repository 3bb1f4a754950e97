"""Algorithms without torch, clock or I/O: pace, plans, splits, ledger, weights, policies, simulator."""
