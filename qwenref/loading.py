"""From files to a tree whose every parameter is found exactly once, and back to files."""

import difflib
import os
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from qwenref import _C
from qwenref.checks import is_whole
from qwenref.errors import CheckpointError, ConfigError, DTypeError, InputError, compose
from qwenref.pages import WeightPages
from qwenref.parameter import Parameter
from qwenref.state import dtype_name
from qwenref.weights import Drawn, Stored

# Savers put these components before the parts below, in any number and order:
# model.language_model.layers.0 · model.layers.0 · language_model.model.layers.0 · language_model.language_model.…
_PREFIXES = ("model", "language_model")
_TEXT_PARTS = ("embed_tokens", "layers", "norm")
_SKIPPED_PARTS = {"visual": "vision tower", "mtp": "next-token head"}
_USABLE = ("F32", "BF16", "F16")
_DRAWN = ("float32", "bfloat16", "float16")
_INDEX = "model.safetensors.index.json"


def split_name(name):
    """(prefix, rest) of a tensor's name, the prefix being whatever a saver put before the parts of the model."""
    parts = name.split(".")
    n = 0
    while n < len(parts) - 1 and parts[n] in _PREFIXES:
        n += 1
    return ".".join(parts[:n]), ".".join(parts[n:])


class LoadReport:
    """What opening a checkpoint saw.

    `.path` · `.files` shard names · `.nbytes` on disk · `.dtypes` {dtype: tensors} · `.prefixes` {prefix: tensors} ·
    `.tied` and `.tied_by` · `.leftovers` {part: {name: shape}} present but not part of this tree · `.without` parts the
    config describes and the files lack, so that the tree is opened without them ·
    `.defaults` config keys that were absent · `.unknown` config keys nobody knows.
    """

    def __init__(self, **facts):
        self.__dict__.update(facts)

    def __repr__(self):
        dtypes = ", ".join(f"{count:,} {name}" for name, count in self.dtypes.items())
        prefixes = ", ".join(
            f"{count:,} {name}.*" if name else f"{count:,} bare" for name, count in self.prefixes.items()
        )
        lines = [
            f"LoadReport · {self.path} · {self.tensors:,} parameters, each found once",
            f"  files     {len(self.files)} · {self.nbytes:,} bytes of tensors",
            f"  dtypes    {dtypes}",
            f"  prefixes  {prefixes}",
            f"  tied      {'yes' if self.tied else 'no'} ({self.tied_by})",
        ]
        for part, names in self.leftovers.items():
            lines.append(f"  not used  {len(names):,} tensors of the {_SKIPPED_PARTS[part]} ({part}.*)")
        for part in self.without:
            lines.append(f"  without   {_SKIPPED_PARTS[part]}: the config describes one, no file has a tensor of it")
        if self.defaults:
            lines.append(f"  defaults  {_listed(self.defaults)}")
        if self.unknown:
            lines.append(f"  unknown   config keys {_listed(self.unknown)}")
        return "\n".join(lines)


