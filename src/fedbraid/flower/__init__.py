"""Deployment: the same algorithm object on a real federation, through Flower.

Flower carries the messages, encrypts them and knows the nodes; this package runs an :class:`fedbraid.Algorithm` on it.
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("fedbraid.flower needs Flower: pip install 'fedbraid[flower]'") from error

from fedbraid.flower.client import client_app
from fedbraid.flower.identity import fingerprint, schema_of
from fedbraid.flower.inprocess import InProcessGrid
from fedbraid.flower.plan import Plan, load_plan, plan_server_app
from fedbraid.flower.policy import Policy, TooFewError
from fedbraid.flower.rounds import Round
from fedbraid.flower.server import Served, serve, server_app

__all__ = [
    "InProcessGrid",
    "Plan",
    "Policy",
    "Round",
    "Served",
    "TooFewError",
    "client_app",
    "fingerprint",
    "load_plan",
    "plan_server_app",
    "schema_of",
    "serve",
    "server_app",
]
