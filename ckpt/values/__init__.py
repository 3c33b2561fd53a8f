"""Leaves of a state that are not tensors, and their JSON form. Imports torch only for torch's own types."""
