"""Adapters for training frameworks: a module for each, which imports nothing of the others.

A framework that is missing is an ImportError that names what to install; `import ckpt` needs none of them.
"""
