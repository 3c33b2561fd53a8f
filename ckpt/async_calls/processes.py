"""All background processes of a queue."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.async_calls.config import WriterConfig
from ckpt.async_calls.fork_server import ForkServer
from ckpt.async_calls.process import WriterProcess

__all__ = ["Processes"]


@dataclass
class Processes:
    """The writers and the server that forks them."""

    server: ForkServer
    writers: list[WriterProcess]

    @classmethod
    def create(cls, config: WriterConfig, count: int) -> Processes:
        server = ForkServer(config)
        return cls(server, [WriterProcess(config, server) for _ in range(count)])

    def replace(self, config: WriterConfig) -> Processes:
        """Become new ones, and return the old."""
        old = Processes(self.server, self.writers)
        new = Processes.create(config, len(old.writers))
        self.server, self.writers = new.server, new.writers
        return old

    def release(self) -> None:
        """Let go without waiting: the writers finish what they were sent, then all end. Idempotent."""
        for writer in self.writers:
            writer.release()
        self.server.release()

    def discard(self) -> None:
        """Kill the writers, and let go of all without waiting. Idempotent."""
        for writer in self.writers:
            writer.discard()
        self.server.release()
