"""The main thread, reached from outside: thrown into, woken, looked at, and left alone where it must be."""
