"""Weights changed in memory: found, listed, undone, copied, pickled, and handed to torch without a copy."""

import copy
import pickle

import fresh
import numpy as np
import pytest
from folders import TEXT, composite, folder, named, weights
from text_configs import CONFIGS, text_config

import qwenref
from qwenref.errors import CapabilityMissing, CheckpointError, UnknownName
from qwenref.parameter import Parameter

IDS = [3, 141, 59, 26, 5, 35]
UP, DOWN, HEAD = "layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight", "lm_head.weight"
TIED = text_config("lf", delta=(2, 6), tie_word_embeddings=True)


def opened(path, text=TEXT):
    arrays = weights(text)
    return qwenref.from_pretrained(folder(path, text, named(arrays, "model.")))


def drawn():
    return qwenref.from_config(TEXT, seed=4)


@pytest.fixture(params=["file", "seed"])
def model(request, tmp_path):
    return opened(tmp_path / "model") if request.param == "file" else drawn()


def bits(model):
    return model(IDS).logits.tobytes()


def get(model, name):
    return model.get_parameter("model." + name)


# ---------------------------------------------------------------------------------------------- edits


def test_nothing_is_listed_before_something_changes(model):
    bits(model)
    assert model.edits() == [] and model.edited() == [] and repr(model.edits()) == "no weight was changed"
    assert model.reset() == []


def test_a_written_weight_is_listed_with_how_much_and_restored(model):
    before, original = bits(model), get(model, UP)
    value = float(original[2, 3])
    original[2, 3] = value + 4  # exact in bfloat16 up to its 8 bits, so the change is taken from what was stored
    original[0, 0] = original[0, 0]
    change = float(original[2, 3]) - value
    (edit,) = model.edits()
    assert edit == ("model." + UP, "written", 1, original.size, change) and change > 3
    assert bits(model) != before
    assert "1 weight changed in memory, file unchanged" in repr(model.edits()) and "1 of 6,144" in repr(model.edits())
    assert model.reset() == ["model." + UP]
    assert bits(model) == before and get(model, UP) is original and model.edits() == []


def test_a_replaced_weight_counts_and_the_array_put_in_its_place_is_left_alone(model):
    before, original = bits(model), get(model, UP)
    mlp = model.model.layers[1].mlp
    other = Parameter(np.array(original) * 2)
    kept = other.tobytes()
    mlp.up_proj.weight = other
    assert model.edited() == ["model." + UP]
    (edit,) = model.edits()
    assert edit.kind == "replaced" and edit.elements == np.count_nonzero(np.asarray(original))
    assert edit.largest == np.abs(np.asarray(original, np.float64)).max()
    assert bits(model) != before
    assert model.reset("layers.*.mlp.up_proj.weight") == ["model." + UP]
    assert get(model, UP) is original and bits(model) == before and other.tobytes() == kept
    mlp.up_proj.weight = Parameter(np.array(original))  # the same numbers elsewhere change nothing
    assert model.edits() == []


def test_a_drawn_weight_nobody_keeps_is_drawn_again():
    model = drawn()
    before = bits(model)
    model.model.layers[1].mlp.up_proj.weight = Parameter(np.zeros((96, 64), np.float32))
    assert model.edits()[0].kind == "replaced"
    assert model.reset() == ["model." + UP] and bits(model) == before and model.edits() == []


def test_another_dtype_is_a_change_even_where_no_number_differs(model):
    before = bits(model)
    model.model.layers[1].mlp.float()
    listed = model.edits()
    assert [edit.name.split(".")[-2] for edit in listed] == ["gate_proj", "up_proj", "down_proj"]
    assert all(edit.elements == 0 and edit.largest == 0 and edit.kind == "replaced" for edit in listed)
    model.reset()
    assert get(model, UP).dtype.name == "bfloat16" and bits(model) == before


def test_nan_signs_and_shapes_are_changes(model):
    get(model, UP)[0, 0] = np.nan
    get(model, DOWN)[...] = np.where(np.arange(96) == 5, -0.0, np.asarray(get(model, DOWN)))
    model.lm_head.weight = Parameter(np.zeros((3, 64), np.float32))
    listed = {edit.name: edit for edit in model.edits()}
    assert np.isnan(listed["model." + UP].largest) and listed["model." + UP].elements == 1
    assert listed["model." + DOWN].elements == 64  # one column of all rows
    assert listed[HEAD][1:] == ("replaced", 192, 192, None)


def test_added_and_removed_weights(model):
    model.model.layers[0].mlp.up_proj.register_parameter("scale", Parameter(np.ones(3, np.float32)))
    model.model.layers[1].mlp.up_proj.weight = None
    assert [(edit.name.split(".", 1)[1], edit.kind) for edit in model.edits()] == [
        ("layers.0.mlp.up_proj.scale", "added"),
        (UP, "removed"),
    ]
    assert model.reset() == ["model." + UP] and [edit.kind for edit in model.edits()] == ["added"]


