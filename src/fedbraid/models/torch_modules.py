"""PyTorch modules as models, through torchax, and trained weights back into a module."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import failure
from fedbraid.local import APPLIES_MASK
from fedbraid.models.layers import as_floats, image_shape
from fedbraid.models.model import Array, Model, Normalised, PyTree, supervised
from fedbraid.models.modules import Score, scorer, targets_of
from fedbraid.models.torch_operations import environment, needed

__all__ = ["from_torch", "to_torch"]

WIDER = "Explicitly requested dtype"  # jax's warning for int64 and float64, which torchax asks for where torch has them


def from_torch(
    module: Any,
    *,
    score: str | Score = "classes",
    image: Sequence[int] | None = None,
    call: Callable[[Any, Any], Any] | None = None,
    freeze_statistics: bool = False,
) -> Model:
    """A model from a ``torch.nn.Module`` (extra ``torch``). The engine makes its convolutions fast (docs/lowering.md).

    ``params`` are the parameters with ``requires_grad``, as a dict by their names in PyTorch. Other parameters and
    buffers are constants. The weights are copied: the module starts with its own, for every seed, and is not changed.
    In training it runs in training mode, with dropout from the given key; in evaluation it runs in evaluation mode.

    Example::

        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 62))
        model = from_torch(net, image=(28, 28, 1))
        run = fb.simulate(fb.fedavg(model.loss, ...), model.init(jax.random.key(0)), data, rounds=10)
        trained = to_torch(run.params, net)

    Args:
        module: the module. It gets a whole batch ``x`` as its one argument. Its output is a tensor, or has ``logits``
            as those of Hugging Face's models.
        score: as in ``from_equinox``.
        image: (height, width, channels) of images, as in ``emnist_cnn``. ``x`` may be [B, height, width, channels],
            flat, or without a channel axis. The module gets floats [B, channels, height, width], as PyTorch's do.
            Without it, ``x`` is handed over unchanged.
        call: (module, x) -> outputs, if ``module(x)`` is not what you want, such as
            ``lambda module, x: module(input_ids=x, use_cache=False).logits``.
        freeze_statistics: keep layers with running statistics (batch normalisation) in evaluation mode in training,
            too, with the statistics that the module has. Without it, the running statistics of batch normalisation are
            leaves of ``params``, which methods with private leaves (``fedbn``) keep on the clients.
    """
    torch = needed("torch")
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"from_torch needs a torch.nn.Module, got a {type(module).__name__}")
    if call is not None and not callable(call):
        raise ValueError(f"call must be a function (module, x) -> outputs, got {call!r}")
    shape = None if image is None else image_shape(image)
    layers = _with_statistics(torch, module)
    _refuse_statistics(torch, module, layers, freeze_statistics)
    trained = {name: _array(p) for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameter with requires_grad: there is nothing to train")
    network = _Network(torch, module, call, frozen_layers=set(layers) if freeze_statistics else set())
    own = [] if freeze_statistics else layers
    statistics = [f"{layer}.{name}".lstrip(".") for layer in own for name in STATISTICS_OF_LAYER]
    trained |= {name: _array(module.get_buffer(name)) for name in statistics}
    norms = network.normalise_apart(own)

    def init(key):
        del key
        return {name: jnp.array(value) for name, value in trained.items()}

    def apply(params, x, key):
        if shape is not None:
            return network(params, as_floats(x, shape).transpose(0, 3, 1, 2), key)
        try:
            return network(params, x, key)
        except Exception as error:
            if jnp.ndim(x) != 4 or x.shape[-1] > 4:
                raise
            raise ValueError(
                f"{failure('the module', error)} (a batch has the shape {x.shape}). PyTorch puts channels before "
                f"height and width: if these are images, use from_torch(module, image={tuple(x.shape[1:])})"
            ) from error

    def train(params, x, mask, key):
        with network.lock:
            norms.mask, norms.seen = mask, {}
            try:
                outputs = apply(params, x, key)
                return outputs, {name: norms.seen.get(name) for name in params}
            finally:
                norms.mask = norms.weight = None
                norms.seen = {}

    model = supervised(
        init,
        apply,
        scorer(score),
        targets=targets_of(score),
        norm=tuple(name for name in trained if name.rpartition(".")[0] in own),
        normalised=Normalised(tuple(statistics), train) if own else None,
    )
    setattr(model.loss, APPLIES_MASK, False)  # the module sees whole batches, so engines check that padding is ignored
    return model


def to_torch(params: PyTree, module: Any) -> Any:
    """A copy of ``module`` with these weights; ``module`` itself is not changed. Its ``state_dict()`` can be saved.

    Example::

        torch.save(to_torch(run.params, module).state_dict(), "trained.pt")

    Args:
        params: parameters of ``from_torch(module)``, such as those of a finished run.
        module: the module that was given to ``from_torch``, or another one with the same parameters.
    """
    torch = needed("torch")
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"to_torch needs a torch.nn.Module, got a {type(module).__name__}")
    result = copy.deepcopy(module)
    own = {name: p for name, p in result.named_parameters() if p.requires_grad}
    own |= {name: b for name, b in result.named_buffers() if name in params and b.is_floating_point()}
    given = dict(params) if isinstance(params, Mapping) else {}
    if own.keys() != given.keys():
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise ValueError(
            f"params are not those of from_torch({type(module).__name__}): missing {missing or 'none'}, unknown "
            f"{unknown or 'none'}; the names must be those of the parameters with requires_grad"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            value = np.asarray(given[name])
            if value.shape != tuple(parameter.shape):
                raise ValueError(f"{name} has the shape {value.shape}, the module's is {tuple(parameter.shape)}")
            wide = value if value.dtype in (np.float32, np.float64) else value.astype(np.float32)  # exact for halves
            parameter.copy_(torch.from_numpy(np.array(wide)))
    return result


class _Network:
    """(params, x, key) -> outputs, as a pure function. Its module is a copy of the user's."""

    def __init__(self, torch: Any, module: Any, call: Callable | None, frozen_layers: set[str]) -> None:
        self.torch, self.env = torch, environment()
        self.module = _skeleton(torch, module)
        self.frozen_layers = [self.module.get_submodule(name) for name in frozen_layers]
        self.constants = {
            name: jnp.asarray(_array(tensor))
            for tensors in (self.module.named_parameters(), self.module.named_buffers())
            for name, tensor in tensors
            if not tensor.requires_grad
        }
        self.caller = _caller(torch, self.module, call or (lambda module, x: module(x)))
        self.norms: _Norms | None = None
        self.lock = threading.RLock()  # a call exchanges the module's tensors, so only one thread may trace at a time

    def normalise_apart(self, layers: Sequence[str]) -> _Norms:
        """Let these layers of batch normalisation leave out padding, and note their new statistics."""
        self.norms = _Norms()
        for name in layers:
            layer = self.module.get_submodule(name)
            layer.forward = partial(_batch_norm, self.torch, self.norms, layer, name)
        return self.norms

    def __call__(self, params: PyTree, x: Any, key: Array | None) -> Array:
        values = {f"module.{name}": jnp.asarray(value) for name, value in (self.constants | dict(params)).items()}
        with self.lock, warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.filterwarnings("ignore", message=WIDER)
            self.module.train(key is not None)
            for layer in self.frozen_layers:
                layer.eval()
            tensors, batch = self.env.j2t_iso((values, jnp.asarray(x)))
            with self.env.override_property(prng=jax.random.key(0) if key is None else key), self.env:
                if self.norms is not None and self.norms.mask is not None:
                    self.norms.weight = self.env.j2t_iso(self.norms.mask)
                outputs = self.torch.func.functional_call(self.caller, tensors, (batch,))
                outputs = self.env.t2j_iso(_tensor(self.torch, outputs))
                if self.norms is not None:
                    self.norms.seen = self.env.t2j_iso(self.norms.seen)
        changed = sorted(name for name, tensor in tensors.items() if tensor.jax() is not values[name])
        if changed:
            raise ValueError(
                f"{type(self.module).__name__} changes {', '.join(n.removeprefix('module.') for n in changed)} when it "
                "is called: clients cannot average such state like parameters, and it would be lost"
            )
        return outputs


