"""transformers in process for models that see: its model over a folder, and the parts of its own preparation.

Its image processor runs on Pillow here.  Its video processor needs torchvision, so its parts are run one by one
around torch's resize, which is the one torchvision calls.
"""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from witness import torch, transformers

FILMS = [  # frames, height, width, frames per second
    (4, 64, 64, 2.0),
    (9, 70, 130, 3.0),
    (30, 20, 50, 24.0),
    (7, 100, 60, 7.5),
    (40, 48, 48, 10.0),
    (3, 33, 65, 2.0),
]
# They round byte * (1 / 255) to float32 (by at most 2^-25), subtract 0.5 (exact above 0.25, below it by at most 2^-26
# more) and divide by 0.5: 2^-24 + 2^-25 at most. Ours is rounded once: 2^-25.
ROUNDING = 2.0**-24 + 2.0**-24


def open_witness(folder, dtype="float32"):
    """transformers' model, eager, over the files of `folder`."""
    kind = transformers.Qwen3_5ForConditionalGeneration
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


@contextmanager
def one_thread():
    """Small products on one thread: several that wait for each other are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def their_run(witness, ids, types, pictures, mask=None):
    """{"tower", "merged", "positions", "deltas", "logits"} of one plain call with pictures."""
    witness.model.rope_deltas = None  # transformers keeps those of the call before
    found, towers, model = {}, [], witness.model

    def keep_inputs(_, args, named):
        found["merged"] = named["inputs_embeds"].double().numpy()
        found["positions"] = named["position_ids"].numpy()[-3:]

    arguments = {name: torch.tensor(np.asarray(value)) for name, value in pictures.items()}
    ids, types = (torch.tensor(np.asarray(one)) for one in (ids, types))
    mask = torch.ones_like(ids) if mask is None else torch.tensor(np.asarray(mask))
    with (
        one_thread(),
        model.visual.register_forward_hook(lambda *args: towers.append(args[-1].pooler_output)),
        model.language_model.register_forward_pre_hook(keep_inputs, with_kwargs=True),
    ):
        out = witness(input_ids=ids, attention_mask=mask, mm_token_type_ids=types, use_cache=False, **arguments)
    found["tower"] = torch.cat(towers).double().numpy()  # images and videos are two calls
    return found | {"logits": out.logits.double().numpy(), "deltas": model.rope_deltas.numpy()[:, 0]}


def video_module():
    """The module of transformers' video processor, which its package does not hand out without torchvision."""
    path = Path(transformers.__file__).parent / "models/qwen3_vl/video_processing_qwen3_vl.py"
    spec = importlib.util.spec_from_file_location("transformers.models.qwen3_vl.without_torchvision", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def their_video(theirs, film, fps):
    """(pixel_values_videos, grid, metadata) by the parts of transformers' video processor."""
    total, height, width = film.shape[:3]
    metadata = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=fps)
    rules = SimpleNamespace(fps=2, min_frames=4, max_frames=16)
    taken = theirs.Qwen3VLVideoProcessor.sample_frames(rules, metadata)
    metadata.frames_indices = taken.tolist()
    size = theirs.smart_resize(len(taken), height, width, 2, 32, 4096, 131_072)
    planes = torch.from_numpy(film[taken]).permute(0, 3, 1, 2)
    if size != (height, width):
        planes = torch.nn.functional.interpolate(planes, size, mode="bicubic", antialias=True)
    values = (planes.float() - 127.5) / 127.5
    patches, *grid = theirs.Qwen3VLVideoProcessor.patchify(None, values[None], 16, 2, 2)
    return patches[0].numpy(), grid, metadata
