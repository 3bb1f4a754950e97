"""A user's own script in several policies: which reaches a target first."""
