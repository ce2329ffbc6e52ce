"""transformers in process: the same weights in its own code, float32, eager attention, no optional kernels."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the witness needs PyTorch (extra 'test')")
transformers = pytest.importorskip("transformers", reason="the witness needs transformers (extra 'test')")


def open_witness(model, folder, dtype="float32"):
    """transformers' model over the weights of `model`, written to `folder`."""
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def logits(witness, ids, mask=None):
    """[B, T, V] of one plain call."""
    mask = None if mask is None else torch.tensor(np.asarray(mask))
    return witness(torch.tensor(np.asarray(ids)), attention_mask=mask, use_cache=False).logits.double().numpy()


@torch.inference_mode()
def logits_in_calls(witness, ids, lengths):
    """[B, T, V] from calls of the given lengths on one cache."""
    ids, cache, rows, at = torch.tensor(np.asarray(ids)), None, [], 0
    for n in lengths:
        out = witness(ids[:, at : at + n], cache=cache, use_cache=True)
        cache, at = out.cache, at + n
        rows.append(out.logits)
    return torch.cat(rows, 1).double().numpy()
