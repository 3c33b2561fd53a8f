"""Checkpoints of other formats, read and written block by block. No code in them is ever run.

Opening a checkpoint gives a `state.LazyState`. The formats are `safetensors`, `torch_file`, DCP
(`torch.distributed.checkpoint`: `dcp_metadata`, `dcp_reader`, `dcp_writer`), and `ckpt_step`, a step of this library.
They share `files` (boxes of tensors in files, directories that appear as a whole) and `pickles` (unpickling without
running code). `torch_file` and `dcp_writer` import torch; `dcp_reader` does when a chunk or an object needs it.
"""
