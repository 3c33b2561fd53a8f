"""Access to the main thread from other threads: throw exceptions, wake it, probe it, read its stacks."""
