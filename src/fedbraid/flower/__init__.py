"""Deployment: the same algorithm object on a real federation, through Flower.

Flower sends the messages, encrypts them and manages the nodes. This package runs a :class:`fedbraid.Algorithm` on it.
"""

try:
    import flwr  # noqa: F401
except ImportError as _error:
    raise ImportError("fedbraid.flower needs Flower: pip install 'fedbraid[flower]'") from _error

from fedbraid.flower.client import client_app
from fedbraid.flower.federation import Federation, federation_client_app, federation_server_app, load_federation
from fedbraid.flower.identity import fingerprint, schema_of
from fedbraid.flower.inprocess import InProcessGrid
from fedbraid.flower.policy import Policy, TooFewError
from fedbraid.flower.server import Served, serve, server_app
from fedbraid.flower.site import Round
from fedbraid.masking import Secure

__all__ = [
    "Federation",
    "InProcessGrid",
    "Policy",
    "Round",
    "Secure",
    "Served",
    "TooFewError",
    "client_app",
    "federation_client_app",
    "federation_server_app",
    "fingerprint",
    "load_federation",
    "schema_of",
    "serve",
    "server_app",
]
