"""Free a main thread from calls of torch that wait for a dead rank: collectives, group creation, stores."""
