"""What is open since when, in memory that a rank shares with its monitor, and which deadline is next.

Without process, socket or torch: `inprocess.fault_tolerance` has the rank's client and a monitor process of its own;
the monitor process of the in-process wrapper watches the same board.

    timeouts, table        limits, and the deadlines that follow from them; pure
    layout, board          the memory; the rank's side of it
    board_reading          the monitor's look at it
    watch                  when to look, and what to do
    diagnosis, suspect     what to say about a rank that is late, and which one is the cause
    gate, embedded         the two sides in the wrapper: its process, and its monitor process
"""
