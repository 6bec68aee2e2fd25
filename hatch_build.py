"""Builds the library of `legato.engines.llamacpp.matmul` where there is a C compiler for a processor that it is for."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = (
    "-O3",
    "-shared",
    "-fPIC",
    *(f"-m{name}" for name in ["avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"]),
)


class NativeHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles one file. Without the library llama.cpp's own functions are used, so that it fails is no error."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make the wheel one for this platform if that went well."""
        folder = Path(self.root, "src", "legato", "engines", "llamacpp")
        library = folder / "_matmul.so"
        library.unlink(missing_ok=True)
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None or platform.system() != "Linux" or platform.machine() != "x86_64":
            return
        command = [compiler, *_FLAGS, "-o", str(library), str(folder / "matmul.c")]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(library.relative_to(self.root)))
