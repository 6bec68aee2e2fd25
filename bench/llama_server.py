"""llama-server to measure beside, on the same weights: `python -m bench.llama_server --model GGUF --port 8081`.

Builds it from the very sources of llama.cpp that the installed llama-cpp-python was built from, for this processor,
into a cache folder; the first time takes about 15 minutes on 2 cores. Then it runs it, with the environment that
Legato gives its own engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import click
from platformdirs import user_cache_path

from legato.config import worker_environment

__all__ = ["cmake_options", "configure", "fetch"]

_FLAGS = {
    "GGML_SSE42": "sse4_2",
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
    "GGML_AVX512": "avx512f",
    "GGML_AVX512_VBMI": "avx512_vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}
"""What the processor can do, as /proc/cpuinfo has it. Without AMX: GCC 12 makes code of it that ends the process."""


def cmake_options() -> list[str]:
    """Return the options of a build for this processor."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    native = [f"-D{option}={'ON' if flag in has else 'OFF'}" for option, flag in _FLAGS.items()]
    off = [f"-D{option}=OFF" for option in ("GGML_NATIVE", "LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES")]
    return ["-DCMAKE_BUILD_TYPE=Release", *off, *native]


def fetch(folder: Path) -> Path:
    """Download the sources of the installed llama-cpp-python, unless they are here; return llama.cpp's."""
    name = f"llama_cpp_python-{version('llama-cpp-python')}"
    sources = folder / name / "vendor" / "llama.cpp"
    if not sources.is_dir():
        wanted = f"llama-cpp-python=={version('llama-cpp-python')}"
        pip = [sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, wanted], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return sources


def configure(sources: Path, build: Path) -> None:
    """Prepare a build."""
    command = ["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), *cmake_options()]
    subprocess.run(command, check=True, stdout=sys.stderr)


@click.command()
@click.option("--model", type=click.Path(exists=True), help="GGUF file to serve.")
@click.option("--port", default=8081, show_default=True)
@click.option("--threads", default=2, show_default=True, help="As many as Legato's engine has.")
@click.option("--slots", default=8, show_default=True, help="Streams at the same time.")
@click.option("--context", default=16384, show_default=True, help="Tokens of all streams together.")
@click.option("--configure-only", is_flag=True, help="Stop before the build.")
def main(model: str | None, port: int, threads: int, slots: int, context: int, configure_only: bool) -> None:
    """Build llama-server, unless it is built, and serve a model."""
    folder = user_cache_path("legato") / f"llama-server-{version('llama-cpp-python')}"
    folder.mkdir(parents=True, exist_ok=True)
    build = folder / "build"
    binary = build / "bin" / "llama-server"
    if configure_only or not binary.exists():
        configure(fetch(folder), build)
        if configure_only:
            return
        subprocess.run(["cmake", "--build", build, "--target", "llama-server"], check=True, stdout=sys.stderr)
    if model is None:
        raise click.UsageError("--model: which weights to serve?")
    arguments = ["--model", model, "--port", port, "--threads", threads, "--parallel", slots, "--ctx-size", context]
    os.execve(binary, [str(binary), *map(str, arguments)], worker_environment())


if __name__ == "__main__":
    main()
