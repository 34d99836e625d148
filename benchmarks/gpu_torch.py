"""A FedAvg round on a GPU in PyTorch, for the rows cnn, resnet and gpt of gpu.py: the best ways that PyTorch offers.

    python benchmarks/gpu_torch.py NETWORK WAY PRECISION      (gpu.py --against torch calls it)

- WAY graph: clients one after the other, the work of one client as a CUDA graph
- WAY vmap: torch.func.vmap over the clients; WAY compiled: the same with torch.compile
- PRECISION tf32 or bfloat16 (autocast)

It prints the milliseconds of a round (median of five).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from turns import await_turn

WIDTH, HEADS, LAYERS, LENGTH, WORDS, RATE = 256, 4, 4, 128, 2048, 0.05


def cnn() -> nn.Module:
    convolutions = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 62))


class Unit(nn.Module):
    def __init__(self, before: int, after: int, window: int, stride: int) -> None:
        super().__init__()
        self.weights = nn.Conv2d(before, after, window, stride, window // 2, bias=False)
        self.norm = nn.GroupNorm(2, after)

    def forward(self, x):
        return self.norm(self.weights(x))


class Residual(nn.Module):
    def __init__(self, before: int, stride: int) -> None:
        super().__init__()
        after = before * stride
        self.one, self.two = Unit(before, after, 3, stride), Unit(after, after, 3, 1)
        self.shortcut = Unit(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.two(F.relu(self.one(x))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, width, blocks = Unit(3, 64, 3, 1), 64, []
        for stride in (1, 1, 2, 1, 2, 1, 2, 1):
            blocks.append(Residual(width, stride))
            width *= stride
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(512, 100)

    def forward(self, x):
        return self.last(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).view(x.shape[0], LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.blocks(self.words(x) + self.places))).flatten(0, 1)


NETWORKS = {"cnn": cnn, "resnet": ResNet, "gpt": GPT}
SIZES = {"cnn": (100, 10, 20), "resnet": (20, 5, 20), "gpt": (20, 5, 8)}  # clients, steps, batch
WAYS = ("graph", "vmap", "compiled")


def examples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = SIZES[name]
    if name == "gpt":
        return tuple(torch.randint(WORDS, (*shape, LENGTH), device="cuda") for _ in range(2))
    image, classes = ((1, 28, 28), 62) if name == "cnn" else ((3, 24, 24), 100)
    return torch.randn(*shape, *image, device="cuda"), torch.randint(classes, shape, device="cuda")


def graph(name: str, narrow: bool):
    network, (x, y), (clients, steps, _) = NETWORKS[name]().cuda(), examples(name), SIZES[name]
    weights = list(network.parameters())
    start, total = [w.detach().clone() for w in weights], [torch.zeros_like(w) for w in weights]
    own_x, own_y = x[0].clone(), y[0].clone()

    def client() -> None:
        with torch.no_grad():
            torch._foreach_copy_(weights, start)
        for s in range(steps):
            with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
                loss = F.cross_entropy(network(own_x[s]), own_y[s].flatten())
            gradient = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                torch._foreach_add_(weights, gradient, alpha=-RATE)
        with torch.no_grad():
            torch._foreach_add_(total, weights)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            client()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        client()

    def one_round() -> None:
        torch._foreach_zero_(total)
        for c in range(clients):
            own_x.copy_(x[c])
            own_y.copy_(y[c])
            recorded.replay()
        torch._foreach_mul_(total, 1 / clients)
        torch._foreach_copy_(start, total)

    return one_round


def mapped(name: str, narrow: bool, compiled: bool):
    network, (x, y), (clients, steps, _) = NETWORKS[name]().cuda(), examples(name), SIZES[name]
    start = {key: value.detach() for key, value in network.named_parameters()}

    def loss(weights, x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            return F.cross_entropy(functional_call(network, weights, (x,)).float(), y.flatten())

    gradient = vmap(grad(loss))

    def step(weights, x, y):
        slopes = gradient(weights, x, y)
        return {key: value - RATE * slopes[key] for key, value in weights.items()}

    advance = torch.compile(step) if compiled else step

    def one_round():
        weights = {key: value.unsqueeze(0).repeat(clients, *[1] * value.ndim) for key, value in start.items()}
        for s in range(steps):
            weights = advance(weights, x[:, s], y[:, s])
        return {key: value.mean(0) for key, value in weights.items()}

    return one_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("precision", choices=("tf32", "bfloat16"))
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    narrow = given.precision == "bfloat16"
    one_round = graph(given.network, narrow) if given.way == "graph" else None
    one_round = one_round or mapped(given.network, narrow, given.way == "compiled")
    for _ in range(2):
        one_round()
    torch.cuda.synchronize()
    await_turn()
    times = []
    for _ in range(6):
        began = time.perf_counter()
        one_round()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    print(f"{statistics.median(times[1:]):.2f}")


if __name__ == "__main__":
    main()
