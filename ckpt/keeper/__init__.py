"""The keeper of a rank: the one process that a trainer starts. It forks workers, and keeps memory alive."""
