"""The pipeline of a save, from the state in the trainer to a published step.

`save` (trainer: plan and stage) -> `part` (this rank's share) -> `write` (writer process) -> `publish` (the
coordinator's).
"""
