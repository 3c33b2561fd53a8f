"""Helpers to try the restart wrapper out."""
