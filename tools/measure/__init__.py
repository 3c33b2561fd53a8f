"""Measure how large and how dense the code is: files, classes, messages, words, functions that a save passes."""
