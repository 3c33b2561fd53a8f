"""The program of a keeper: `forking.main`, in a module that nothing else imports."""

from __future__ import annotations

import sys

from ckpt.keeper.forking import main

if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