class _Norms:
    """What layers of batch normalisation read and write in a call: the rows that count, and new statistics by name."""

    def __init__(self) -> None:
        self.mask: Any = None
        self.weight: Any = None
        self.seen: dict[str, Any] = {}


STATISTICS_OF_LAYER = ("running_mean", "running_var")


def _batch_norm(torch: Any, norms: _Norms, layer: Any, name: str, x: Any) -> Any:
    """The forward of batch normalisation: PyTorch's arithmetic over the rows whose mask is 1."""
    shape, axes = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
    if not layer.training:
        mean, variance = layer.running_mean, layer.running_var
    else:
        weight = norms.weight.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        count = weight.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
        mean = (x * weight).sum(axes) / count.clamp(min=1)
        variance = ((x - mean.view(shape)) ** 2 * weight).sum(axes) / count.clamp(min=1)
        share = layer.momentum * (count > 0).to(x.dtype)  # a batch of padding changes nothing
        batch = mean, variance * count / (count - 1).clamp(min=1)
        for kind, new in zip(STATISTICS_OF_LAYER, batch, strict=True):
            old = getattr(layer, kind)
            norms.seen[f"{name}.{kind}".lstrip(".")] = old + share * (new - old)
    y = (x - mean.view(shape)) / torch.sqrt(variance.view(shape) + layer.eps)
    return y if layer.weight is None else y * layer.weight.view(shape) + layer.bias.view(shape)


