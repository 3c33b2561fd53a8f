"""The pipeline of a save, from the state in the trainer to a published step.

`planner` and `part` (this rank's share), `save` (trainer: stage) -> `write` (writer process) -> `publish` (the
coordinator's).
"""
