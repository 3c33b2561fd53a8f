"""The program of a fork server: `fork_server.main`, in a module that nothing else imports."""

from __future__ import annotations

import sys

from ckpt.async_calls.fork_server import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
