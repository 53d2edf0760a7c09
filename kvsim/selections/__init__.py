"""The selections, one small file each; a new file in this folder is found and registered by itself."""

import importlib
import pkgutil

from kvsim.selections.base import SELECTIONS, Select, register

__all__ = ["SELECTIONS", "Select", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
