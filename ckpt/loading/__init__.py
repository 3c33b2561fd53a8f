"""Restore published steps into a state, and read them without torch.

restore        choose a step, try an older one if it is damaged
restore_step   restore one step, in phases that all ranks pass together (`all_or_none`)
index          the metadata of a step, checked for `consistency`
match          pair the leaves of the state with what is stored; `optimizers` create their state before
fetch          read boxes of tensors; through a `bounce_buffer` for GPUs
state_update   assign values and have objects load, after a trial that can be undone
lazy           open a step without a state: `ckpt.open`
"""
