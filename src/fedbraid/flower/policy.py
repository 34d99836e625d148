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

    deadline [seconds]: seconds that an exchange waits for its uploads.
    minimum [uploads]: number of uploads that an exchange needs.
    too_few: what happens with fewer uploads at the deadline. ``wait``: keep waiting, and ask nodes again that came
        back. ``skip``: leave the server unchanged and go to the next round. ``abort``: end with a non-zero exit code.
    patience [seconds]: seconds after which ``wait`` gives up and aborts.
    join [seconds]: seconds to wait at the start for the whole population. Then the run starts if at least ``minimum``
        nodes are connected, else it aborts.
    lost_state: what happens when a client's node no longer has its state. ``reset``: only this client starts anew from
        its first state. ``restart``: server and clients start anew from the current model. ``refuse``: the node is left
        out. ``auto``: ``restart`` if the server's state depends on the clients' states (an exchange has a
        ``reconcile``, like SCAFFOLD's), else ``reset``.
    weights: ``examples``: an upload whose weight is above the number of examples that its node stated (and above 1) is
        rejected. ``any``: for algorithms whose weights are other numbers.
    max_examples [examples]: the largest number of examples that a node may state. A node that states more is refused.
    """

    deadline: float = 600.0
    minimum: int = 1
    too_few: Literal["wait", "skip", "abort"] = "skip"
    patience: float = 3600.0
    join: float = 120.0
    lost_state: Literal["auto", "reset", "restart", "refuse"] = "auto"
    weights: Literal["examples", "any"] = "examples"
    max_examples: int = 10**9

    def check(self) -> None:
        """Refuse values that are out of range."""
        check_number("deadline", self.deadline, low=0, open_low=True)
        check_count("minimum", self.minimum)
        check_choice("too_few", self.too_few, ("wait", "skip", "abort"))
        check_number("patience", self.patience, low=0)
        check_number("join", self.join, low=0)
        check_choice("lost_state", self.lost_state, ("auto", "reset", "restart", "refuse"))
        check_choice("weights", self.weights, ("examples", "any"))
        check_count("max_examples", self.max_examples)
