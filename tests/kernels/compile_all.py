"""Compile every kernel for an H200 where there is no GPU: run the kernels' tests, and compile what they would launch.

    python tests/kernels/compile_all.py

What Triton's interpreter runs need not compile. The tests themselves fail here, because nothing is launched; for each
kernel a list of [types, what went wrong or null] goes to standard output as JSON. Of launches that have the same
arguments None, the first is compiled.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# A GPU would be asked to run on what no kernel has written; options of pytest are for those who call this.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.pop("KVSIM_SERIAL_LAUNCHES", None)
os.environ.pop("PYTEST_ADDOPTS", None)
os.environ.pop("PYTEST_PLUGINS", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import torch
import triton
from kvsim_kernels import launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
ROOT = Path(__file__).parents[2]

NUMBERS = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
ALIGNED = [["tt.divisibility", 16]]

compiled: dict[str, dict[tuple[Any, tuple[str, ...]], str | None]] = {}


def described(kernel: Any, given: dict[str, Any]) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Give the signature, constants and attributes that Triton specialises a launch on."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given.get(parameter.name, parameter.default)
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{NUMBERS[value.dtype]}"
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = ALIGNED
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(index,)] = ALIGNED
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{NUMBERS[value.base.dtype]}{list(value.block_shape)}>"
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Take the place of a launch."""
    names = [parameter.name for parameter in kernel.params]
    given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
    for value in given.values():
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
            # Sizes of arrays depend on what kernels count; where nothing was written, there is the tests' poison.
            value[value.abs() > 2**16] = 1
    signature, constants, attributes = described(kernel, given)
    kinds = tuple("None" if constants.get((i,), 0) is None else kind for i, kind in enumerate(signature.values()))
    known = compiled.setdefault(f"{kernel.module.removeprefix('kvsim_kernels.')}.{kernel.__name__}", {})
    form = tuple(kind == "None" for kind in kinds)
    if any(form == other for other, _ in known):
        return
    try:
        triton.compile(ASTSource(kernel, signature, constants, attributes), target=TARGET, options=options)
        known[form, kinds] = None
    except Exception as error:
        known[form, kinds] = f"{type(error).__name__}: {error}"


def main() -> int:
    """Run the tests without their output."""
    # Before the tests' conftest asks for the interpreter.
    for file in sorted((ROOT / "kernels" / "kvsim_kernels").glob("*/kernel.py")):
        importlib.import_module(f"kvsim_kernels.{file.parent.name}.kernel")
    JITFunction.run = compile_instead
    launch._can_launch_early = lambda device: True
    launch.multiprocessors = lambda device: 132
    files = sorted(str(file) for file in (ROOT / "tests" / "kernels").glob("*/test_*.py"))
    files.append(str(ROOT / "tests" / "kvsim" / "test_gpu_engine.py"))
    stdout = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    ended = pytest.main([*files, *options, "-o", "addopts=--import-mode=importlib"])
    os.dup2(stdout, 1)
    found = {name: [[kinds, error] for (_, kinds), error in own.items()] for name, own in sorted(compiled.items())}
    print(json.dumps(found))
    # Tests that fail are as it should be; tests that pytest could not run are not.
    return 0 if ended in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 1


if __name__ == "__main__":
    sys.exit(main())
