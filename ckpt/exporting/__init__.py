"""Exports: steps written in formats that other programs read, once (`export`) or regularly beside a training job.

    step -> selection: names, dtypes, blocks -> writers, with ckpt.formats -> new files, all at once

`options` says what is exported and how, `export` does it, `background` has writer processes do it for a
`Checkpointer`.
"""
