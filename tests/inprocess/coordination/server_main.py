"""A store server in a process of its own: `server_main.py POSITION SESSION`, then a command on each line of stdin."""

import sys

from inprocess.coordination.server import StoreServer
from inprocess.coordination.wire import Host


def main() -> None:
    server = StoreServer("127.0.0.1", 0, session=sys.argv[2], position=int(sys.argv[1]))
    server.start()
    print(server.host, flush=True)
    for line in sys.stdin:
        command, *rest = line.strip().split(";")
        if command == "follow":
            server.follow([Host.from_str(text) for text in rest])
            print("following", flush=True)
        elif command == "state":
            print(server.client_count, server.request_count, server.mirror_count, int(server.active), flush=True)
    server.close()


if __name__ == "__main__":
    main()
