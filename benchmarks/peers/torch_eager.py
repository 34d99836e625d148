"""Local steps of the transformer and the ResNet in PyTorch's eager mode, on one thread; `eager.py` starts it.

    python torch_eager.py NETWORK FOLDER first|last

It reads the weights of FOLDER and writes loss and gradient of the first batch there. It runs a client's five steps for
each line of the standard input. ``first`` and ``last`` say where images have their channels in memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from eager import BATCH, LENGTH, RATE, WORDS, examples, serve
from gpu_torch import LAYERS, WIDTH, Block, ResNet

network, folder, channels = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)


class GPT(nn.Module):
    """The language model of the library, with its own output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.blocks(self.words(x) + self.places))).flatten(0, 1)


def dense(theirs: str, ours: str, bias: bool = True) -> dict[str, str]:
    return {f"{theirs}.weight": f"{ours}['w']"} | ({f"{theirs}.bias": f"{ours}['b']"} if bias else {})


def names() -> dict[str, str]:
    """The library's name of each parameter."""
    if network == "gpt":
        found = {"words.weight": "['embedding']", "places": "['positions']", **dense("last", "['head']", bias=False)}
        norms = {"norm": "['norm']"}
        for i in range(LAYERS):
            norms |= {f"blocks.{i}.{name}": f"['blocks'][{i}]['{name}']" for name in ("norm1", "norm2")}
            for name in ("qkv", "out", "up", "down"):
                found |= dense(f"blocks.{i}.{name}", f"['blocks'][{i}]['{name}']")
        for theirs, ours in norms.items():
            found |= {f"{theirs}.weight": f"{ours}['scale']", f"{theirs}.bias": f"{ours}['bias']"}
        return found
    found, units = dense("last", "['dense']"), {"stem": "['stem']"}
    for i, step in enumerate((1, 1, 2, 1, 2, 1, 2, 1)):
        for name in ("one", "two", *(("shortcut",) if step > 1 else ())):
            units[f"blocks.{i}.{name}"] = f"['blocks'][{i}]['{name}']"
    for theirs, ours in units.items():
        found |= {f"{theirs}.weights.weight": f"{ours}['w']"}
        found |= {f"{theirs}.norm.weight": f"{ours}['scale']", f"{theirs}.norm.bias": f"{ours}['shift']"}
    return found


def turned(name: str, array: np.ndarray, back: bool = False) -> np.ndarray:
    """An array of the library in PyTorch's order of axes, or back."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0) if back else array.transpose(3, 2, 0, 1)
    return array.T if array.ndim == 2 and name.endswith("['w']") else array


model, where = GPT() if network == "gpt" else ResNet(), names()
with np.load(folder / "weights.npz") as weights:
    given = {name: torch.from_numpy(turned(ours, weights[ours]).copy()) for name, ours in where.items()}
model.load_state_dict(given)
arrays = examples(network)
x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]).long()
if network == "gpt":
    x = x.long()
else:
    form = torch.channels_last if channels == "last" else torch.contiguous_format
    x, model = x.permute(0, 3, 1, 2).contiguous(memory_format=form), model.to(memory_format=form)
parameters = list(model.parameters())
start, total = [p.detach().clone() for p in parameters], [torch.zeros_like(p) for p in parameters]


def gradient(index):
    for p in parameters:
        p.grad = None
    value = F.cross_entropy(model(x[index]), y[index].flatten())
    value.backward()
    return value.detach(), [p.grad for p in parameters]


@torch.no_grad()
def update(arrays, others, rate: float) -> None:
    torch._foreach_add_(arrays, others, alpha=rate)


def one_round() -> None:
    with torch.no_grad():
        torch._foreach_copy_(parameters, start)
    for index in torch.randperm(len(y)).split(BATCH[network]):
        update(parameters, gradient(index)[1], -RATE)
    with torch.no_grad():
        torch._foreach_copy_(total, parameters)


loss, slopes = gradient(torch.arange(BATCH[network]))
found = {
    where[name]: turned(where[name], slope.numpy(), back=True)
    for (name, _), slope in zip(model.named_parameters(), slopes, strict=True)
}
np.savez(folder / f"torch{', channels last' if channels == 'last' else ''}.npz", loss=loss.numpy(), **found)
one_round()
serve(one_round)
