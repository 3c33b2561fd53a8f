"""What the coordinator has to do in a job far larger than this machine: planning, and the check before the commit."""
