"""From a state dict to named tensors with boxes, and from there to who writes and who reads what. Pure functions."""
