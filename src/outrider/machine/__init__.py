"""What the machine has: devices, detection, torch builds. Knows no torch."""
