"""The policy heads, one small file each; a new file in this folder is found and registered by itself."""

import importlib
import pkgutil

from kvsim.head import HEADS, Head, Preset, Rule, register

__all__ = ["HEADS", "Head", "Preset", "Rule", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
