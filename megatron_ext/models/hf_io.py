"""HF checkpoint folders: lazy slices of safetensors in, an atomic export out.

Invariants (``tests/models/test_hf_io.py``):

1. Reading maps files into memory and copies only the slice asked for.
2. Before anything is read, the folder is compared with the configuration: fields of its own ``config.json`` that differ
   (some change what the weights compute and no shape), missing, extra and misshapen tensors are named in one error.
3. A folder written here appears whole, by rename, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_ext.models.hf_compare import differences
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.models.hf_tensors import WeightError, hf_shapes, is_next_token_module

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "chat_codec.json",
)


class SafetensorsReader:
    """Lazy reader of ``model.safetensors``, or of the shards an index names. Implements ``hf_weights.TensorReader``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise WeightError(f"{self.folder} is not a folder; model.weights names an HF folder with safetensors")
        self._open: dict[str, Any] = {}
        index = self.folder / _INDEX
        if index.is_file():
            try:
                self._file_of: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise WeightError(f"{index} is not a safetensors index ({error!r})") from None
            absent = sorted({file for file in self._file_of.values() if not (self.folder / file).is_file()})
            if absent:
                raise WeightError(f"{self.folder}: the index names files that do not exist: {', '.join(absent)}")
        elif (self.folder / _SINGLE).is_file():
            self._file_of = {name: _SINGLE for name in self._handle(_SINGLE).keys()}  # noqa: SIM118 (not a dict)
        else:
            raise WeightError(f"{self.folder} holds neither {_SINGLE} nor {_INDEX}")

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{self.folder / file} is not a readable safetensors file ({error})") from None
        return self._open[file]

    def _slice(self, name: str) -> Any:
        try:
            return self._handle(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise WeightError(f"{self.folder / self._file_of[name]}: tensor {name}: {error}") from None

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        if name not in self._file_of:
            raise WeightError(f"{self.folder}: tensor {name} is missing")
        part = self._slice(name)
        return part[start:stop] if dim == 0 else part[:, start:stop]

    def check(self, hf: HFConfig) -> None:
        """Raises ``WeightError`` naming every field of the folder's ``config.json`` that differs from ``hf``, and every
        tensor that is missing, extra or of another shape. Reads headers only. Modules that predict several tokens ahead
        are left where they are, as ``transformers`` does: they are no part of the model that is trained."""
        want = hf_shapes(hf)
        have = set(self._file_of)
        extra = {name for name in have - want.keys() if not is_next_token_module(name, hf)}
        if hf.tie_word_embeddings and _HEAD in extra and self._head_is_embedding():
            extra.remove(_HEAD)  # some tied checkpoints store the shared matrix twice
        errors, hint = [], ""
        own = self.folder / "config.json"
        if own.is_file():
            errors += [f"{line} in its config.json" for line in differences(hf, load_hf_config(own))]
            hint = f"; set model.hf_config={own.resolve()}, which is its own" if errors else ""
        errors += [f"tensor {name} is missing" for name in want if name not in have]
        errors += [f"tensor {name} is not part of this model" for name in sorted(extra)]
        for name, shape in want.items():
            if name in have and self.shape(name) != shape:
                errors.append(f"tensor {name} has shape {self.shape(name)}, the config says {shape}")
        if errors:
            shown = errors[:20] + ([f"... and {len(errors) - 20} more"] if len(errors) > 20 else [])
            raise WeightError(f"{self.folder} does not fit the HF config of the model{hint}:\n" + "\n".join(shown))

    def _head_is_embedding(self, rows: int = 8192) -> bool:
        if _EMBEDDING not in self._file_of or self.shape(_HEAD) != self.shape(_EMBEDDING):
            return False
        total = self.shape(_HEAD)[0]
        return all(
            torch.equal(self.read(_HEAD, 0, a, min(a + rows, total)), self.read(_EMBEDDING, 0, a, min(a + rows, total)))
            for a in range(0, total, rows)
        )


def save_hf(
    folder: str | Path,
    hf: HFConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = 4 << 30,
) -> Path:
    """Writes an HF folder that ``transformers`` loads: config, safetensors (sharded when large), tokenizer files, and a
    generation config when ``hf`` says which token ends a text.

    ``tensors`` is consumed lazily; on the host at most one shard is held. Raises ``FileExistsError`` when the folder
    exists, ``WeightError`` when the tensors are not those of ``hf``, ``OSError`` when the disk is full: in each case
    nothing is left behind.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        dtype = _write_weights(work, hf, tensors, max_shard_bytes)
        text = json.dumps(hf.to_dict(dtype), indent=2) + "\n"
        (work / "config.json").write_text(text, encoding="utf-8")
        if hf.eos_token_id is not None:
            ids = {name: hf.to_dict()[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            (work / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
        if tokenizer_dir is not None:
            _copy_tokenizer(Path(tokenizer_dir), work)
        for file in work.iterdir():
            _sync(file)
        _sync(work)
        work.chmod(0o755)  # mkdtemp's 0700 would keep an export private
        work.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def _write_weights(work: Path, hf: HFConfig, tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> str:
    want = hf_shapes(hf)
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes = total = 0
    dtype = "float32"

    def flush() -> None:
        nonlocal held_bytes
        save_file(held, work / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()
        held_bytes = 0

    written: set[str] = set()
    for name, tensor in tensors:
        if name not in want or name in written:
            raise WeightError(f"tensor {name} is {'written twice' if name in written else 'not part of this model'}")
        if tuple(tensor.shape) != want[name]:
            raise WeightError(f"tensor {name} has shape {tuple(tensor.shape)}, the config says {want[name]}")
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > max_bytes:
            flush()
        # A copy of its own: safetensors refuses tensors that share memory, and the source may be a live parameter.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held_bytes += size
        total += size
        dtype = str(tensor.dtype).removeprefix("torch.")
        written.add(name)
    missing = [name for name in want if name not in written]
    if missing:
        raise WeightError(f"{len(missing)} tensors were not given, the first is {missing[0]}")
    flush()
    if len(shards) == 1:
        (work / "shard-0").rename(work / _SINGLE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (work / f"shard-{number}").rename(work / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtype


def _copy_tokenizer(source: Path, target: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{source} holds no tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
