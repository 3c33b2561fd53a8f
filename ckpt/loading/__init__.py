"""Restore published steps into a state, and read them without torch.

restore        choose a step, try an older one if it is damaged
restore_step   restore one step, in phases that all ranks pass together (`all_or_none`)
index          the metadata of a step, checked for `consistency`
options        what a restore takes: which names, under which other ones, converted or cut to fit
match          pair the leaves of the state with what is stored; `optimizers` create their state before
whole_tensors  find the tensors that are read as a whole, straight to their memory
fetch          read boxes of tensors; through a `bounce_buffer` for GPUs
state_update   assign values and have objects load, after a trial that can be undone
new_tensors    whole tensors of a step as new torch tensors
load           the state of a step without one to restore into: `ckpt.load`
lazy           open a step, and read tensors of it: `ckpt.open`
zarr_store     a step as a store of zarr-python; `zarr_open`, without zarr: `ckpt.zarr_store`
"""
