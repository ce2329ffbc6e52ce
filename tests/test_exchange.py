"""Arrays to and from torch and NumPy by DLPack and by what callers hand over: the same memory, the same bits."""

import ml_dtypes
import numpy as np
import pytest
import torch
from text_configs import CONFIGS

import qwenref
from qwenref.exchange import as_array

IDS = np.random.default_rng(0).integers(0, 211, (2, 5))


@pytest.fixture(scope="module")
def model():
    return qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=2)


def address(array):
    return array.__array_interface__["data"][0]


# From here to others


def test_captures_are_exported_without_a_copy(model):
    with qwenref.capture(model, "**") as c:
        model(IDS)
    for name in c.names():
        for export in (torch.from_dlpack, np.from_dlpack):
            there = export(c[name])
            assert tuple(there.shape) == c[name].shape and str(there.dtype).endswith("float32"), name
            assert (there.data_ptr() if export is torch.from_dlpack else address(there)) == address(c[name]), name
    tensor = torch.from_dlpack(c["lm_head"])
    tensor[0, 0, 0] = 7
    assert c["lm_head"][0, 0, 0] == 7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_weights_are_exported_without_a_copy(dtype):
    model = qwenref.from_config(CONFIGS["GQA 6"], seed=1).to(dtype)
    weight = model.model.layers[1].self_attn.q_proj.weight
    tensor = torch.from_dlpack(weight)
    assert tensor.dtype == getattr(torch, dtype) and tensor.data_ptr() == address(weight)
    assert np.array_equal(tensor.double().numpy(), weight.astype(np.float64))
    tensor[3, 4] = 1.5
    assert weight[3, 4] == 1.5
    assert torch.from_dlpack(weight[2:5, ::2]).tolist() == weight[2:5, ::2].astype(np.float64).tolist()
    if dtype != "bfloat16":
        assert address(np.from_dlpack(weight)) == address(weight)


def test_a_tensor_outlives_the_model_it_was_taken_from():
    model = qwenref.from_config(CONFIGS["GQA 6"], seed=1)
    tensor, kept = torch.from_dlpack(model.lm_head.weight), np.array(model.lm_head.weight, np.float32)
    del model
    junk = [np.full(kept.shape, 3, ml_dtypes.bfloat16) for _ in range(20)]
    assert np.array_equal(tensor.float().numpy(), kept) and len(junk) == 20


def test_bfloat16_by_each_version_of_the_protocol(model):
    weight = model.lm_head.weight
    names = ["dltensor", "dltensor_versioned"]
    capsules = [weight.__dlpack__(), weight.__dlpack__(max_version=(1, 0))]
    assert [repr(capsule).split('"')[1] for capsule in capsules] == names
    for capsule in capsules:
        tensor = torch.from_dlpack(capsule)
        assert tensor.dtype == torch.bfloat16 and tensor.data_ptr() == address(weight)
    copied = torch.from_dlpack(weight.__dlpack__(max_version=(1, 0), copy=True))
    assert copied.data_ptr() != address(weight) and np.array_equal(as_array(copied), weight)


def test_what_cannot_be_exported_says_so(model):
    with pytest.raises(BufferError, match="^a parameter without data has nothing to export$"):
        torch.from_dlpack(qwenref.from_config(CONFIGS["GQA 6"], device="meta").lm_head.weight)
    with pytest.raises((BufferError, RuntimeError)):  # the one type NumPy has no word for
        np.from_dlpack(model.lm_head.weight)
    frozen = model.lm_head.weight.view()
    frozen.flags.writeable = False
    with pytest.raises(BufferError):
        frozen.__dlpack__()


