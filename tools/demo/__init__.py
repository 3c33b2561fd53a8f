"""`make demo`: train, kill with a save in flight, resume, and compare with a run that was never stopped."""
