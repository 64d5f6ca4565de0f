"""Blocks and headers of GGUF files, compared with the package `gguf`."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from fluxion_sglang.weights import ggml
from fluxion_sglang.weights.quantised import Quantised, pack, unpack

TYPES = [gguf.GGMLQuantizationType(kind) for kind in ggml.KINDS]
# Offsets of the float16 numbers in a block.
UNITS = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
UNITS |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def _blocks(kind: gguf.GGMLQuantizationType, outputs: int, inputs: int) -> torch.Tensor:
    """Random blocks: any bytes are valid if the float16 units are finite."""
    random = np.random.default_rng(int(kind))
    size, length = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (outputs, inputs // size, length), dtype=np.uint8)
    for at in UNITS[kind.name]:
        units = random.normal(0, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = units[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
class TestABlock:
    def test_decodes_exactly(self, kind: gguf.GGMLQuantizationType) -> None:
        blocks = _blocks(kind, 35, 512)
        want = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
        found = ggml.decode(blocks, kind)
        limit = 0 if found.minima is None else 2**-22 * float(found.minima.abs().max() + found.scales.abs().max() * 255)
        assert (found.wide() - want).abs().max() <= limit, "the same numbers, which float32 adds in another order"
        assert (ggml.KINDS[kind].inputs, ggml.KINDS[kind].bytes) == gguf.GGML_QUANT_SIZES[kind]

    def test_is_packed_without_loss_where_the_file_has_float16(self, kind: gguf.GGMLQuantizationType) -> None:
        found = ggml.decode(_blocks(kind, 32, 512), kind)
        again = unpack(pack(found), found.format, 32, 512)
        assert torch.equal(again.integers, found.integers)
        for part, was in ((again.scales, found.scales), (again.minima, found.minima)):
            if part is not None and was is not None:
                allowed = (was.abs() * 2**-11).clamp(min=2**-25) if kind.name.endswith("_K") else torch.zeros(())
                assert ((part - was).abs() <= allowed).all()

    def test_rows_decode_alone(self, kind: gguf.GGMLQuantizationType) -> None:
        blocks = _blocks(kind, 40, 256)
        whole, some = ggml.decode(blocks, kind), ggml.decode(blocks[7:19], kind)
        assert torch.equal(some.wide(), whole.wide()[7:19])


def test_a_scale_beyond_float16_is_refused() -> None:
    blocks = _blocks(gguf.GGMLQuantizationType.Q4_K, 16, 256)
    blocks.view(16, 144)[:, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    blocks.view(16, 144)[:, 4:8] = 63
    with pytest.raises(ValueError, match="not finite or above 65504"):
        pack(ggml.decode(blocks, gguf.GGMLQuantizationType.Q4_K))


def _value(kind: int, *numbers: int) -> bytes:
    """A header value; for arrays, types have 4 bytes and counts 8."""
    forms = {8: "Q", 9: "IQ" * (len(numbers) // 2)}
    if kind == 9 and numbers[:2] == (8, 1):
        forms[9] = "IQQ"
    return struct.pack(f"<I{forms.get(kind, 'I')}", kind, *numbers)


class TestAFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(3)
        writer.add_string("general.name", "größer")
        writer.add_token_list(["a", "bc", "def"])
        writer.add_token_scores([0.5, 1.5, 2.5])
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
        weight = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
        writer.add_tensor("a.weight", weight)
        writer.add_tensor("b.weight", weight.astype(np.float16))
        blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("c.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("d.weight", weight[0])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def test_has_the_header_that_was_written(self, file: Path) -> None:
        header = ggml.read_header(file)
        assert header.architecture == "llama" and header.value("block_count") == 3
        assert header.values["general.name"] == "größer" and header.values["tokenizer.ggml.tokens"] == ggml.Array(3)
        assert (
            header.values["tokenizer.ggml.scores"] == ggml.Array(3)
            and header.values["tokenizer.ggml.add_bos_token"] is True
        )

    def test_has_the_tensors_that_were_written(self, file: Path) -> None:
        header, reader = ggml.read_header(file), gguf.GGUFReader(file)
        assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            assert torch.equal(header.read(tensor.name), torch.from_numpy(np.array(tensor.data)))
        assert header.tensors["c.weight"].shape == (6, 64)
        assert isinstance(ggml.decode(header.read("c.weight"), 8), Quantised)

    def test_that_is_cut_off_is_refused(self, file: Path) -> None:
        whole = file.read_bytes()
        file.write_bytes(whole[:-300])
        with pytest.raises(ggml.GGUFError, match=r"ends before its tensor d.weight does; download it again\."):
            ggml.read_header(file).read("d.weight")
        for damaged in (whole[:100], whole[:3], b"", whole[:8] + b"\xff" * 500, whole[:24] + b"\xff" * 500):
            file.write_bytes(damaged)
            with pytest.raises(ggml.GGUFError, match=r"download it again|not a little-endian GGUF file"):
                ggml.read_header(file)

    @pytest.mark.parametrize(
        "value",
        [
            *((9, 0, count) for count in (1 << 33, 1 << 62, (1 << 63) - 1)),  # an array of bytes
            *((9, 8, 1, length) for length in (1 << 33, (1 << 63) - 1)),  # of one text
            (9, *(9, 1) * 5000, 0, 0),  # of arrays
            (8, 1 << 60),
        ],
    )
    def test_that_counts_more_than_it_has_is_refused(self, value: tuple[int, ...], file: Path) -> None:
        file.write_bytes(struct.pack("<4sIQQQ1s", b"GGUF", 3, 0, 1, 1, b"a") + _value(*value))
        with pytest.raises(ggml.GGUFError, match="damaged; download it again"):
            ggml.read_header(file)

    @pytest.mark.parametrize("value", [(4, 0), (5, -8 & 0xFFFFFFFF), (6, 0x7FC00000), (8, 0), (9, 0, 0)])
    def test_whose_alignment_is_no_number_is_refused(self, value: tuple[int, ...], file: Path) -> None:
        key = b"general.alignment"
        file.write_bytes(struct.pack("<4sIQQQ17s", b"GGUF", 3, 0, 1, len(key), key) + _value(*value))
        with pytest.raises(ggml.GGUFError, match="damaged; download it again"):
            ggml.read_header(file)

    def test_with_two_tensors_of_a_name_is_refused(self, file: Path) -> None:
        file.write_bytes(file.read_bytes().replace(b"b.weight", b"a.weight"))
        with pytest.raises(ggml.GGUFError, match="damaged; download it again"):
            ggml.read_header(file)
