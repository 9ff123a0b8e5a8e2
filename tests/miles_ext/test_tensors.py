import numpy as np
import pytest
import torch

from miles_ext.errors import WeightError
from miles_ext.tensors import digest, dtype_name, entries, entry, from_array, to_array

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 7)])
def test_arrays_carry_every_bit(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.manual_seed(0)) * 3).to(dtype)
    array = to_array(tensor)
    assert array.flags.c_contiguous and array.shape == shape
    back = from_array(array, dtype_name(dtype))
    assert back.dtype == dtype and back.shape == tensor.shape
    assert entry(back) == entry(tensor) and torch.equal(back, tensor)


def test_bfloat16_travels_as_its_bits_nan_included():
    tensor = torch.tensor([1.0, -2.5, torch.nan, torch.inf]).bfloat16()
    array = to_array(tensor)
    assert array.dtype == np.uint16 and array[0] == 0x3F80
    assert torch.equal(from_array(array, "bfloat16").view(torch.int16), tensor.view(torch.int16))


def test_the_digest_sees_values_not_strides():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert entry(tensor.t()) == entry(tensor.t().contiguous()) != entry(tensor)
    assert entry(tensor[:, 1:]) == entry(tensor[:, 1:].clone())
    assert entry(tensor + 0.0).digest == entry(tensor).digest != entry(tensor + 1e-6).digest
    assert entry(torch.tensor([0.0])).digest != entry(torch.tensor([-0.0])).digest


def test_host_tensors_are_not_copied_and_read_only_arrays_are():
    tensor = torch.zeros(4)
    to_array(tensor)[0] = 1
    assert tensor[0] == 1
    array = to_array(torch.zeros(4))
    array.flags.writeable = False
    from_array(array, "float32")[0] = 1
    assert array[0] == 0


def test_digests_of_many():
    tensors = {"b": torch.ones(2), "a": torch.zeros(3)}
    assert digest(tensors) == digest(reversed(tensors.items())) != digest({"a": torch.ones(2), "b": torch.zeros(3)})
    assert digest({}) == "" and list(entries(tensors)) == ["b", "a"]


def test_unknown_dtypes_are_refused():
    for dtype in ("float33", "nn"):
        with pytest.raises(WeightError, match=f"dtype '{dtype}' is unknown"):
            from_array(np.zeros(2, np.float32), dtype)
