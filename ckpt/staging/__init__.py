"""Copies from the tensors of the trainer into shared memory: the one copy that training waits for."""
