"""One command for all measurements, `python -m tools.bench`, and what they share.

    __main__        the kinds, and their options
    harness         rounds, ratios to limits, tables, JSON
    limits          what the machine can do with the same bytes
    processes       ranks as processes; their memory and processor time
    workload        the state that is saved, the steps that train beside it

A kind is a module, or a package, with two functions: `add_options(parser)` and `run(options)`. A rank that is a program
of its own has a module of its own, named after its kind.
"""
