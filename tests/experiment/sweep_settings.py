"""Small configurations for the tests of sweeps."""

from fedbraid.experiment import load_config

RATE = "algorithm.client_lr"

SMALL = ("rounds=6", "cohort=4", "model.name=softmax_regression", "data.clients=8", "evaluation.every=2")
SMALL += ("algorithm.name=fedavg",)

NAN = 1e38  # a learning rate whose first step overflows


def small(*settings):
    return load_config(settings=[*SMALL, *settings])
