"""The ranks of a run and how their processes reach each other: environment, rendezvous, store, messages, networks.

Decides rank, world size, addresses and which processes are trusted. Called by `rank` and `launch`.
"""
