"""What one wants to know of a checkpoint before running it: the facts as a dict, and the same facts as text.

Reads headers and small files only, no weight.
"""

import fnmatch
from collections import Counter
from pathlib import Path

from qwenref import _C
from qwenref.errors import InputError, QwenrefError, compose
from qwenref.processing import settings
from qwenref.sizes import cache_size, memory, mixers, parameters
from qwenref.tree import MIXER_NAMES

CONTEXTS = (4096, 32768)  # tokens whose cache is sized unless others are asked for

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def overview(model, name=None, contexts=None):
    """The facts of an opened model, made of JSON types."""
    text = model.config.text_config
    counts, report = parameters(model), model.report
    contexts = [n for n in CONTEXTS if n <= text.max_position_embeddings] if contexts is None else list(contexts)
    sizes = [cache_size(model, tokens) for tokens in contexts]
    fixed = cache_size(model, 0)
    return {
        "model": name or str(model.path),
        "path": str(model.path),
        "class": type(model).__name__,
        "model_type": model.config.get("model_type"),
        "parameters": {
            "total": counts.total + (counts.visual if "visual" in report.leftovers else 0),
            "text": counts.text,
            "vision": counts.visual,
            "mtp": counts.mtp,
            "embedding": counts.embed,
            "lm_head": counts.lm_head,
            "mixers": counts.mixers,
            "mlp": counts.mlp,
            "norms": counts.norms,
        },
        "files": {"names": list(report.files), "nbytes": report.nbytes, "dtypes": report.dtypes},
        "tied_embeddings": report.tied,
        "not_loaded": {part: len(names) for part, names in report.leftovers.items()},
        "unknown_config_keys": list(report.unknown),
        "layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "mixers": dict(mixers(model)),
        "layer_types": list(text.layer_types),
        "cache": {
            "kv_dtype": fixed.kv_dtype,
            "state_dtype": fixed.state_dtype,
            "fixed": fixed.fixed,
            "recurrent": fixed.recurrent,
            "conv": fixed.conv,
            "kv_per_token": fixed.kv_per_token,
            "contexts": [{"tokens": size.tokens, "kv": size.kv, "total": size.total} for size in sizes],
        },
        "vision": _vision(model.config),
        "processor": _processor(model),
        "mtp_blocks": text.get("mtp_num_hidden_layers") or 0,
        "tokenizer": _tokenizer(model),
    }


def _vision(config):
    vision = config.get("vision_config")
    keys = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "num_position_embeddings")
    keys += ("patch_size", "temporal_patch_size", "spatial_merge_size")
    return None if not isinstance(vision, dict) else {key: vision.get(key) for key in keys}


def _processor(model):
    """How pictures are prepared, {"image": ..., "video": ...}; None for a model without a tower.  Files that are not
    there or not understood are a fact too, since pixels can be handed in ready made."""
    if getattr(model.model, "visual", None) is None:
        return None
    facts = {}
    for kind in ("image", "video"):
        try:
            rules = settings.read(model.path, kind, model.config.vision_config)
            facts[kind] = rules._replace(where=Path(rules.where).name)._asdict() | {"error": None}
        except QwenrefError as error:
            line = str(error).splitlines()[0].replace(f"{model.path}/", "")
            facts[kind] = {"error": line.removeprefix(f"{model.path}: ")}
    return facts


def _tokenizer(model):
    """Facts of the tokenizer; one that cannot be opened is a fact too, since the model itself can be used by ids."""
    if not (Path(model.path) / "tokenizer.json").is_file():
        return {"present": False, "chat_template": False, "stop": [], "error": None}
    try:
        tokenizer = model.tokenizer
        return {
            "present": True,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.has_chat_template,
            "stop": [{"id": id, "token": tokenizer.token_text(id)} for id in tokenizer.stop.ids],
            "stop_sources": {name: ids and list(ids) for name, ids in tokenizer.stop.sources.items()},
            "stop_sources_agree": tokenizer.stop.agree,
            "error": None,
        }
    except QwenrefError as error:
        return {"present": True, "chat_template": False, "stop": [], "error": str(error).splitlines()[0]}


def overview_text(facts, width=100):
    """The facts in at most 15 lines: the answer first, how to go on last.

    On a narrow terminal columns are left out from the right; no line is wrapped.
    """
    counts, cache, files = facts["parameters"], facts["cache"], facts["files"]
    part = "text tensor" if "visual" in facts["not_loaded"] else "tensor"
    mtp = f" + {counts['mtp']:,} MTP" if counts["mtp"] else ""
    vision = f" · vision {counts['vision']:,}" if counts["vision"] else ""
    lines = [
        (67, f"{_family(facts)} · {facts['class']} · {facts['model']}", f"ok: every {part} assigned once"),
        (
            50,
            f"parameters  {counts['total']:,}{mtp}",
            f"on disk {disk(files['nbytes'])} {_dtypes(files['dtypes'])}",
            f"tied embeddings: {'yes' if facts['tied_embeddings'] else 'no'}",
        ),
        (0, f"  text {counts['text']:,}{vision} · {_embedding(counts)}"),
        (50, f"mixers      {_mixers(facts['mixers'])}", f"full attention: {_attention_layers(facts['layer_types'])}"),
        (
            50,
            f"cache       {memory(cache['fixed'])} fixed + {memory(cache['kv_per_token'])} per token",
            " · ".join(f"{size['tokens']:,} tokens {memory(size['total'])}" for size in cache["contexts"]),
        ),
        *_vision_lines(facts),
        *_tokenizer_lines(facts["tokenizer"]),
    ]
    if facts["unknown_config_keys"]:
        lines.append((0, f"unknown     config keys {', '.join(facts['unknown_config_keys'])}"))
    lines.append((0, "next        inspect … --tree · --tensors 'layers.0.*' · --cache 4096 32768 · qwenref generate …"))
    return "\n".join(_fit(*line, width=width) for line in lines)


