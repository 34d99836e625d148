"""The weights of `fedbraid.models.gpt` under the names of transformers' GPT-2."""

from typing import Any


def gpt2_weights(p: Any) -> dict[str, Any]:
    """The weights by the names of transformers' GPT-2."""
    names = {"norm1": "ln_1", "qkv": "attn.c_attn", "out": "attn.c_proj", "norm2": "ln_2", "up": "mlp.c_fc"}
    names["down"] = "mlp.c_proj"
    state = {"wte.weight": p["embedding"], "wpe.weight": p["positions"]}
    for i, block in [*enumerate(p["blocks"]), (None, {"norm": p["norm"]})]:
        for name, layer in block.items():
            prefix = "ln_f" if i is None else f"h.{i}.{names[name]}"
            state |= {f"{prefix}.{'bias' if k in ('b', 'bias') else 'weight'}": v for k, v in layer.items()}
    return state
