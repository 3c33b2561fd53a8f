"""The trainer's end of its replica process: has it forked by the keeper, and tells it what to send, hold and lend.

Nothing here waits for another node. What waits for the process has a deadline, and ends when the process dies. One that
has not answered in time is not waited for again before it has said something: what it holds is not needed. Of one that
has died, the next one gets what it held.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Sequence

from ckpt.keeper.messages import DropRegion, GiveUp, Notice
from ckpt.keeper.trainer_side import Keeper, Worker
from ckpt.replication.replica import (
    CONTROL,
    Address,
    Admit,
    Answer,
    ControlMessage,
    Held,
    List,
    Replica,
    Retain,
    Send,
    TransportError,
)
from ckpt.replication.tcp import Sent
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children
from inprocess.ipc.packets import Packet
from inprocess.ipc.shared_memory import SharedMemory

_NICE = 10  # as a writer
_EXIT_WAIT_S = 5.0
_START_S = 30.0  # for the first answer: the process has to start, on a machine that may be busy
_ANSWER_S = 5.0


class ReplicaWorker:
    """One replica process. For the thread that trains. Every failure is a TransportError."""

    def __init__(self, keeper: Keeper, linger_s: float) -> None:
        """Ask for the process, without waiting for it. OSError if that cannot be done."""
        self._keeper = keeper
        self._linger_s = linger_s
        self._sending: dict[int, Replica] = {}  # by the number of the request
        self._ended: list[Sent] = []
        self._gone = False
        self._has_started = False  # it has answered
        self._is_silent = False  # it did not answer the last request in time, and has said nothing since
        self._requests = itertools.count(1)
        self._worker: Worker[ControlMessage] = Worker(keeper, "replicas", CONTROL, nice=_NICE)
        self._channel = self._worker.channel
        in_forked_children(self.leave)

    @property
    def pid(self) -> int | None:
        """The id of the process; None as long as it is not known."""
        self._keeper.pump()
        self._worker.refresh()
        return self._worker.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there, as far as known."""
        return not self._gone

    def admit(self, host: str, secret: str, bandwidth: float | None, limit_bytes: int) -> Address:
        """Have it serve those that know the secret, and no others any more; return the address. See `Admit`.

        TransportError if it cannot.
        """
        request = next(self._requests)
        trainer = os.pidfd_open(os.getpid())
        try:
            self._channel.send(Admit(request, host, secret, bandwidth, limit_bytes, self._linger_s), trainer)
        finally:
            os.close(trainer)
        match self._wait_for(request).message:
            case Notice(_, {"port": int(port)}):
                self._wait_for(request)
                return Address(host, port)
            case Answer(_, error):
                raise TransportError(error)
        raise TransportError("the replica process does not say where it listens")

    def send(self, replica: Replica, fd: int, holder: Address, keep: str | None) -> None:
        """Have the memory of a slot sent; it must stay as it is until `poll` returns the end."""
        request = next(self._requests)
        self._sending[request] = replica
        self._channel.send(Send(request, replica, holder, keep), fd)

    def abort(self) -> None:
        """Give up what is being sent; `poll` returns the ends."""
        for replica in self._sending.values():
            self._channel.send(DropRegion(replica.snapshot))

    def poll(self) -> list[Sent]:
        """Return which transfers have ended since the last call, without waiting."""
        if not self._gone:
            self._gone = self._worker.receive(self._note)
        ended, self._ended = self._ended, []
        return ended

    def held(self) -> list[tuple[Replica, SharedMemory]]:
        """Return what it holds for others: the memory, which the caller closes, has the slot and the documents."""
        request = next(self._requests)
        self._channel.send(List(request))
        found: list[tuple[Replica, SharedMemory]] = []
        try:
            while isinstance((answer := self._wait_for(request)).message, Held):
                replica, (fd,) = answer.message.replica, answer.fds
                region_id = f"{replica.snapshot}/{replica.rank}"
                found.append((replica, SharedMemory(fd, replica.slot_bytes, "ckpt-replica", region_id)))
        except BaseException:
            for _, region in found:
                region.close()
            raise
        return found

    def lend(self, slots: Sequence[tuple[Replica, int]]) -> None:
        """Let other nodes read these slots, by their descriptors, until `retain`."""
        for replica, fd in slots:
            request = next(self._requests)
            self._channel.send(Held(request, replica), fd)
            self._wait_for(request)

    def retain(self, snapshots: Sequence[str]) -> None:
        """Drop what it holds of other snapshots, and all that was lent."""
        self._channel.send(Retain(list(snapshots)))

    def close(self, ending: Deadline | None = None) -> None:
        """End the process, and wait for its end until the deadline, at most for some seconds. Idempotent."""
        if self._channel.fileno() < 0:
            return
        self._channel.send(GiveUp())
        self._worker.end((ending or Deadline(_EXIT_WAIT_S)).within(_EXIT_WAIT_S))
        self._gone = True

    def leave(self) -> None:
        """Let the process go on for a while, for others to restore from it. Idempotent; nothing else may follow."""
        self._worker.release()
        self._gone = True

    def _note(self, packet: Packet[ControlMessage]) -> None:
        """Keep the end of a transfer, and drop the answer to a request that was interrupted."""
        match packet.message:
            case Answer(number, error) if number in self._sending:
                self._ended.append(Sent(self._sending.pop(number), error))
        packet.close_fds()

    def _wait_for(self, request: int) -> Packet[ControlMessage]:
        """Return the next part of the answer to a request; what else arrives is noted."""
        limit_s = _ANSWER_S if self._has_started else _START_S
        deadline = Deadline(0.0 if self._is_silent else limit_s)
        while True:
            self._channel.flush()
            try:
                packet = self._channel.receive()
            except EOFError:
                self._gone = True
                raise TransportError("the replica process has ended") from None
            if packet is not None:
                self._has_started = True
                if self._is_silent:  # it goes on
                    self._is_silent, deadline = False, Deadline(limit_s)
                match packet.message:
                    case Answer(number) | Held(number) | Notice(number) if number == request:
                        return packet
                self._note(packet)
                continue
            if deadline.is_over:
                self._is_silent = True
                raise TransportError(f"the replica process (pid {self.pid}) did not answer in {limit_s:g} s")
            poll = select.poll()
            poll.register(self._channel, self._channel.poll_events)
            poll.poll(deadline.poll_ms())
