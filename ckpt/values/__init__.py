"""Leaves of a state that are not tensors, and their JSON form. Free of torch until one of its types occurs."""
