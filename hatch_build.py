"""Builds what a wheel has beside its sources: the documentation as a site, and the library of fast matrix products.

The library, `legato.engines.llamacpp.matmul`, is built where there is a C compiler for a processor that it is for.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
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
    """Builds the site and compiles one file. Legato runs without either, so a failure is no error."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both, and make the wheel one for this platform if the library was compiled."""
        self._build_site(build_data)
        self._compile(build_data)

    def _build_site(self, build_data: dict[str, Any]) -> None:
        """Build the pages, without the strictness of `just docs`."""
        site, trees = Path("src", "legato", "site"), Path("build", "doctrees")
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(trees), "docs", str(site)]
        if subprocess.run(command, check=False, capture_output=True, cwd=self.root).returncode == 0:
            build_data["artifacts"].append(f"{site}/**")

    def _compile(self, build_data: dict[str, Any]) -> None:
        """Compile the library."""
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
