"""The machine: devices, drivers, torch builds, and verdicts about them. Imports no torch.

Decides which device a rank gets and which torch build fits. Called by `cli`, and by `api` and `launch` for devices.
"""
