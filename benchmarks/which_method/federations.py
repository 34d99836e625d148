"""The two federations of this page that no catalog has, as factories for `data.name` in a configuration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedbraid.data import catalog
from fedbraid.data.federated import FederatedData, Split

CLIENTS = 20


def groups(seed: int = 0) -> FederatedData:
    """Digits, identically distributed on all clients, but half of the clients name each digit d the digit 9 - d."""
    data = catalog.load("digits", partition="iid", clients=CLIENTS, seed=seed)

    def renamed(split: Split) -> Split:
        y = np.array(split.arrays["y"])
        odd = np.repeat(np.arange(split.num_clients) % 2 == 1, split.sizes)
        return replace(split, arrays={**split.arrays, "y": np.where(odd, 9 - y, y).astype(y.dtype)})

    return replace(data, train=renamed(data.train), test=renamed(data.test), name="digits, two groups")
