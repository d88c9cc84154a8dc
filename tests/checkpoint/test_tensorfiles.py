"""Files of tensors: what safetensors reads, what it writes, and files that are broken anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from nbdist.checkpoint import tensorfiles
from nbdist.checkpoint.tensorfiles import BrokenFile, Reader

KINDS = {
    "transposed": lambda: torch.randn(3, 4).t(),
    "0-dim": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 3),
    "bool": lambda: torch.tensor([True, False, True]),
    "bf16": lambda: torch.randn(5).bfloat16(),
    "conjugated": lambda: torch.randn(2, dtype=torch.complex64).conj(),
    "float8": lambda: torch.randn(3).to(torch.float8_e4m3fn),
    "a stride of one element": lambda: torch.randn(1, 5)[:, ::5],
    "every second": lambda: torch.arange(9)[::2],
    "expanded": lambda: torch.randn(1).expand(4),
    "int8 ü": lambda: torch.arange(3, dtype=torch.int8),
    "double": lambda: torch.randn(2, dtype=torch.float64),
    "uint16": lambda: torch.tensor([1, 2, 65535], dtype=torch.uint16),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with open(path, "wb") as file:
        tensorfiles.write(file.fileno(), tensors, {"format": "pt"})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and bytes(tensorfiles.data_of(one)) == bytes(tensorfiles.data_of(other))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), unique=True))
def test_safetensors_reads_ours_and_we_theirs(tmp_path_factory: pytest.TempPathFactory, names: list) -> None:
    tensors = {name: KINDS[name]() for name in names}
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    write(path, tensors)
    theirs, ours = safetensors.torch.load_file(path), Reader(path)
    assert set(theirs) == set(ours) == set(tensors)
    assert ours.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert same(theirs[name], tensor) and same(ours[name], tensor)
    rows = {
        name: tensor.resolve_conj().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(rows, path)
    again = Reader(path)
    assert all(same(again[name], tensor) for name, tensor in tensors.items())


def test_what_is_read_is_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.ones(3)})
    Reader(path)["a"].zero_()
    assert Reader(path)["a"].tolist() == [1, 1, 1]


def test_a_file_cut_anywhere_or_with_any_byte_of_its_header_changed_is_an_error_or_right(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"weight": torch.randn(2, 3), "bias": torch.randn(2).half()})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenFile, match=r"a\.safetensors"):
            Reader(path)
    begins = 8 + int.from_bytes(whole[:8], "little")
    for at in range(begins):
        for value in (0, 34, 49, 57, 255):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                found = Reader(path)
            except BrokenFile:
                continue
            for name in found:  # another name, or another dtype of that size: inside of the file in any case
                assert found[name].numel() <= os.path.getsize(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"a":1},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[100000000000000000000],"data_offsets":[0,4]}}',
        b"[" * 100_000,
    ],
)
def test_a_header_that_means_harm(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(BrokenFile, match=r"a\.safetensors"):
        Reader(path)


def test_a_wrong_order_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        specs = {name: tensorfiles.Spec(torch.float32, (1,)) for name in "ab"}
        writer = tensorfiles.Writer(file.fileno(), specs)
        with pytest.raises(ValueError, match=r"b .* is put where a .* is due"):
            writer.put("b", torch.ones(1))
