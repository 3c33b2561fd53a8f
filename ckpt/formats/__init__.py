"""Checkpoints of other formats, read and written block by block. No code in them is ever run.

Opening a checkpoint gives a `lazy_state.LazyState`, of which `step_writer` writes a step of this library; writers take
`lazy_state.NewTensor`s, which `ckpt.exporting` makes of the `leaves` of a step. The formats are `safetensors`, files of
torch.save (`torch_file`, `torch_writer`), DCP (`torch.distributed.checkpoint`: `dcp_metadata`, `dcp_reader`,
`dcp_writer`), Orbax (`orbax_metadata`, `orbax_reader`) and Zarr (`zarr_tree`), both over `tensorstore_arrays`;
`detection` tells them apart. They share `foreign_files` (boxes of tensors in files, directories that appear whole),
`nesting` (states made of the keys of their leaves) and `pickles` (unpickling without running code). `torch_file`, the
writers of torch's formats and the readers of nested states import torch.
"""
