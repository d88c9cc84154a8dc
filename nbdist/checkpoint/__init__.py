"""What is written of a training run, and read again: checkpoints, and weights for others."""