def _caller(torch: Any, module: Any, call: Callable) -> Any:
    """A module whose forward is ``call(module, x)``, so that PyTorch's ``functional_call`` can run it."""

    class Caller(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            return call(self.module, x)

    return Caller()


def _skeleton(torch: Any, module: Any) -> Any:
    """A copy of the module that shares its tensors, with tensors that are plain attributes as buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    result = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    for part in result.modules():
        plain = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        for name, value in plain.items():
            delattr(part, name)
            part.register_buffer(name, value.detach(), persistent=False)
    return result


def _array(tensor: Any) -> np.ndarray:
    """A copy in NumPy. NumPy has no bfloat16 of PyTorch's: it goes through float32, which is exact."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16))
    return tensor.numpy().copy()


def _tensor(torch: Any, outputs: Any) -> Any:
    """The one tensor of a module's outputs."""
    found = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    if not isinstance(found, torch.Tensor):
        raise ValueError(
            f"the module returned a {type(outputs).__name__}, not a tensor nor an object with logits: say what to "
            "take, such as call=lambda module, x: module(x)[0]"
        )
    return found


def _with_statistics(torch: Any, module: Any) -> list[str]:
    """The names of layers that normalise by running statistics, or by those of a batch."""
    kinds = torch.nn.modules.batchnorm
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, kinds._BatchNorm)
        or (isinstance(part, kinds._NormBase) and part.running_mean is not None)  # instance normalisation that tracks
    ]


def _refuse_statistics(torch: Any, module: Any, layers: list[str], freeze: bool) -> None:
    """Refuse layers whose statistics can be neither kept on the clients nor frozen."""
    if not freeze:
        parts = [(name, module.get_submodule(name)) for name in layers]
        batch = torch.nn.modules.batchnorm._BatchNorm
        odd = [n for n, p in parts if not isinstance(p, batch) or p.running_mean is None or p.momentum is None]
        if odd:
            raise ValueError(
                f"{type(module).__name__} keeps running statistics in {', '.join(odd)}, which clients cannot average "
                "like parameters; only batch normalisation with running means and a momentum can stay on the clients. "
                "Use group or layer normalisation, or freeze_statistics=True to train with the statistics of the module"
            )
        return
    without = [name for name in layers if module.get_submodule(name).running_mean is None]
    if without:
        raise ValueError(
            f"freeze_statistics: {', '.join(without)} of {type(module).__name__} has no running statistics to freeze "
            "(track_running_stats=False); use group or layer normalisation"
        )
