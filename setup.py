"""Compiles the CPU kernels into a wheel, for the machine that MIDSTREAM_KERNELS names: x86_64 or aarch64.

Everything else about the distribution is in pyproject.toml. Without the variable a wheel is pure Python and needs no compiler
to build; the kernels are then compiled at the first start (midstream_kernels/build.py). An editable install has none either.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MACHINE = os.environ.get("MIDSTREAM_KERNELS")
KERNELS = Path("midstream_kernels")


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if MACHINE and not self.editable_mode:
            # By path: the package is not installed yet.
            spec = importlib.util.spec_from_file_location("prebuilt", Path("src") / KERNELS / "prebuilt.py")
            prebuilt = importlib.util.module_from_spec(spec)
            sys.modules["prebuilt"] = prebuilt
            spec.loader.exec_module(prebuilt)
            cross = "" if platform.machine() == MACHINE else f"{MACHINE}-linux-gnu-"
            source = Path("src") / KERNELS / "kernels" / "kernels.cpp"
            target = Path(self.build_lib) / KERNELS / "libraries"
            prebuilt.compile_all(source, target, MACHINE, os.environ.get("CXX") or f"{cross}g++")


class Wheel(bdist_wheel):
    """The kernels are plain C functions: any Python 3 loads them."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", f"linux_{MACHINE}") if MACHINE else super().get_tag()


class WithLibraries(Distribution):
    """A wheel with libraries is installed where compiled modules are."""

    def has_ext_modules(self) -> bool:
        return bool(MACHINE)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel})
