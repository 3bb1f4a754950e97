"""How long a training iteration takes, without DDP, with torch's and with ours."""
