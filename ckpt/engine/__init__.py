"""The parts behind a `Checkpointer`: assembly, restores, the bridge to restarts, and the end."""
