"""Transforms: Algorithm -> Algorithm."""

TRANSFORMS: dict = {}
"""Every transform that a configuration can name, and its factory."""

__all__: list[str] = []
