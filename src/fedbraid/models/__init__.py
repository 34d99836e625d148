"""Models as pure functions: the papers' networks, and doors for the user's own."""

from fedbraid.models.cnn import emnist_cnn
from fedbraid.models.layers import conv2d, dropout, max_pool
from fedbraid.models.linear import softmax_regression
from fedbraid.models.mlp import mlp
from fedbraid.models.model import Model, from_functions, total
from fedbraid.models.registry import MODELS, build, resolve

__all__ = [
    "MODELS",
    "Model",
    "build",
    "conv2d",
    "dropout",
    "emnist_cnn",
    "from_functions",
    "max_pool",
    "mlp",
    "resolve",
    "softmax_regression",
    "total",
]