def _listed(names, limit=5):
    names = list(names)
    more = f", … {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_config(path):
    """Config of a folder or of a config.json file."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            compose(f"{file}: no such file", expected="a folder with config.json and *.safetensors")
        ) from None
    except OSError as error:
        raise ConfigError(compose(f"{file}: {error.strerror}")) from None
    return _C.Config.from_json(text, str(file))


def as_config(config):
    """Config from a Config, a dict, a folder, or the path of a config.json."""
    if isinstance(config, _C.Config):
        return config
    if isinstance(config, dict):
        import json

        return _C.Config.from_json(json.dumps(config), "config")
    if isinstance(config, (str, os.PathLike)):
        from qwenref.hub import resolve

        path = Path(config)
        return read_config(path if path.is_file() else resolve(config))
    raise ConfigError(
        compose(f"config: {type(config).__name__}", expected="a Config, a dict, or the path of a folder or config.json")
    )


def build(config, dtype="bfloat16"):
    """The tree for a config, without data: every parameter has its shape and dtype and takes no memory."""
    from qwenref.model import ForCausalLM, ForConditionalGeneration

    return (ForConditionalGeneration if config.composite else ForCausalLM)(config, dtype).name_tree()


def from_pretrained(name, *, revision=None, local_files_only=False, numerics="fp32"):
    """Open a checkpoint: "tiny", a folder, or a hub name.  Maps the files and reads no weight.

    Raises ConfigError or CheckpointError with one complete list of what does not fit.
    """
    from qwenref.hub import resolve

    path = Path(resolve(name, revision=revision, local_files_only=local_files_only))
    config = read_config(path)
    model, checkpoint = build(config), _C.Checkpoint(path)
    without = _leave_out_tower(model, checkpoint)
    model.path = path
    model.numerics = numerics
    model.report = assign(model, checkpoint, path, without)
    return model


def from_config(config, *, seed=None, device=None, dtype=None, numerics="fp32"):
    """A model of a config's shape: with `seed`, random weights that depend on nothing else; without, no data at all.

    `device="meta"` says the latter; `dtype` is that of the parameters, bfloat16 unless given.
    """
    if device not in (None, "meta", "cpu") or (device == "meta" and seed is not None):
        raise InputError(compose(f"from_config: device {device!r}, seed {seed!r}", expected='device="meta" or a seed'))
    if seed is not None and not (is_whole(seed) and 0 <= seed < 2**64):
        raise InputError(compose(f"from_config: seed {seed!r}", expected="an integer from 0 to 2**64 - 1"))
    name = dtype_name(dtype or "bfloat16")
    if name not in _DRAWN:
        raise InputError(compose(f"from_config: dtype {dtype!r}", expected=", ".join(_DRAWN)))
    config = as_config(config)
    model = build(config, name)
    model.numerics = numerics
    if config.tie_word_embeddings:
        model.tie_weights()
    if seed is not None or device == "cpu":
        draw(model, 0 if seed is None else seed)
    return model


def _leave_out_tower(model, checkpoint):
    """("visual",) if the files hold the text model alone: savers of text models keep the whole config."""
    if not _sees(model) or any(split_name(name)[1].startswith("visual.") for name in checkpoint):
        return ()
    del model.model.visual
    return ("visual",)


def _sees(model):
    return getattr(model.model, "visual", None) is not None


def assign(model, checkpoint, path, without=()):
    """Give every parameter of `model` its tensor; the report, or one error with everything that does not fit."""
    stored = {name: checkpoint.info(name) for name in checkpoint}
    faults = {}
    found, prefixes, leftovers = _sort_out(stored, faults, _sees(model))
    tied, tied_by = _tying(model.config, checkpoint, found, faults)
    if tied:
        model.tie_weights()
        found.pop("lm_head.weight", None)
    fits = _match(model, stored, found, faults)
    _raise_if_any(faults, path, checkpoint)
    model.origin = Stored(path, checkpoint, fits)
    for name, source in fits.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.origin.parameter(source))
    if tied:
        model.tie_weights()
        fits["lm_head.weight"] = next(s for n, s in fits.items() if n.endswith("embed_tokens.weight"))
    model.text_model.weight_pages = _pages(model, checkpoint, fits)
    return LoadReport(
        path=str(path),
        files=tuple(checkpoint.files),
        nbytes=checkpoint.nbytes,
        tensors=len(fits) - tied,
        dtypes=dict(Counter(parameter.dtype.name for parameter in model.parameters())),
        prefixes=dict(prefixes),
        tied=tied,
        tied_by=tied_by,
        leftovers=leftovers,
        without=without,
        defaults=tuple(model.config.defaults),
        unknown=tuple(model.config.unknown),
    )


def _pages(model, checkpoint, tensors):
    """`WeightPages` of the text model; `tensors` {parameter: its name in the files}."""
    stack = next(name for name, module in model.named_modules() if module is model.text_model)
    layers, behind, before = [[] for _ in model.text_model.layers], [], []
    for name, tensor in tensors.items():
        if name.startswith(f"{stack}.layers."):
            layers[int(name[len(f"{stack}.layers.") :].split(".", 1)[0])].append(tensor)
        elif name.startswith(f"{stack}.embed_tokens."):
            before.append(tensor)
        elif name.startswith((f"{stack}.norm.", "lm_head.")):
            behind.append(tensor)
    return WeightPages(checkpoint, layers, behind, before)


def _sort_out(stored, faults, sees):
    """(found, prefixes, leftovers) of what a checkpoint stores, by names without their prefix."""
    parts = (*_TEXT_PARTS, "lm_head", *(("visual",) if sees else ()))
    found, prefixes, leftovers = {}, Counter(), {}
    first, doubled, strangers = {}, [], []
    for name, info in stored.items():
        prefix, rest = split_name(name)
        part = rest.split(".", 1)[0]
        if rest in first:
            doubled.append(f"{info.file}: {name}, and {stored[first[rest]].file}: {first[rest]}")
            continue
        first[rest] = name
        if part in parts:
            prefixes[prefix] += 1
            found[rest] = name
        elif part in _SKIPPED_PARTS:
            leftovers.setdefault(part, {})[name] = info.shape
        else:
            strangers.append(f"{info.file}: {name}: {info.dtype} {list(info.shape)}")
    faults |= {"found twice": doubled, "not part of this model": strangers}
    return found, prefixes, leftovers


def _tying(config, checkpoint, found, faults):
    """(tied, why).  Contradictions between the two flags and the file are faults; two flags that differ yield to it."""
    flags = {"config": config.get("tie_word_embeddings")}
    if config.composite:
        flags["text_config"] = config["text_config"].get("tie_word_embeddings")
    said = " and ".join(f"{where} says {str(flag).lower()}" for where, flag in flags.items() if flag is not None)
    said = said or "no flag, class default false"
    has_head = "lm_head.weight" in found
    if config.tie_conflict:
        return not has_head, f"{said}: lm_head.weight is {'present' if has_head else 'absent'}"
    tied = config.tie_word_embeddings
    if tied and has_head and "embed_tokens.weight" in found:
        head, table = found["lm_head.weight"], found["embed_tokens.weight"]
        if not _equal(checkpoint, head, table):
            faults["tied but different"] = [f"{checkpoint.info(head).file}: {head} is not {table}; {said}"]
    elif not tied and not has_head:
        faults["untied but absent"] = [f"lm_head.weight; {said}"]
        tied = True  # so that the head is not listed as missing a second time
    return tied, said


def _equal(checkpoint, a, b, step=1 << 24):
    """Whether two tensors are the same bytes, looked at in pieces: a head may be larger than what memory is left."""
    if checkpoint.info(a)[:2] != checkpoint.info(b)[:2]:
        return False
    try:
        a, b = (checkpoint[name].reshape(-1).view(np.uint8) for name in (a, b))
    except DTypeError:  # no array type: the head is reported for its dtype
        return True
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, len(a), step))


def _match(model, stored, found, faults):
    """{parameter: stored name} of every parameter; what is missing, ill-fitting or over goes to `faults`."""
    parameters = dict(model.named_parameters())
    wanted = {split_name(name)[1] for name in parameters}
    spare = {}  # by layer, since the near name of a parameter is in its own layer
    for rest in found:
        if rest not in wanted:
            spare.setdefault(_layer(rest), []).append(rest)
    fits, missing, shapes, dtypes = {}, [], [], []
    for name, parameter in parameters.items():
        rest, expected = split_name(name)[1], list(parameter.shape)
        if rest not in found:
            near = difflib.get_close_matches(rest, spare.get(_layer(rest), ()), n=1)
            there = f" (there is {found[near[0]]})" if near else ""
            missing.append(f"{name}: expected {expected}{there}")
            continue
        fits[name] = found[rest]
        info = stored[found[rest]]
        if info.shape != parameter.shape:
            turned = " (the layout of a converted file)" if sorted(info.shape) == sorted(expected) else ""
            shapes.append(f"{info.file}: {found[rest]}: found {list(info.shape)}, expected {expected}{turned}")
        if info.dtype not in _USABLE:
            dtypes.append(f"{info.file}: {found[rest]}: found {info.dtype}, expected {', '.join(_USABLE)}")
    left = [found[rest] for group in spare.values() for rest in group]
    faults |= {
        "missing": missing,
        "of another shape": shapes,
        "of a dtype no weight has": dtypes,
        "left over": [f"{stored[n].file}: {n}: {stored[n].dtype} {list(stored[n].shape)}" for n in left],
    }
    return fits


def _layer(rest):
    """What a name shares with all others of its layer: "layers.3", "visual.blocks.3"."""
    layer = re.match(r"(layers|visual\.blocks)\.[^.]*", rest)
    return layer[0] if layer else "visual" if rest.startswith("visual.") else ""


def _raise_if_any(faults, path, checkpoint):
    """One CheckpointError for all faults: counts first, at most five names of each, everything in `.faults`."""
    faults = {kind: names for kind, names in faults.items() if names}
    if not faults:
        return
    counts = ", ".join(f"{len(names):,} {kind}" for kind, names in faults.items())
    lines = [f"{path}: the weights do not fit the model: {counts}"]
    for kind, names in faults.items():
        lines.append(f"    {kind}")
        lines += [f"        {name}" for name in names[:5]]
        if len(names) > 5:
            lines.append(f"        … {len(names) - 5:,} more")
    by = f"{_INDEX}: " if (Path(path) / _INDEX).exists() else ""
    lines.append(f"    files    {by}{_listed(checkpoint.files)}")
    error = CheckpointError("\n".join(lines))
    error.faults = faults
    raise error


# ---- random weights --------------------------------------------------------------------------------------------


def draw(model, seed):
    """Fill every parameter from a counter-based generator keyed by seed and name: the same in any order and shape.

    Scales keep signals alive through the stack: decays between 0.001 and 0.8 per token, logits of deviation about 3.
    """
    made = {name: Parameter(drawn(name, p.shape, p.dtype, seed)) for name, p in model.named_parameters()}
    for name, parameter in made.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    model.origin = Drawn.of(model, seed)


def drawn(name, shape, dtype, seed):
    """The numbers of one parameter."""
    key = np.array([seed, zlib.crc32(split_name(name)[1].encode())], np.uint64)
    return _draw_one(name, shape, np.random.Generator(np.random.Philox(key=key))).astype(dtype)


def _draw_one(name, shape, random):
    def normal(deviation, mean=0.0):
        values = random.standard_normal(shape, np.float32)
        values *= np.float32(deviation)
        return values + np.float32(mean) if mean else values

    if name.endswith("A_log"):
        return np.log(random.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        rate = np.exp(random.uniform(np.log(1e-3), np.log(5e-2), shape))
        return (rate + np.log(-np.expm1(-rate))).astype(np.float32)
    if name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight")):
        return normal(0.2, 1.0)
    if name.endswith("norm.weight"):
        return normal(0.2)
    if name.endswith("conv1d.weight"):
        return normal(0.5)
    if name.endswith("embed_tokens.weight"):
        return normal(1.0)
    if name.endswith("pos_embed.weight"):
        return normal(0.5)
    if name.endswith("patch_embed.proj.weight"):
        return normal(1 / np.sqrt(np.prod(shape[1:])))
    if name.endswith("bias"):
        return normal(0.02)
    return normal((3 if name.startswith("lm_head") else 1) / np.sqrt(shape[-1]))


# ---- saving ------------------------------------------------------------------------------------------------------


def save(model, path):
    """config.json and model.safetensors of `model` in the folder `path`; a tied head is not written twice.

    What opening left over, a vision tower or next-token head, is copied from the files the model was opened from.
    """
    path = Path(path)
    if model.device == "meta":
        raise CheckpointError(compose(f"{path}: a model without data cannot be saved", do="draw weights with a seed"))
    if (path / _INDEX).exists():
        raise CheckpointError(
            compose(f"{path}: holds another checkpoint", found=_INDEX, do="save to another folder, or remove that one")
        )
    tensors = {name: np.asarray(parameter) for name, parameter in model.named_parameters()}
    tensors |= left_over(model)
    path.mkdir(parents=True, exist_ok=True)
    _C.save_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
    (path / "config.json").write_text(model.config.to_json() + "\n", encoding="utf-8")


def left_over(model):
    """{usual name: array} of the tensors that the tree has no place for."""
    if model.report is None or not model.report.leftovers:
        return {}
    checkpoint = _C.Checkpoint(model.report.path)
    usual = {"visual": "model.", "mtp": ""}
    return {
        usual[part] + split_name(name)[1]: checkpoint[name]
        for part, names in model.report.leftovers.items()
        for name in names
    }
