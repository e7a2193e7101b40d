"""What a training step takes, counted before anything runs: memory by what it is for, and a predicted time."""
