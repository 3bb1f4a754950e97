"""Real ranks on real devices: world, launch, the rank driver, checkpoints."""
