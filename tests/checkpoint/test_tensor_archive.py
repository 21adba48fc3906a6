"""What is written without `torch.save` is what `torch.save` writes."""

import io

import pytest
import torch

from megatron_fsdp.checkpoint.tensor_archive import TensorArchives

NUMBERS = torch.arange(100.0)
TENSORS = {
    "scalar": torch.tensor(3.0),
    "whole": NUMBERS,
    "view of a flat buffer": NUMBERS[10:22].view(3, 4),
    "columns": NUMBERS.view(10, 10)[:, 2:4],
    "transposed": NUMBERS[:12].view(3, 4).t(),
    "without elements": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "bfloat16": torch.full((3,), torch.nan, dtype=torch.bfloat16),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_archive_has_the_bytes_that_torch_save_writes(name: str) -> None:
    tensor, archives = TENSORS[name], TensorArchives()
    expected = io.BytesIO()
    torch.save(tensor.detach().contiguous().clone(), expected)
    for _ in range(2):  # the second time with the description of the first
        stream = io.BytesIO()
        archives.write(tensor, stream)
        assert stream.getvalue() == expected.getvalue()


def test_what_is_no_plain_tensor_is_left_to_torch() -> None:
    sparse, stream = torch.eye(3).to_sparse(), io.BytesIO()
    TensorArchives().write(sparse, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=True).to_dense(), torch.eye(3))
