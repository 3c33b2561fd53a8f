"""The same as the installed command; see `inprocess.fault_tolerance.launcher`."""

import sys

from inprocess.fault_tolerance.launcher import main

if __name__ == "__main__":
    sys.exit(main())
