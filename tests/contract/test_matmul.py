"""Products of quantised weights: what `matmul.c` computes, beside the numbers that the blocks stand for."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from legato.catalog.pull import find_model
from legato.config import Settings
from legato.engines.llamacpp import matmul
from legato.engines.llamacpp.binding import Batch, Model
from tests.conftest import SMALL

pytestmark = pytest.mark.skipif(not matmul.is_loaded, reason="the library is for processors with AVX-512 VNNI")

Array = NDArray[Any]
TYPES = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K")]
NUM_COLS = 21
NUM_ROWS = 70


class Params(ctypes.Structure):
    """ggml's compute params of one thread of one."""

    _fields_ = (
        ("ith", ctypes.c_int),
        ("nth", ctypes.c_int),
        ("wsize", ctypes.c_size_t),
        ("wdata", ctypes.c_void_p),
        ("threadpool", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, once more, with a pool of one thread, and an original that refuses everything."""
    path = tmp_path_factory.mktemp("native") / "matmul.so"
    shutil.copy(Path(matmul.__file__).with_name("_matmul.so"), path)
    native: Any = ctypes.CDLL(str(path))
    chunk = [0]

    def set_chunk(_: int, value: int) -> None:
        chunk[0] = value

    def add_chunk(_: int, value: int) -> int:
        chunk[0] += value
        return chunk[0] - value

    native.functions = (
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_chunk),
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(add_chunk),
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None),
    )
    native.legato_matmul_bind(None, *native.functions)
    native.llamafile_sgemm.restype = ctypes.c_bool
    return native


def blocks(type: gguf.GGMLQuantizationType, rows: int, width: int, rng: np.random.Generator) -> Array:
    """Random weights of any bits, with scales that are no NaN."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[type]
    data = rng.integers(0, 256, (rows, width // size, num_bytes), np.uint8)
    scale = rng.uniform(-2, 2, (rows, width // size, 2)).astype(np.float16).view(np.uint8)
    place = slice(-2, None) if type.name == "Q6_K" else slice(0, 2)
    data[:, :, place] = scale[:, :, :2]
    if type.name == "Q4_K":
        data[:, :, 2:4] = scale[:, :, 2:]
    return data.reshape(rows, -1)


def activations(
    type: gguf.GGMLQuantizationType, cols: int, width: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Blocks as ggml quantises activations for such weights, and the numbers that they stand for."""
    is_large = type.name.endswith("K")
    size = 256 if is_large else 32
    q = rng.integers(-127, 128, (cols, width // size, size), np.int8)
    d = rng.uniform(0.1, 1, (cols, width // size, 1)).astype(np.float32 if is_large else np.float16)
    parts = [d.view(np.uint8), q.view(np.uint8)]
    if is_large:
        parts.append(q.reshape(cols, -1, 16, 16).sum(-1, dtype=np.int16).view(np.uint8))
    data = np.concatenate(parts, axis=-1).reshape(cols, -1)
    return data, (q * d.astype(np.float64)).reshape(cols, width)


@pytest.fixture
def product(library: Any) -> Callable[[gguf.GGMLQuantizationType, Array, Array, int], Array | None]:
    def run(type: gguf.GGMLQuantizationType, a: Array, b: Array, num_blocks: int) -> Array | None:
        out = np.full((len(b), len(a)), np.nan, np.float32)
        other = gguf.GGMLQuantizationType.Q8_K if type.name.endswith("K") else gguf.GGMLQuantizationType.Q8_0
        wide = [ctypes.c_int64(value) for value in (len(a), len(b), num_blocks)]
        at = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, out)]
        strides = [ctypes.c_int64(value) for value in (num_blocks, num_blocks, len(a))]
        params = ctypes.byref(Params(0, 1))
        places = [value for pair in zip(at, strides, strict=True) for value in pair]
        is_done = library.llamafile_sgemm(params, *wide, *places, int(type), int(other), 0)
        return out if is_done else None

    return run


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_a_product_is_that_of_the_numbers_and_the_same_in_every_shape(type: Any, product: Any) -> None:
    rng = np.random.default_rng(7)
    width = 1536
    a = blocks(type, NUM_ROWS, width, rng)
    b, numbers = activations(type, NUM_COLS, width, rng)
    num_blocks = width // gguf.GGML_QUANT_SIZES[type][0]
    whole = product(type, a, b, num_blocks)
    weights = gguf.quants.dequantize(a, type).astype(np.float64)
    right = numbers @ weights.T
    size = np.abs(numbers) @ np.abs(weights).T
    assert np.max(np.abs(whole - right) / size) < 1e-6
    for first, end in ((0, 1), (3, 5), (1, 4), (4, 8), (2, 7), (5, 11), (7, 14), (8, 16), (0, 20)):
        assert np.array_equal(product(type, a, b[first:end].copy(), num_blocks), whole[first:end])
    for num in (1, 2, 15, 17, 64):
        assert np.array_equal(product(type, a[:num].copy(), b, num_blocks), whole[:, :num])


def test_a_model_is_decoded_with_it() -> None:
    model = Model(
        find_model(SMALL, Settings().data_dir),
        context_length=64,
        num_cells=0,
        max_batch=8,
        max_sequences=2,
        num_threads=2,
    )
    batch = Batch(8)
    batch.add(0, 0, [1], num_wanted=1)
    before = matmul.count()
    assert model.decode(batch)
    assert matmul.count() > before


def test_what_it_does_not_do_is_passed_on(product: Any) -> None:
    rng = np.random.default_rng(7)
    for type, width in ((gguf.GGMLQuantizationType.Q5_1, 64), (gguf.GGMLQuantizationType.Q5_0, 96)):
        num_blocks = width // 32
        b, _ = activations(type, 2, width, rng)
        assert product(type, blocks(type, 4, width, rng), b, num_blocks) is None
