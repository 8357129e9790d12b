"""Tensors of a checkpoint through torch.distributed.checkpoint, as safetensors.

Each rank writes the shards that it has; reading fills the tensors that the caller has in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from grpo_fast.errors import require
from grpo_fast.train.ranks import distributed

FILE_BYTES = 1 << 30  # of a file: its bytes are put together in memory before they are written


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a new folder. Collective: every rank gives its shards."""
    files, size = {}, 0
    for name, tensor in tensors.items():  # the writer counts files from 1
        files[name] = size // FILE_BYTES + 1
        size += tensor.numel() * tensor.element_size()
    writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    with _plain_errors():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=distributed.size() == 1)


def stored_names(folder: Path) -> list[str]:
    return sorted(_metadata(folder))


def read_tensors(folder: Path, into: Mapping[str, Tensor], prefix: str = "") -> None:
    """Fill tensors with the stored ones of the same names. Collective.

    Raises ValueError for a name that is missing, one beginning with `prefix` that is not asked for,
    another shape or dtype.
    """
    with distributed.together():
        stored = _metadata(folder)
        _check_names(into.keys(), [name for name in stored if name.startswith(prefix)])
        for name, tensor in into.items():
            ours, theirs = tensor, stored[name]
            expected = f"{ours.dtype} {tuple(ours.shape)}"
            came = f"{theirs.properties.dtype} {tuple(theirs.size)}"
            require(expected == came, f"the tensor {name}", expected, came)
            fits = _is_whole(theirs.chunks, tuple(theirs.size))
            require(fits, f"the tensor {name}", "all of its rows once", "other chunks")
    with _plain_errors():
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(into), storage_reader=reader, no_dist=distributed.size() == 1)


def owned_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"shard-{distributed.rank() + 1:05d}-*"))


def _metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    return dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata  # type: ignore[return-value]


def _check_names(asked: Collection[str], stored: Collection[str]) -> None:
    missing, extra = set(asked) - set(stored), set(stored) - set(asked)
    for names, what in ((missing, "is missing"), (extra, "has no place here")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"the tensor {min(names)}{more} {what}")


def _is_whole(chunks: Sequence[ChunkStorageMetadata], shape: tuple[int, ...]) -> bool:
    """Whether the chunks are the rows of the tensor, one behind the other."""
    if not shape:
        return len(chunks) == 1
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.offsets[0], chunk.sizes[0])):
        if not chunk.sizes[0]:  # of a rank that has none of so few rows
            continue
        is_next = chunk.offsets[0] == end and tuple(chunk.sizes[1:]) == shape[1:]
        if not is_next or any(chunk.offsets[1:]):
            return False
        end += chunk.sizes[0]
    return end == shape[0] or not all(shape)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of the first rank that failed, and not torch's own BaseException."""
    try:
        with warnings.catch_warnings():  # that one process is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        number, (cause, _) = min(error.failures.items())
        at = f"rank {number}: " if distributed.size() > 1 else ""
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{at}{cause.strerror or cause}", cause.filename) from error
        raise ValueError(f"{at}{cause}") from error
