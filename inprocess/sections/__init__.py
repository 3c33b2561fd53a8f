"""Sections of a rank's program: open sections and their start times in memory shared with a monitor, and deadlines.

    timeouts        limits of heartbeats and sections
    board           the shared memory: its layout, and what the rank writes
    making          creates a board from the settings
    gate            the in-process wrapper's part: when events and clocks count
    board_reader    a consistent copy, for the monitor
    deadlines       when the monitor must read the board, and what it must do about what is late
    report          the report on a rank that is late, and the rank that is probably the cause

No process, no socket and no torch. The rank's client is in `inprocess.fault_tolerance`, the monitor process in
`inprocess.monitor_process`.
"""