def _fit(second, *columns, width):
    """One line: the second column where it usually stands, or further left if only that keeps it on the line."""
    columns = [column for column in columns if column]
    while True:
        rest = (" " * 6).join(columns[1:])
        gap = max(len(columns[0]) + 4, min(second, width - len(rest)))
        line = columns[0].ljust(gap) + rest if rest else columns[0]
        if len(line) <= width or len(columns) == 1:
            return line
        columns.pop()


def _family(facts):
    kind = facts["model_type"] or ""
    return (
        "Qwen" + kind.removeprefix("qwen").removesuffix("_text").replace("_", ".") if kind.startswith("qwen") else kind
    )


def _dtypes(dtypes):
    ranked = Counter(dtypes).most_common()
    first = _DTYPES.get(ranked[0][0], ranked[0][0]) if ranked else "no tensors"
    return first + "".join(f" + {count} {_DTYPES.get(name, name)}" for name, count in ranked[1:])


def _embedding(counts):
    if not counts["lm_head"]:
        return f"embedding {counts['embedding']:,}, lm_head the same"
    if counts["lm_head"] == counts["embedding"]:
        return f"embedding and lm_head {counts['embedding']:,} each"
    return f"embedding {counts['embedding']:,} · lm_head {counts['lm_head']:,}"


def _mixers(counts):
    return " + ".join(f"{n} {MIXER_NAMES[kind]}" for kind, n in sorted(counts.items(), reverse=True))


def _attention_layers(layer_types):
    layers = [str(i) for i, kind in enumerate(layer_types) if kind == "full_attention"]
    return " ".join(layers if len(layers) <= 6 else [*layers[:4], "…", layers[-1]]) or "none"


def _vision_lines(facts):
    vision, mtp, unread = facts["vision"], facts["mtp_blocks"], facts["not_loaded"]
    words = []
    if vision is not None:
        words.append(
            f"vision      {vision['depth']} blocks, width {vision['hidden_size']:,}, patch {vision['patch_size']}, "
            f"merge {vision['spatial_merge_size']}"
        )
    if mtp and "mtp" in unread:
        said = f"MTP: {mtp} block{'s' * (mtp != 1)} (not part of the forward)"
        words.append(said if words else f"and         {said}")
    if words:
        yield (59, *words)
    if facts["processor"] is not None:
        yield (59, *(_picture_words(kind, rules) for kind, rules in facts["processor"].items()))
    if "visual" in unread:
        yield (0, f"  vision is no part of this model: {unread['visual']:,} tensors on disk are not used")


def _picture_words(kind, rules):
    if rules["error"]:
        words = f"<{rules['error']}>"
    else:
        frames = "pixels" if kind == "image" else f"in {rules['min_frames']:,} to {rules['max_frames']:,} frames"
        words = f"{rules['least']:,} to {rules['most']:,} {frames}"
    return f"  images {words}" if kind == "image" else f"videos {words}"


def _tokenizer_lines(tokenizer):
    if tokenizer["error"]:
        yield (0, f"tokenizer   <error: {tokenizer['error']}>")
    elif not tokenizer["present"]:
        yield (0, "tokenizer   absent: token ids only")
    else:
        template = "present" if tokenizer["chat_template"] else "absent"
        stop = " ".join(f"{entry['token']} {entry['id']}" for entry in tokenizer["stop"]) or "none"
        yield (59, f"tokenizer   present, chat template {template}", f"stop: {stop}")
        if not tokenizer["stop_sources_agree"]:
            sources = {name: ids for name, ids in tokenizer["stop_sources"].items() if ids is not None}
            said = " · ".join(f"{name} {', '.join(map(str, ids))}" for name, ids in sources.items())
            yield (0, f"  stop ids differ by file: {said}")


# Tables


def cache_text(model, contexts):
    """One block per length, one row per part."""
    return "\n".join(repr(cache_size(model, tokens)) for tokens in contexts)


def tensors(path, pattern):
    """Name, dtype, shape, file, offset and bytes of the tensors on disk whose names match a glob.

    `model.language_model.` may be left out of the pattern.
    """
    checkpoint = _C.Checkpoint(path)
    globs = (pattern, "model.language_model." + pattern, "model." + pattern)
    found = [name for name in checkpoint if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    if not found:
        names = sorted(checkpoint)
        raise InputError(
            compose(
                f"{pattern!r} matches no tensor",
                found=f"{len(names):,} tensors: {', '.join(names[:3])}, … {names[-1]}",
                expected="a glob over tensor names, such as 'layers.0.*' or '*.A_log'",
            )
        )
    rows = [(name, checkpoint.info(name)) for name in sorted(found, key=_natural)]
    return [
        {
            "name": name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "file": info.file,
            "offset": info.offset,
            "nbytes": info.nbytes,
        }
        for name, info in rows
    ]


def _natural(name):
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def tensors_text(rows):
    """The rows of `tensors` as a table, one line each."""
    wide = max(len(row["name"]) for row in rows)
    shapes = [str(row["shape"]) for row in rows]
    broad = max(map(len, shapes))
    lines = [f"{len(rows):,} tensors · {disk(sum(row['nbytes'] for row in rows))}"]
    for row, shape in zip(rows, shapes, strict=True):
        lines.append(f"  {row['name']:<{wide}}  {row['dtype']:<4} {shape:<{broad}}  {row['file']} @ {row['offset']:,}")
    return "\n".join(lines)


def disk(n):
    """File bytes as a file manager shows them: 55,560,000,000 -> "55.56 GB"."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"
