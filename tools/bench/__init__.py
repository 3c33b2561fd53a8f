"""`make bench`: what a save costs, next to what the machine can do in the same run."""
