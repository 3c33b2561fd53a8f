"""`python -m tools.bench`: all systems, all figures, in jobs of several ranks.

the command -> jobs.run_job: one process for each rank, and a look at their memory when they ask for it
                   rank.main: a process group; rounds; in each round the turn of every system
                       turns: limits, saves, training, memory, loads of one system
            -> figures: medians and ratios -> tables (docs/benchmarks.md), plots, JSON
"""
