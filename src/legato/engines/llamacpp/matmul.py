"""Products of quantised weights that read them once for up to eight rows, in the place of llama.cpp's own (`matmul.c`).

It must be imported before `llama_cpp`: both libraries have a function `llamafile_sgemm`, and the dynamic linker takes
the one that it has met first. Where the library was not built (`hatch_build.py`), or the processor or the version of
llama.cpp is another one than it was written for, nothing is loaded, and llama.cpp's own function does the work.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path

__all__ = ["bind", "count", "is_loaded"]

_LIBRARY = Path(__file__).with_name("_matmul.so")
_CPU_INFO = Path("/proc/cpuinfo")
_NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "f16c", "fma"))
_VERSIONS = ("0.3.36",)
"""Of llama-cpp-python, whose `llamafile_sgemm` was compared with ours; another could have other parameters."""


def _load() -> ctypes.CDLL | None:
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None
    if version not in _VERSIONS or not _LIBRARY.exists() or not _CPU_INFO.exists():
        return None
    flags = next((line for line in _CPU_INFO.read_text().splitlines() if line.startswith("flags")), "")
    if not _NEEDED.issubset(flags.split()):
        return None
    return ctypes.CDLL(str(_LIBRARY), mode=ctypes.RTLD_GLOBAL)


_library = _load()
is_loaded = _library is not None


def bind(folder: Path) -> None:
    """Say where llama.cpp's libraries lie, once they are loaded and before anything is computed."""
    if _library is None:
        return
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    names = ("llamafile_sgemm", "ggml_threadpool_chunk_set", "ggml_threadpool_chunk_add", "ggml_barrier")
    _library.legato_matmul_bind(*(ctypes.cast(getattr(cpu, name), ctypes.c_void_p) for name in names))


def count() -> int:
    """Return how many products were computed here in this process; 0: llama.cpp does all the work itself."""
    return 0 if _library is None else int(_library.legato_matmul_count())
