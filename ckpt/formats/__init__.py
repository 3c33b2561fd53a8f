"""Checkpoints of other formats, read and written block by block. No code in them is ever run.

Opening a checkpoint gives a `lazy_state.LazyState`, of which `step_writer` writes a step of this library; writers take
`lazy_state.NewTensor`s, which `ckpt.exporting` makes of the leaves of a step. The formats are `safetensors`, files of
torch.save (`torch_file`, `torch_writer`), DCP (`torch.distributed.checkpoint`: `dcp_reader`, `dcp_writer`), and Zarr,
with the documents of Orbax or without (`orbax_metadata`, `zarr_tree`, both over `tensorstore_arrays`); `foreign_state`
tells them apart. They share `foreign_files` (boxes of tensors in files, directories that appear whole) and `pickles`
(unpickling without running code). `torch_file`, the writers of torch's formats and the readers of nested states import
torch.
"""