def test_reset_takes_patterns_and_refuses_by_whole(model):
    get(model, UP)[...] = 0
    get(model, DOWN)[...] = 0
    with pytest.raises(UnknownName, match="'layers.1.mlp.up' matches no weight"):
        model.reset(["layers.1.mlp.down_proj.weight", "layers.1.mlp.up"])
    assert len(model.edits()) == 2
    assert model.reset(["layers.*.mlp.down_proj.weight"]) == ["model." + DOWN]
    assert [edit.name for edit in model.edits()] == ["model." + UP]
    del model.model.layers[1]
    with pytest.raises(UnknownName, match="has no place in the model any more"):
        model.reset()


@pytest.mark.parametrize("source", ["file", "seed"])
def test_a_tied_weight_is_one_weight(tmp_path, source):
    model = opened(tmp_path / "m", TIED) if source == "file" else qwenref.from_config(TIED, seed=1)
    before, table = bits(model), model.lm_head.weight
    assert table is model.model.embed_tokens.weight
    table[7] = 0
    assert [edit.name for edit in model.edits()] == ["model.embed_tokens.weight"]
    model.reset()
    model.lm_head.weight = Parameter(np.array(table) * 2)  # untied by hand
    (edit,) = model.edits()
    assert (edit.name, edit.kind) == (HEAD, "replaced") and edit.elements == np.count_nonzero(np.asarray(table))
    model.reset()
    assert model.lm_head.weight is model.model.embed_tokens.weight and bits(model) == before


def test_a_model_without_data_says_so():
    model = qwenref.from_config(TEXT, device="meta")
    for ask in (model.edits, model.reset):
        with pytest.raises(CapabilityMissing, match="a model without data"):
            ask()
    assert model.edited() == []


# ---------------------------------------------------------------------------------------------- the file


def test_the_file_is_never_written_and_memory_is_given_back(tmp_path):
    text = text_config("lf", hidden_size=256, intermediate_size=512, delta=(2, 6))
    model = opened(tmp_path / "m", text)
    file = tmp_path / "m" / "model.safetensors"
    stored, before = file.read_bytes(), bits(model)
    for parameter in model.parameters():
        parameter[...] = 1
    assert len(model.edits()) == len(list(model.parameters())) and bits(model) != before
    tensor = model.origin.tensors["model." + UP]
    assert model.origin.suspects(tensor) == [(0, get(model, UP).nbytes)]
    model.reset()
    assert bits(model) == before and file.read_bytes() == stored
    left = sum(end - begin for begin, end in model.origin.suspects(tensor))
    assert left <= 2 * 4096 < get(model, UP).nbytes  # only the pages it shares with its neighbours


def test_a_neighbour_on_the_same_page_is_not_listed(tmp_path):
    model = opened(tmp_path / "m")
    get(model, UP)[...] = 0
    touched = [t for t in model.origin.tensors.values() if model.origin.suspects(t)]
    assert len(touched) > 1  # otherwise this tests nothing
    assert model.edited() == [edit.name for edit in model.edits()] == ["model." + UP]


def test_without_the_kernels_help_everything_is_compared(tmp_path, monkeypatch):
    model = opened(tmp_path / "m")
    before = bits(model)
    monkeypatch.setattr(type(model.origin), "suspects", lambda self, tensor: None)
    monkeypatch.setattr(type(model.origin), "release", lambda self, tensor: None)
    assert model.edits() == []
    get(model, UP)[1] = 0
    assert [edit.name for edit in model.edits()] == ["model." + UP]
    assert model.reset() == ["model." + UP] and bits(model) == before


def test_files_that_changed_underneath_are_refused(tmp_path):
    model = opened(tmp_path / "m")
    get(model, UP)[...] = 0
    folder(tmp_path / "n", TEXT, named(weights(seed=9), "model."))
    (tmp_path / "n" / "model.safetensors").replace(tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="the files have changed since the model was opened"):
        model.reset()
    assert not np.asarray(get(model, UP)).any()


# ---------------------------------------------------------------------------------------------- copies


def test_deepcopy_has_its_own_weights_and_knows_its_origin(model):
    before = bits(model)
    get(model, UP)[...] = 0
    twin = copy.deepcopy(model)
    assert [edit.name for edit in twin.edits()] == ["model." + UP]
    get(twin, DOWN)[...] = 1
    assert [edit.name for edit in model.edits()] == ["model." + UP] and len(twin.edits()) == 2
    model.reset()
    assert not np.asarray(get(twin, UP)).any()
    assert twin.reset() and bits(twin) == before == bits(model)
    assert twin.edits() == []


def test_an_opened_model_pickles_as_path_and_edits(tmp_path):
    model = opened(tmp_path / "m", text_config("lf", hidden_size=256, intermediate_size=512, vocab_size=211))
    total = sum(p.nbytes for p in model.parameters())
    plain = pickle.dumps(model)
    assert len(plain) < total / 20 and len(plain) < 40_000
    model.model.layers[0].mlp.up_proj.weight[5] = 0.5
    model.model.layers[1].mlp.up_proj.weight = Parameter(np.zeros((512, 256), np.float32))
    data = pickle.dumps(model)
    # The pages of one row, and one whole array.
    assert len(data) < len(plain) + 512 * 256 * 4 + 4 * 4096
    twin = pickle.loads(data)
    assert bits(twin) == bits(model) and [e[:3] for e in twin.edits()] == [e[:3] for e in model.edits()]
    assert twin.model.layers[0].mlp.up_proj.weight is twin.origin.original(
        twin.origin.tensors["model.layers.0.mlp.up_proj.weight"]
    )
    twin.reset()
    assert bits(twin) == bits(pickle.loads(plain)) != bits(model)
    assert len(model.edits()) == 2  # another map: nothing of it reached this one


