"""The scorers, one small file each; a new file in this folder is found and registered by itself."""

import importlib
import pkgutil

from kvsim.scorers.base import SCORERS, Scorer, register

__all__ = ["SCORERS", "Scorer", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
