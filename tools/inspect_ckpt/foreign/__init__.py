"""Checkpoints of other formats, read and written block by block; no code in them is ever run.

`state` (what an opened one looks like), `raw` (boxes of tensors out of files), one module or two for each format
(`safetensors_*`, `dcp_*` with `dcp_metadata` and `zip_tensors`, `torch_file`), `torch_state` (what is made of objects
that torch has loaded), `new_directory` (files that appear together), `to_step` (writes a step of ours), `ours` (the
leaves of a step of ours under the names of others), `compare` (bit by bit).
"""
