"""The pipeline of a save, from the state in the trainer to a published step.

    trainer   `planner` (and `layout`, this rank's share) -> `stage` -> `save` ── WriteTask ──▶ writer
                                                             `handle` ◀───────── reports ──── writer
    writer    `write` -> `publish` (the coordinator's) -> `retention`

`task` has what the two tell each other. `recover` and `drain` decide about saves that their processes did not.
"""
