"""`python -m inprocess.fault_tolerance.launcher` is `ckpt_launcher`."""

import sys

from inprocess.fault_tolerance.launcher import main

if __name__ == "__main__":
    sys.exit(main())
