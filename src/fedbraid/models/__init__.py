"""Models as pure functions: the papers' networks, and adapters for the user's own."""

from fedbraid.lowering.operations import conv2d, max_pool
from fedbraid.models.cnn import emnist_cnn
from fedbraid.models.generation import generate
from fedbraid.models.layers import dropout
from fedbraid.models.linear import least_squares, logistic, one_versus_all, softmax_regression
from fedbraid.models.low_rank import lora
from fedbraid.models.lstm import char_lstm, word_lstm
from fedbraid.models.model import Model, total
from fedbraid.models.modules import from_equinox, from_flax, from_functions, from_nnx
from fedbraid.models.perceptron import mlp
from fedbraid.models.pretrained import llama, llama_weights, smollm2
from fedbraid.models.registry import MODELS, NAMES, build, resolve
from fedbraid.models.resnet import resnet18_gn
from fedbraid.models.scoring import with_metrics
from fedbraid.models.targets import Targets, check_targets
from fedbraid.models.torch_modules import from_torch, to_torch
from fedbraid.models.transformer import encoder, gpt

__all__ = [
    "MODELS",
    "NAMES",
    "Model",
    "Targets",
    "build",
    "char_lstm",
    "check_targets",
    "conv2d",
    "dropout",
    "emnist_cnn",
    "encoder",
    "from_equinox",
    "from_flax",
    "from_functions",
    "from_nnx",
    "from_torch",
    "generate",
    "gpt",
    "least_squares",
    "llama",
    "llama_weights",
    "logistic",
    "lora",
    "max_pool",
    "mlp",
    "one_versus_all",
    "resnet18_gn",
    "resolve",
    "smollm2",
    "softmax_regression",
    "to_torch",
    "total",
    "with_metrics",
    "word_lstm",
]
