"""From the tensors of the trainer into shared memory: the one copy a save costs the training step."""
