"""Inspect, validate, compare, export and convert checkpoints: `python -m tools.inspect_ckpt`, or `inspect_ckpt`.

Each command is a module with `HELP`, `add_arguments` and `run`; `__main__` lists them. They share `step` (a step that
is read), `root` (a checkpoint root and its saves), `numbers` (statistics of elements), `plots`, and `output` (text,
JSON, exit codes); `export` and `convert` use `ckpt.exporting` and `ckpt.formats`. Imports of this package are relative,
because it has two names. Torch is imported only for its own formats.
"""
