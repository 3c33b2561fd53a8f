"""The share of its time that a large job trains, when faults stop it: simulated, with costs that are measured here.

    costs         what saves and restarts cost on this machine, from other kinds of measurement
    assumptions   faults, hardware and launchers of a fleet, each with its source
        └──▶ systems      what each way to checkpoint and to restart costs a job of some size
                 └──▶ simulation   the job, fault by fault; the best intervals
                          └──▶ report   tables, picture

"Goodput" is the time of the steps that count, each once, divided by all the time that passed.
"""
