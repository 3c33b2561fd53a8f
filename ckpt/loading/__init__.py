"""The pipeline of a restore, from a published step to the state in the trainer; and reading without torch.

`index` (what is there) -> `load` (match with the state, agree) -> `fetch` (read boxes). `opened` is the way in without
a state.
"""
