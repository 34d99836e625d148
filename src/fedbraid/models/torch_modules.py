"""PyTorch modules as models, through torchax, and trained weights back into a module."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.local import APPLIES_MASK
from fedbraid.models.layers import as_floats, image_shape
from fedbraid.models.model import Array, Model, PyTree, supervised
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
            too, with the statistics that the module has. Without it, such modules are refused.
    """
    torch = needed("torch")
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"from_torch needs a torch.nn.Module, got a {type(module).__name__}")
    if call is not None and not callable(call):
        raise ValueError(f"call must be a function (module, x) -> outputs, got {call!r}")
    shape = None if image is None else image_shape(image)
    layers = _with_statistics(torch, module)
    _refuse_statistics(module, layers, freeze_statistics)
    trained = {name: _array(p) for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameter with requires_grad: there is nothing to train")
    network = _Network(torch, module, call, frozen_layers=set(layers))

    def init(key):
        del key
        return {name: jnp.array(value) for name, value in trained.items()}

    def apply(params, x, key):
        if shape is not None:
            x = as_floats(x, shape).transpose(0, 3, 1, 2)
        return network(params, x, key)

    model = supervised(init, apply, scorer(score), targets=targets_of(score))
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
        self.lock = threading.RLock()  # a call exchanges the module's tensors, so only one thread may trace at a time

    def __call__(self, params: PyTree, x: Any, key: Array | None) -> Array:
        values = {f"module.{name}": jnp.asarray(value) for name, value in (self.constants | dict(params)).items()}
        with self.lock, warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.filterwarnings("ignore", message=WIDER)
            self.module.train(key is not None)
            for layer in self.frozen_layers:
                layer.eval()
            tensors, batch = self.env.j2t_iso((values, jnp.asarray(x)))
            with self.env.override_property(prng=jax.random.key(0) if key is None else key), self.env:
                outputs = self.torch.func.functional_call(self.caller, tensors, (batch,))
                outputs = self.env.t2j_iso(_tensor(self.torch, outputs))
        changed = sorted(name for name, tensor in tensors.items() if tensor.jax() is not values[name])
        if changed:
            raise ValueError(
                f"{type(self.module).__name__} changes {', '.join(n.removeprefix('module.') for n in changed)} when it "
                "is called: clients cannot average such state like parameters, and it would be lost"
            )
        return outputs


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


def _refuse_statistics(module: Any, layers: list[str], freeze: bool) -> None:
    if not layers:
        return
    if not freeze:
        raise ValueError(
            f"{type(module).__name__} keeps running statistics in {', '.join(layers)}, which clients cannot average "
            "like parameters; use group or layer normalisation, or freeze_statistics=True to train with the statistics "
            "that the module has"
        )
    without = [name for name in layers if module.get_submodule(name).running_mean is None]
    if without:
        raise ValueError(
            f"freeze_statistics: {', '.join(without)} of {type(module).__name__} has no running statistics to freeze "
            "(track_running_stats=False); use group or layer normalisation"
        )
