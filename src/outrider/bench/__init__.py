"""Benchmarks: models, data sets, modes, peers, statistics, reports, iteration times and scaling.

Decides what is run and how results are compared. Trains through `api` as a user would. Called by `cli`.
"""
