"""The admissions, one small file each; a new file in this folder is found and registered by itself."""

import importlib
import pkgutil

from kvsim.admissions.base import ADMISSIONS, Admit, register

__all__ = ["ADMISSIONS", "Admit", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
