"""Real replicas in one process under a virtual clock."""
