"""The timeline of a run: events, recorder, sampler, idle time, exporters. Imports no torch.

Decides which events are kept and how they are read. Recorded by `rank` and `launch`, read by `cli` and `bench`.
"""
