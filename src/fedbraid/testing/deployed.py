"""The law of deployments: over Flower's messages, with sites that have only their own data, the result is the same."""

from __future__ import annotations

from typing import Any

from flwr.app import Context

from fedbraid.core import Algorithm
from fedbraid.costs import cost
from fedbraid.data.federated import Split
from fedbraid.flower import InProcessGrid, Policy, client_app, schema_of, serve
from fedbraid.flower.wire import PLAIN, array_bytes
from fedbraid.testing.laws import DEPLOYED, LawError, agrees, draws

__all__ = ["deployed_is_simulated"]


def deployed_is_simulated(alg: Algorithm, params: Any, split: Split, simulated: Any, *, tolerance: float) -> None:
    """Two rounds with all clients, in this process, give the simulated result, with the bytes of ``cost``.

    If the algorithm draws random numbers, only the bytes are compared: a deployment has its own randomness.
    """

    def load(context: Context) -> dict[str, Any]:
        return split.client(int(context.node_config["partition-id"]))

    app = client_app(alg, params, load, cache=False, preprocess=split.preprocess)
    grid = InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(split.num_clients)})
    served = serve(
        alg,
        params,
        grid,
        rounds=2,
        population=split.num_clients,
        schema=schema_of(split.arrays),
        preprocess=split.preprocess,
        policy=Policy(deadline=60.0, join=60.0),
        say=lambda line: None,
    )
    if not draws(alg, params, split):
        what = "deployed, the algorithm gives another result than simulated"
        agrees("deployed", what, served.params, simulated.params, causes=DEPLOYED, tolerance=tolerance)
    expected = cost(alg, params, split).exchanges
    for message in grid.sent:
        plain: Any = message.content[PLAIN]
        if "exchange" in plain and array_bytes(message) != (counted := expected[plain["exchange"]].down):
            raise LawError(
                f"law 'deployed': a message has {array_bytes(message)} bytes, cost says {counted}. {DEPLOYED}"
            )
