"""Networks written with PyTorch, to be trained by fedbraid: in Python with `from_torch`, or by name in a configuration.

    [model]
    name = "torch_networks:cnn"    # this folder must be on PYTHONPATH

- cnn: the CNN of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
  with two 5x5 convolutions. PFLlib calls this architecture FedAvgCNN. 582,026 parameters for 28x28 grey images and 10
  classes.
- emnist_cnn and char_lstm: the architectures of `fedbraid.models`, so that both can be compared.
- gpt2 and llama: small networks of Hugging Face's transformers with random weights.
"""

from __future__ import annotations

import torch
from torch import nn

from fedbraid.models import Model, from_torch


class CNN(nn.Sequential):
    """Convolution 5x5, ReLU and max pool, twice; then a dense layer of 512."""

    def __init__(self, classes: int = 10, size: int = 28, channels: int = 1) -> None:
        side = ((size - 4) // 2 - 4) // 2
        super().__init__(
            nn.Conv2d(channels, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * side * side, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )


class EmnistCNN(nn.Sequential):
    """The network of Reddi et al., "Adaptive Federated Optimization", 2021: `fedbraid.models.emnist_cnn`."""

    def __init__(self, classes: int = 62) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(12 * 12 * 64, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )


class CharLSTM(nn.Module):
    """Predicts the next character at every position: `fedbraid.models.char_lstm`."""

    def __init__(self, vocab: int = 90, hidden: int = 256, embed: int = 8, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed)
        self.lstm = nn.LSTM(embed, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.dense(states)


def gpt2_module(vocab: int = 90, width: int = 128, layers: int = 4) -> nn.Module:
    """A small GPT-2 of transformers, with random weights and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": vocab, "n_positions": 128, "n_embd": width, "n_layer": layers, "n_head": 4}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=1, use_cache=False))


def llama_module(vocab: int = 90, width: int = 128, layers: int = 4) -> nn.Module:
    """A small Llama of transformers, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=1, use_cache=False))


# Functions that a configuration can name. Each seed of a run starts with the same weights: those drawn here.


def cnn(num_classes: int = 10, *, size: int = 28, channels: int = 1, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return from_torch(CNN(num_classes, size, channels), image=(size, size, channels))


def emnist_cnn(num_classes: int = 62, *, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return from_torch(EmnistCNN(num_classes), image=(28, 28, 1))


def char_lstm(num_classes: int = 90, *, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return from_torch(CharLSTM(num_classes), score="tokens")


def gpt2(num_classes: int = 90, *, width: int = 128, layers: int = 4, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return from_torch(gpt2_module(num_classes, width, layers), score="tokens")


def llama(num_classes: int = 90, *, width: int = 128, layers: int = 4, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return from_torch(llama_module(num_classes, width, layers), score="tokens")
