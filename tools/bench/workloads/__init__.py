"""What the suite saves and loads."""
