"""Inspect, validate, compare, export and convert checkpoints: `python -m tools.inspect_ckpt`, or `inspect_ckpt`.

Each command is a module with `HELP`, `add_arguments` and `run`; `__main__` lists them. They share `step` (a step that
is read), `root` (a checkpoint root and its saves), `numbers` (statistics of elements), `plots`, `output` (text, JSON,
exit codes) and `formats` (other formats). Imports are relative, because the package has two names. Only `convert`
imports torch, and only for torch's own formats.
"""