def test_a_captured_run_reaches_torch_for_an_experiment(model):
    """What people do with it: the output of a layer again, from captured input and exported weights."""
    with qwenref.capture(model, "layers.0.mlp.hidden", "layers.0.mlp") as c:
        model(IDS)
    weight = torch.from_dlpack(model.model.layers[0].mlp.down_proj.weight).double()
    again = torch.from_dlpack(c["layers.0.mlp.hidden"]).double() @ weight.T
    # Each product is exact in float64; a float32 sum of n terms is off by n roundings of the sum of magnitudes at most.
    size = torch.from_dlpack(c["layers.0.mlp.hidden"]).double().abs() @ weight.abs().T
    bound = weight.shape[1] * 2.0**-24 * size
    assert ((torch.from_dlpack(c["layers.0.mlp"]).double() - again).abs() <= bound).all()


# From others to here


def test_ids_masks_and_positions_from_torch(model):
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    places = np.maximum(np.cumsum(mask, 1) - 1, 0)
    expected = model(IDS, attention_mask=mask, position_ids=places).logits
    for dtype in (torch.int64, torch.int32):
        ids, kept, at = (torch.tensor(a, dtype=dtype) for a in (IDS, mask, places))
        assert model(ids, attention_mask=kept, position_ids=at).logits.tobytes() == expected.tobytes()
    assert model(torch.tensor(IDS), attention_mask=torch.tensor(mask).bool()).logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_from_torch(model, dtype):
    embeds = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = model(inputs_embeds=embeds.float().numpy()).logits
    assert model(inputs_embeds=embeds).logits.tobytes() == expected.tobytes()
    assert model(inputs_embeds=embeds.requires_grad_()).logits.tobytes() == expected.tobytes()
    strided = torch.stack([embeds, embeds], dim=-1)[..., 1]
    assert model(inputs_embeds=strided).logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_with_torch(model, dtype):
    with qwenref.edit(model, {"layers.1": lambda x: (torch.from_numpy(x) * 2).to(dtype)}):
        there = model(IDS).logits
    with qwenref.edit(model, {"layers.1": lambda x: (torch.from_numpy(x) * 2).to(dtype).float().numpy()}):
        assert model(IDS).logits.tobytes() == there.tobytes()
    row = torch.arange(64, dtype=dtype)
    with qwenref.edit(model, {"layers.1.mlp": row}):
        there = model(IDS).logits
    with qwenref.edit(model, {"layers.1.mlp": np.arange(64.0)}):
        assert model(IDS).logits.tobytes() == there.tobytes()
    with qwenref.patch(model, {"layers.1": torch.ones(2, 5, 64, dtype=dtype)}, "layers.1"):
        there = model(IDS).logits
    with qwenref.patch(model, {"layers.1": np.ones((2, 5, 64), np.float32)}, "layers.1"):
        assert model(IDS).logits.tobytes() == there.tobytes()


def test_weights_from_torch(model):
    tensors = {name: tensor.clone() for name, tensor in qwenref.to_torch_state_dict(model).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    other = qwenref.from_config(CONFIGS["values 3 x keys, GQA 4"], seed=9)
    assert other(IDS).logits.tobytes() != model(IDS).logits.tobytes()
    other.load_state_dict(tensors)
    assert other(IDS).logits.tobytes() == model(IDS).logits.tobytes()
    other.lm_head.weight = qwenref.Parameter(tensors["lm_head.weight"])
    assert other.lm_head.weight.dtype == ml_dtypes.bfloat16
    assert address(other.lm_head.weight) == tensors["lm_head.weight"].data_ptr()
    assert other(IDS).logits.tobytes() == model(IDS).logits.tobytes()


def test_a_tensor_is_taken_as_it_lies():
    for tensor in (torch.arange(6.0).reshape(2, 3), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T):
        assert address(as_array(tensor)) == tensor.data_ptr() and as_array(tensor).tolist() == tensor.tolist()
    assert as_array(torch.tensor(1.5, dtype=torch.bfloat16)) == 1.5
    assert as_array(torch.zeros(0, 3, dtype=torch.bfloat16)).shape == (0, 3)
    assert as_array([1, 2]).tolist() == [1, 2] and as_array(None).dtype == object
