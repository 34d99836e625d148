"""What a deployed run does when nodes are slow, gone or wrong."""

from __future__ import annotations

from typing import Literal, NamedTuple

from flwr.app.exception import AppExitException

from fedbraid.core import check_choice, check_count, check_number

__all__ = ["Policy", "TooFewError"]


class TooFewError(AppExitException):
    """Too few nodes: the run ends with a non-zero exit code."""

    exit_code = 200  # Flower's "precondition of the strategy unmet"


class Policy(NamedTuple):
    """What a round does when nodes are slow, gone or wrong.

    deadline: seconds that an exchange waits for its uploads.
    minimum: uploads that an exchange needs.
    too_few: what happens with fewer at the deadline. ``wait``: go on waiting, and ask nodes that came back again;
        ``skip``: leave the server as it is and go to the next round; ``abort``: end with a non-zero exit code.
    patience: seconds after which ``wait`` gives up and aborts.
    join: seconds to wait at the start for the whole population; then the run starts with ``minimum`` nodes or aborts.
    lost_state: what happens to a client whose node comes without the state that it should have. ``reset``: it alone
        starts anew from its first state; ``restart``: server and clients start anew from the current model;
        ``refuse``: its node is left out; ``auto``: ``restart`` if the server must agree with the clients' states (an
        exchange reconciles them, as SCAFFOLD's does), else ``reset``.
    """

    deadline: float = 600.0
    minimum: int = 1
    too_few: Literal["wait", "skip", "abort"] = "skip"
    patience: float = 3600.0
    join: float = 120.0
    lost_state: Literal["auto", "reset", "restart", "refuse"] = "auto"

    def check(self) -> None:
        check_number("deadline", self.deadline, low=0, open_low=True)
        check_count("minimum", self.minimum)
        check_choice("too_few", self.too_few, ("wait", "skip", "abort"))
        check_number("patience", self.patience, low=0)
        check_number("join", self.join, low=0)
        check_choice("lost_state", self.lost_state, ("auto", "reset", "restart", "refuse"))
