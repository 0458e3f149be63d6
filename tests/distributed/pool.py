"""A pool of ranks: processes that start once a session and run many distributed jobs.

Importing torch costs a process seconds, a job in a running one milliseconds; a matrix of layouts is only affordable
that way. So one server process imports everything once, ranks are forked from it (`CONTEXT`), and they live on. A job
is a top-level function that every rank calls with the same arguments and that joins the others through
`danlu.parallel.mesh.open_world`, exactly as under torchrun: the pool sets torchrun's variables and hosts the store that
the ranks meet at (so no port is ever guessed). Results come back in rank order.

A job that raises on one rank usually leaves its peers waiting in a collective. So does a hang. Both end the same way:
what has not answered in time is killed, the test fails with every rank's story, and the next job starts fresh ranks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

CONTEXT = mp.get_context("forkserver")
"""Starts processes that have imported the training code already."""
CONTEXT.set_forkserver_preload(["danlu.train.loop"])
GRACE_SECONDS = 10.0
"""How long the peers of a rank that failed may take to notice."""


class JobFailed(AssertionError):
    """A rank raised, died or hung; the text holds what every rank had to say."""


class RankPool:
    """Up to ``max_ranks`` processes, started when a job first needs them."""

    def __init__(self, max_ranks: int = 8) -> None:
        self.max_ranks = max_ranks
        self._ranks: list[tuple[mp.process.BaseProcess, Connection]] = []

    def run(self, num_ranks: int, job: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return ``job(*args)`` of ranks 0 to ``num_ranks - 1``.

        Raises:
            JobFailed: a rank raised, died, or did not answer within ``timeout`` seconds.
        """
        assert 0 < num_ranks <= self.max_ranks
        while len(self._ranks) < num_ranks:
            self._ranks.append(self._start())
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(num_ranks):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            self._ranks[rank][1].send_bytes(pickle.dumps((sys.path, environment, job, args)))
        answers = self._collect(num_ranks, timeout)
        failed = {rank: text for rank, (good, text) in answers.items() if not good}
        if failed:
            self.close()
            raise JobFailed("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failed.items())))
        return [answers[rank][1] for rank in range(num_ranks)]

    def _collect(self, num_ranks: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        waiting = {self._ranks[rank][1]: rank for rank in range(num_ranks)}
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = (False, f"the process died (exit code {self._ranks[rank][0].exitcode})")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return answers | dict.fromkeys(waiting.values(), (False, "no answer in time: it hangs"))

    def _start(self) -> tuple[mp.process.BaseProcess, Connection]:
        mine, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(theirs,))  # no daemon: loaders have processes of their own
        process.start()
        theirs.close()
        return process, mine

    def close(self) -> None:
        """Kill all ranks."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks.clear()


def _serve(connection: Connection) -> None:
    faulthandler.enable()
    while True:
        try:
            sys.path[:], environment, job, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer = (True, job(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        if dist.is_initialized():  # left open by a job that failed
            dist.destroy_process_group()
        connection.send_bytes(pickle.dumps(answer))
