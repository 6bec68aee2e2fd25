"""llama.cpp through llama-cpp-python's low-level API: the only module that imports it.

It offers a vocabulary (`Vocabulary`), a model with its KV cache (`Model`) and a batch that numpy fills (`Batch`). It
does not know Jobs, prompts, seams or processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from legato.engines.llamacpp import matmul  # isort: skip  # Its function is found first where it is loaded first.

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml as ggml
from numpy.typing import NDArray

from legato.errors import ConfigError

__all__ = ["Batch", "Model", "Vocabulary", "check_gguf", "fingerprint"]

_log: list[str] = []
_ERROR_LEVEL = 4


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR_LEVEL:
        _log.append(text.decode("utf-8", "replace").strip())
        del _log[:-20]


matmul.bind(Path(llama_cpp.__file__).parent / "lib")
llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def check_gguf(path: Path) -> None:
    """Refuse what is plainly no model before native code reads it.

    Raises:
        ConfigError: the file is missing, unreadable, or does not begin as a GGUF file does.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ConfigError(f"model file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"model file {path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ConfigError(f"model file {path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")


def fingerprint(path: Path) -> str:
    """Name what the states of sequences depend on: this file, as it is now, and the version of llama.cpp."""
    status = path.stat()
    with path.open("rb") as file:
        head = blake2b(file.read(1 << 20), digest_size=8).hexdigest()
    return f"{head} {status.st_size} {status.st_mtime_ns} {llama_cpp.__version__} {matmul.is_loaded}"


class Vocabulary:
    """A model's tokenizer and metadata; implements `types.Tokenizer`.

    Everything is read out at once, so that `pieces` and the id sets cost nothing later. `encode` may be called from
    any thread.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab = vocab = llama_cpp.llama_model_get_vocab(model)
        num = llama_cpp.llama_vocab_n_tokens(vocab)
        buffer = ctypes.create_string_buffer(1024)
        pieces = []
        control = set()
        not_text = (
            llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNUSED | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        )
        for id in range(num):
            length = llama_cpp.llama_token_to_piece(vocab, id, buffer, len(buffer), 0, True)
            pieces.append(buffer.raw[:length])
            if llama_cpp.llama_vocab_get_attr(vocab, id) & not_text:
                control.add(id)
        self.pieces: Sequence[bytes] = pieces
        self.end_ids = frozenset(id for id in range(num) if llama_cpp.llama_vocab_is_eog(vocab, id))
        self.control_ids = frozenset(control) | self.end_ids
        start = llama_cpp.llama_vocab_bos(vocab)
        self.start_id: int | None = start if start >= 0 and llama_cpp.llama_vocab_get_add_bos(vocab) else None
        self.metadata: Mapping[str, str] = dict(self._read_metadata())
        architecture = self.metadata.get("general.architecture", "")
        self.context_length = int(self.metadata.get(f"{architecture}.context_length", 0))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Load the tokenizer of a GGUF file without its weights.

        Raises:
            ConfigError: the file is missing or is no GGUF model.
        """
        check_gguf(path)
        _log.clear()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise ConfigError(f"model file {path} cannot be loaded: {_reason()}")
        return cls(model)

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        """Tokenise UTF-8 `data`; control-token text becomes control ids only if `special`. Adds no start token."""
        size = len(data) + 8
        out = np.empty(size, np.int32)
        pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        num = llama_cpp.llama_tokenize(self._vocab, data, len(data), pointer, size, False, special)
        if num < 0:
            raise ValueError(f"llama_tokenize needs {-num} places for {len(data)} bytes")
        ids: list[int] = out[:num].tolist()
        return ids

    def _read_metadata(self) -> list[tuple[str, str]]:
        size = 1 << 20
        buffer = ctypes.create_string_buffer(size)
        values = []
        for index in range(llama_cpp.llama_model_meta_count(self._model)):
            llama_cpp.llama_model_meta_key_by_index(self._model, index, buffer, size)
            key = buffer.value.decode()
            llama_cpp.llama_model_meta_val_str_by_index(self._model, index, buffer, size)
            values.append((key, buffer.value.decode("utf-8", "replace")))
        return values


class Batch:
    """One `llama_decode` call's tokens, at most `capacity`, filled through numpy views."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._num_sequences = np.ones(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._wanted = np.zeros(capacity, np.int8)
        first = self._sequences.ctypes.data
        self._sequence_pointers = (ctypes.POINTER(ctypes.c_int32) * (capacity + 1))(
            *(ctypes.cast(first + 4 * index, ctypes.POINTER(ctypes.c_int32)) for index in range(capacity))
        )
        self._native = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._num_sequences.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._sequence_pointers,
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self.num_tokens = 0
        self.num_wanted = 0

    def clear(self) -> None:
        """Empty the batch."""
        self.num_tokens = 0
        self.num_wanted = 0

    def add(self, sequence: int, position: int, ids: Sequence[int], *, num_wanted: int) -> int:
        """Append ids of a sequence from a position on; logits are wanted for the last `num_wanted`.

        Returns the index, among the rows of logits of this batch, of the first that is wanted here.
        """
        start, end = self.num_tokens, self.num_tokens + len(ids)
        self._tokens[start:end] = ids
        self._positions[start:end] = range(position, position + len(ids))
        self._sequences[start:end] = sequence
        self._wanted[start:end] = 0
        self._wanted[end - num_wanted : end] = 1
        self.num_tokens = end
        first = self.num_wanted
        self.num_wanted += num_wanted
        return first

    @property
    def native(self) -> Any:
        """The `llama_batch` struct."""
        self._native.n_tokens = self.num_tokens
        return self._native


class Model:
    """Weights, a context with a unified KV cache, and its sequences."""

    def __init__(
        self,
        path: Path,
        *,
        context_length: int,
        num_cells: int,
        max_batch: int,
        max_sequences: int,
        num_threads: int,
    ) -> None:
        """Load a model. `context_length` bounds the tokens of one sequence and is at most what the model
        was trained for (0: that); `num_cells` bounds those of all sequences together and is at least a little more
        than that.

        Raises:
            ConfigError: the file is no model that llama.cpp can load, or memory does not suffice.
        """
        check_gguf(path)
        _log.clear()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # Repacked weights round differently with the batch's shape, and GCC 12's AMX code kills the process.
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ConfigError(f"model file {path} cannot be loaded: {_reason()}")
        self.vocabulary = Vocabulary(self._model)
        trained = self.vocabulary.context_length
        self.context_length = min(context_length or trained, trained)
        num_cells = max(num_cells, self.context_length + 2 * max_sequences)
        self.num_cells = num_cells
        self._companion = max_sequences - 1
        _log.clear()
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = num_cells
        context.n_batch = max_batch
        context.n_ubatch = max_batch
        context.n_seq_max = max_sequences
        context.n_threads = num_threads
        context.n_threads_batch = num_threads
        context.kv_unified = True
        context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context.no_perf = True
        self._cpu = _CpuBackends()
        with self._cpu.catch():
            self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise ConfigError(f"no memory for a context of {num_cells} tokens with model {path}: {_reason()}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = len(self.vocabulary.pieces)

    def decode(self, batch: Batch, *, exact: bool = False) -> bool:
        """Compute the batch. False: no room among the cells, and nothing was changed.

        Args:
            batch: what to compute.
            exact: compute each row with the same bits whatever else the call holds, which is slow for prompts. Where
            that cannot be chosen, a lone token gets a companion in the last sequence, for whose logits nobody asks:
            from 2 to 7 rows they are the same all the same.

        Raises:
            RuntimeError: llama.cpp failed.
        """
        has_companion = not self._cpu.use_one_kernel(exact) and exact and batch.num_tokens == 1
        if has_companion:
            batch.add(self._companion, 0, [0], num_wanted=0)
        status = llama_cpp.llama_decode(self._context, batch.native)
        if has_companion:
            self.forget(self._companion, 0)
        if status not in (0, 1):
            raise RuntimeError(f"llama_decode returned {status}: {_reason()}")
        return bool(status == 0)

    def rows(self, num: int) -> NDArray[np.float32]:
        """Return the logits that the last batch wanted, [num, vocabulary]; valid until the next `decode`."""
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(num, self._vocab_size))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` share the tokens of `source` from position `start` to `end` (-1: to its end). Costs nothing."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def forget(self, sequence: int, start: int) -> None:
        """Take all tokens from position `start` on out of a sequence; cells that no sequence shares are free then."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def save(self, sequence: int) -> bytes:
        """Return a sequence's tokens' KV entries, bit for bit."""
        size = llama_cpp.llama_state_seq_get_size(self._context, sequence)
        buffer = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, buffer, size, sequence)
        return bytes(buffer)

    def load(self, sequence: int, data: bytes) -> int:
        """Give an empty sequence what `save` returned, in the order of positions; return its number of tokens.

        Raises:
            RuntimeError: there is no room, or the data is no such state.
        """
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if not llama_cpp.llama_state_seq_set_data(self._context, buffer, len(data), sequence):
            raise RuntimeError(f"a state of {len(data)} bytes cannot be loaded: {_reason()}")
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def clear(self) -> None:
        """Forget every sequence."""
        llama_cpp.llama_memory_clear(self._memory, False)


class _CpuBackends:
    """The CPU backends that contexts compute with, and the choice of their attention kernel.

    ggml's `set_use_ref` makes attention take one kernel whatever the number of rows and cells, and fuses no operations;
    but it wants the backend, which llama.cpp keeps to itself. So the device's `init_backend` is wrapped while a context
    is made: the sixth entry of the table that a device begins with (`ggml_backend_device_i`). Other versions of that
    table are left alone.
    """

    _API_VERSION = 2
    _INIT_BACKEND = 5
    _Init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    _SetUseRef = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)

    def __init__(self) -> None:
        self._backends: list[int] = []
        self._set_use_ref: Any = None

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Take note of the backends that are made meanwhile."""
        ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
        ggml.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
        ggml.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
        device = ctypes.c_void_p(ggml.ggml_backend_dev_by_type(0))
        registry = ctypes.c_void_p(ggml.ggml_backend_dev_backend_reg(device))
        address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_cpu_set_use_ref")
        if not address or ctypes.c_int.from_address(registry.value or 0).value != self._API_VERSION:
            yield
            return
        table = (ctypes.c_void_p * (self._INIT_BACKEND + 1)).from_address(device.value or 0)
        original = table[self._INIT_BACKEND]
        init = self._Init(original or 0)

        def init_and_note(device: int, params: int) -> int:
            backend: int = init(device, params)
            self._backends.append(backend)
            return backend

        wrapped = self._Init(init_and_note)
        table[self._INIT_BACKEND] = ctypes.cast(wrapped, ctypes.c_void_p).value
        try:
            yield
        finally:
            table[self._INIT_BACKEND] = original
        self._set_use_ref = self._SetUseRef(address)

    def use_one_kernel(self, enabled: bool) -> bool:
        """Compute with the kernels that round alike for every shape, or with the fastest. False: there is no choice."""
        for backend in self._backends:
            self._set_use_ref(backend, enabled)
        return bool(self._backends)


def _reason() -> str:
    """Return the first thing that went wrong: what follows it only says that loading failed."""
    return _log[0] if _log else "llama.cpp gave no reason"
