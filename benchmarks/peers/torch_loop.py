"""FedAvg by hand in PyTorch, clients one after the other; under torchrun, clients are divided among the processes.

python torch_loop.py WORKLOAD, or torchrun --nproc_per_node=2 torch_loop.py WORKLOAD
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import workloads as W

name = sys.argv[1]
spec = W.WORKLOADS[name]


class CharLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(W.VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 256, batch_first=True)
        self.last = nn.Linear(256, W.VOCABULARY)

    def forward(self, x):
        return self.last(self.lstm(self.embed(x))[0])


def mlp():
    layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, W.CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def loss(logits, y):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
torch.manual_seed(0)
data = [(torch.from_numpy(c["x"]), torch.from_numpy(c["y"]).long()) for c in W.clients(name)]
if name == "shakespeare-lstm":
    data = [(x.long(), y) for x, y in data]
cohorts = W.schedule(name, len(data))
model = CharLSTM() if name == "shakespeare-lstm" else mlp()
stamps = []
for cohort in cohorts:
    start = [p.detach().clone() for p in model.parameters()]
    total, weight = [torch.zeros_like(p) for p in start], 0
    mine = sorted(cohort, key=lambda c: -len(data[c][1]))[rank::world]  # largest first, for equal work
    for c in mine:
        with torch.no_grad():
            for p, w in zip(model.parameters(), start, strict=True):
                p.copy_(w)
        opt = torch.optim.SGD(model.parameters(), lr=W.RATE)
        x, y = data[c]
        for index in torch.randperm(len(y)).split(spec["batch"]):
            opt.zero_grad()
            loss(model(x[index]), y[index]).backward()
            opt.step()
        with torch.no_grad():
            for a, p in zip(total, model.parameters(), strict=True):
                a.add_(p, alpha=len(y))
        weight += len(y)
    if world > 1:
        flat = torch.cat([a.ravel() for a in total] + [torch.tensor([float(weight)])])
        dist.all_reduce(flat)
        weight, place = float(flat[-1]), 0
        for a in total:
            a.copy_(flat[place : place + a.numel()].view_as(a))
            place += a.numel()
    with torch.no_grad():
        for p, a in zip(model.parameters(), total, strict=True):
            p.copy_(a / weight)
    stamps.append(time.time())
if rank == 0:
    W.report(name, stamps, cohorts, [len(y) for _, y in data])
if world > 1:
    dist.destroy_process_group()
