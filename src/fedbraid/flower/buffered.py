"""Asynchronous steps by messages: a buffer of uploads instead of a barrier.

The server keeps ``cohort`` clients busy. Each works on the model that it was sent, and answers when it is done. As soon
as the buffer is full, the server takes a step with the uploads in it, in the order in which they came, with the weights
of :class:`fedbraid.simulation.Asynchrony`. A client is asked again after the step that took its upload in; a client
that failed, or that did not answer within the policy's deadline, after the next step.

The uploads of a step, and the models that they started from, are recorded. A simulation that repeats this order
(``asynchrony.order``) computes the same steps. A restarted server forgets the work that was under way: its clients are
asked again with the current model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fedbraid import address
from fedbraid.flower.aggregate import Upload
from fedbraid.flower.asking import LOOK, POLL, Asked
from fedbraid.flower.policy import TooFewError
from fedbraid.flower.site import Round
from fedbraid.simulation.asynchrony import Asynchrony, stale_lift

if TYPE_CHECKING:
    from fedbraid.flower.rounds import MessageRounds

__all__ = ["Buffer"]

PyTree = Any


class _Version(NamedTuple):
    """A model that clients work on: the request that sent it, and its message."""

    asked: Asked
    down: PyTree


class Buffer:
    """The buffer of a deployed run: which clients work on which model, and which uploads wait for the next step."""

    run: MessageRounds
    how: Asynchrony
    size: int
    asked: int
    draws: int
    tally: Counter[str]
    notes: list[str]

    def __init__(self, run: MessageRounds, how: Asynchrony) -> None:
        self.run, self.how, self.size = run, how, how.uploads(run.cohort)
        self.versions: dict[int, _Version] = {}
        self.arrived: list[tuple[int, int]] = []  # (client, version), in order of arrival
        self.away: set[int] = set()  # clients that work, wait in the buffer, or were lost since the last step
        self.asked = self.draws = 0  # clients asked, and draws of clients, since the last step
        self.tally, self.notes = Counter(), []
        self.weighted: bool = run.alg.exchanges[0].reducer.kind == "sum"
        self.lift: Callable[..., PyTree] = jax.jit(partial(stale_lift, how))

    # -- work under way

    @property
    def working(self) -> int:
        """The number of clients at work."""
        return sum(len(version.asked.awaited) for version in self.versions.values())

    def current(self) -> _Version:
        """The newest model, as clients are sent it."""
        run = self.run
        if run.done not in self.versions:
            asked = run.order(0, run.done)._replace(tally=self.tally, notes=self.notes)
            self.versions[run.done] = _Version(asked, run.parts[0].send(run.server))
            run.requests.open[asked.tag] = asked
        return self.versions[run.done]

    def start(self) -> None:
        """Send the newest model to free clients, until ``cohort`` clients work."""
        run = self.run
        free = sorted(client for client in run.roster.clients if client not in self.away)
        number = min(run.cohort - self.working, len(free))
        if number <= 0:
            return
        which = address.cohort(run.seed, run.done, self.draws, len(free), number)
        chosen = [free[i] for i in which]
        run.requests.ask(self.current().asked, chosen)
        self.away |= set(chosen)
        self.asked += len(chosen)
        self.draws += 1

    def hear(self) -> int:
        """Take replies in; returns their number."""
        heard = self.run.requests.listen(None)
        known = set(self.arrived)
        for number, version in sorted(self.versions.items()):
            self.arrived += [(client, number) for client in version.asked.uploads if (client, number) not in known]
        return heard

    def give_up(self) -> None:
        """Forget work that takes longer than the policy's deadline, and that of nodes that are gone."""
        now, run = time.monotonic(), self.run
        for version in self.versions.values():
            for client, (node, since) in list(version.asked.awaited.items()):
                here = run.roster.clients.get(client)
                late = now - since > run.policy.deadline
                if not late and here is not None and here.id == node:
                    continue
                why = f"no reply in {run.policy.deadline:g} s" if late else "its node is gone"
                self.notes.append(f"client {client} (node {node}) left out, missing: {why}")
                self.tally["missing"] += 1
                if late:
                    run.roster.missed(node)
                del version.asked.awaited[client]

    def fill(self) -> bool:
        """Wait until the buffer is full, or until nothing more can come. True if there are enough uploads."""
        run, policy = self.run, self.run.policy
        began = time.monotonic()
        look, pause = began + LOOK, POLL[0]
        while True:
            self.start()
            heard = self.hear()
            self.give_up()
            if len(self.arrived) >= self.size:
                return True
            now = time.monotonic()
            if now >= look:
                run.roster.greet()
                look = now + LOOK
            idle = not self.working and not any(client not in self.away for client in run.roster.clients)
            enough = len(self.arrived) >= policy.minimum
            if idle and (enough or run.roster.lost or policy.too_few != "wait"):
                return enough
            if idle and now - began > policy.patience:
                raise TooFewError(self.shortage(f"{policy.patience:g} s, the policy's patience"))
            pause = POLL[0] if heard else min(2 * pause, POLL[1])
            time.sleep(max(0.0, min(pause, look - time.monotonic())))

    def shortage(self, within: str) -> str:
        return self.run.requests.shortage(self.current().asked, within)

    def forget(self) -> None:
        """Forget all work that is under way, because server and clients start anew."""
        self.versions, self.arrived, self.away = {}, [], set()
        self.run.requests.open.clear()

    # -- steps

    def advance(self) -> None:
        """Complete one server step."""
        began, run, late = time.monotonic(), self.run, self.run.counts["late"]
        if run.recover_between():
            self.forget()
        run.roster.greet()
        row: dict[str, float] = run.begin_row()
        current = self.current()
        enough = self.fill()
        if not enough and run.policy.too_few == "abort" and not run.roster.lost:
            raise TooFewError(self.shortage(f"{run.policy.deadline:g} s, the policy's deadline"))
        taken = self.arrived[: self.size] if enough else []
        part, means = run.parts[0], {}
        step = part.step(run.server, self.stale(taken, current.down), run.done, run.seed)
        for client in step.unfit:
            taken = [one for one in taken if one[0] != client]
            self.tally["nonfinite"] += 1
            self.notes.append(f"client {client} left out, nonfinite: with its upload the server's state is not finite")
        if taken:
            run.server, means = step.server, step.metrics
        run.taken |= {client: self.versions[version].asked.tag for client, version in taken}
        gaps = [run.done - version for _, version in taken]
        size = run.messages[0].down.nbytes
        columns = means | {"arrived": len(taken)}
        columns |= run.requests.account(current.asked, began, self.asked, size, len(taken))
        row |= {f"{part.name}/{name}": value for name, value in columns.items()}
        seconds = time.monotonic() - began
        row |= {"staleness": sum(gaps) / len(gaps) if gaps else 0.0, "late": run.counts["late"] - late}
        row |= {"skipped": float(not taken), "seconds": seconds}
        run.arrivals.append(
            {
                "clients": [client for client, _ in taken],
                "versions": [version for _, version in taken],
                "asked": self.asked,
                "seconds": seconds + (run.arrivals[-1]["seconds"] if run.arrivals else 0.0),
            }
        )
        notes = tuple(self.notes)
        self.close_step(enough)
        run.history.append(row)
        run.done += 1
        run.told = Round(run.done, run.rounds, row, {}, seconds, notes)

    def stale(self, taken: list[tuple[int, int]], current: PyTree) -> dict[int, Upload]:
        """The uploads as they are added: with their staleness weights, by client."""
        out = {}
        for client, version in taken:
            asked, sent = self.versions[version]
            upload = asked.uploads[client]
            weight = float(self.how.weights(self.run.done - version))
            total = upload.weight if self.weighted else 1.0
            out[client] = upload._replace(lifted=self.lift(upload.lifted, total, weight, current, sent))
        return out

    def close_step(self, enough: bool) -> None:
        """Free the clients whose uploads were taken in, and the models that nobody works on."""
        for client, version in self.arrived[: self.size] if enough else self.arrived:
            del self.versions[version].asked.uploads[client]
        self.arrived = self.arrived[self.size :] if enough else []
        self.away = {client for client, _ in self.arrived}
        for version in self.versions.values():
            self.away |= set(version.asked.awaited)
        for number, version in list(self.versions.items()):
            if not version.asked.awaited and not version.asked.uploads:
                del self.versions[number], self.run.requests.open[version.asked.tag]
        self.tally.clear()
        self.notes.clear()
        self.asked = self.draws = 0