def test_pickles_of_pickles_copies_and_drawn_models(model):
    get(model, UP)[0, :4] = 7
    for twin in (
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model)))),
        pickle.loads(pickle.dumps(copy.deepcopy(model))),
    ):
        assert bits(twin) == bits(model)
        assert [edit.name for edit in twin.edits()] == ["model." + UP]
        twin.reset()
        assert twin.edits() == []


def test_ties_and_hooks_survive_a_pickle(tmp_path):
    model = opened(tmp_path / "m", TIED)
    model.lm_head.register_forward_hook(print)
    twin = pickle.loads(pickle.dumps(model))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert list(twin.lm_head._forward_hooks.values()) == [print]
    assert twin.model.layers[0].mlp._path == "model.layers.0.mlp"


def test_a_pickle_opens_in_another_process_and_not_over_other_files(tmp_path):
    model = opened(tmp_path / "m")
    get(model, UP)[0] = 0
    (tmp_path / "p").write_bytes(pickle.dumps(model))
    code = "import pickle, sys; m = pickle.load(open(sys.argv[1], 'rb')); print(m({}).logits.tobytes().hex())"
    assert fresh.python(code.format(IDS), tmp_path / "p").stdout.strip() == bits(model).hex()
    folder(tmp_path / "m", TEXT, named(weights(text_config("lflf", hidden_size=32)), "model."))
    with pytest.raises(CheckpointError, match="not the files the model was opened from"):
        pickle.loads((tmp_path / "p").read_bytes())


# ---------------------------------------------------------------------------------------------- displays, torch


def test_the_tree_marks_what_was_edited(tmp_path):
    model = opened(tmp_path / "m")
    assert "no edits" in str(model.tree())
    get(model, UP)[0, 0] = 9
    assert "* 1 tensor edited in memory, file unchanged" in str(model.tree())
    assert "no data" in str(qwenref.from_config(TEXT, device="meta").tree())


def test_torch_gets_the_same_memory(model):
    torch = pytest.importorskip("torch", reason="hands weights to PyTorch")
    tensors = qwenref.to_torch_state_dict(model)
    assert list(tensors) == list(model.state_dict())
    for name, tensor in tensors.items():
        array = model.state_dict()[name]
        assert tensor.data_ptr() == array.__array_interface__["data"][0] and tensor.shape == array.shape
        assert str(tensor.dtype) == f"torch.{array.dtype.name}"
    tensors["model." + UP][0, 0] = 2.5
    assert float(get(model, UP)[0, 0]) == 2.5 and [edit.name for edit in model.edits()] == ["model." + UP]
    get(model, UP)[0, 1] = -3
    assert tensors["model." + UP][0, 1].item() == -3
    assert torch.equal(tensors[HEAD].float(), torch.tensor(np.asarray(model.lm_head.weight, np.float32)))
    with pytest.raises(CapabilityMissing, match="a model without data"):
        qwenref.to_torch_state_dict(qwenref.from_config(TEXT, device="meta"))


@pytest.mark.parametrize("name", ["values 3 x keys, GQA 4", "tied embedding", "attention bias"])
def test_transformers_loads_it_strictly(name):
    torch = pytest.importorskip("torch", reason="loads weights into transformers")
    transformers = pytest.importorskip("transformers", reason="loads weights into transformers")
    model = qwenref.from_config(CONFIGS[name], seed=3)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    result = other.load_state_dict(qwenref.to_torch_state_dict(model), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    with torch.inference_mode():
        theirs = other.eval()(torch.tensor([IDS])).logits.numpy()
    ours = model(IDS).logits
    # Float32 rounding of two orders of summation over a few layers, far below the spread of the logits.
    assert np.abs(theirs - ours).max() < 1e-3 * np.abs(ours).max()


def test_a_vision_tower_in_the_files_of_a_text_model_comes_along(tmp_path):
    pytest.importorskip("torch", reason="hands weights to PyTorch")
    arrays = named(weights(), "model.language_model.")
    arrays |= {
        "model.visual.patch_embed.proj.weight": np.ones((2, 3), np.float32),
        "mtp.fc.weight": np.ones(2, np.float32),
    }
    text_alone = {key: value for key, value in composite().items() if key != "vision_config"}
    model = qwenref.from_pretrained(folder(tmp_path / "m", text_alone, arrays))
    tensors = qwenref.to_torch_state_dict(model)
    assert set(arrays) - set(tensors) == {"mtp.fc.weight"} and set(tensors) <= set(arrays)
