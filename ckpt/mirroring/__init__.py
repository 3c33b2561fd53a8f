"""Copies of published steps in a second root, made beside training by a worker of each rank.

trainer of rank 0 (`background`) ── step 10 is due ──▶ worker (`worker`): hold, copy (`step_copy`), publish
                                 ◀── done, or failed ──                          ▲ parts
trainer of rank 1 ... ───────────── step 10 is due ──▶ worker: copy the files of this rank
"""
