"""Checkpoints of other formats, read and written block by block. No code in them is ever run.

Opening a checkpoint gives a `lazy_state.LazyState`, of which `step_writer` writes a step of this library; writers take
`lazy_state.NewTensor`s, which `ckpt.exporting` makes of the `leaves` of a step. The formats are `safetensors`, files of
torch.save (`torch_file`, `torch_writer`), and DCP (`torch.distributed.checkpoint`: `dcp_metadata`, `dcp_reader`,
`dcp_writer`); `detection` tells them apart. They share `foreign_files` (boxes of tensors in files, directories that
appear as a whole) and `pickles` (unpickling without running code). `torch_file` and the writers of torch's formats
import torch; `dcp_reader` does when a chunk or an object needs it.
"""
