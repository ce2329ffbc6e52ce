"""Where a model's files are: the embedded model, a local folder, or a snapshot in the Hugging Face cache.

Offline first: the network is used only for a hub name that no cache holds, and only with the extra `hub`.
"""

import json
import os
import re
from pathlib import Path

from qwenref.errors import CapabilityMissing, CheckpointError, ModelNotFound, Unreachable, compose

EMBEDDED = {"tiny": Path(__file__).parent / "tiny"}

# What this package reads of a repository; not the same weights in other formats.
FILES = ["*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*", "LICENSE*", "README.md"]

_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(name_or_path, revision=None, local_files_only=False):
    """The folder of a model.

    In this order: "tiny" is the model inside this package (a folder of that name is "./tiny"); an existing folder is
    taken as it is; "owner/name" is looked for in the Hugging Face cache, then downloaded, unless `local_files_only`
    or the environment variable HF_HUB_OFFLINE forbids it.  `revision` is a branch, tag or commit of a hub model.
    """
    name = os.fspath(name_or_path)
    if name in EMBEDDED:
        return EMBEDDED[name]
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise ModelNotFound(
            compose(
                f"{name}: a folder without config.json",
                found=", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "an empty folder",
                expected="config.json, *.safetensors and tokenizer.json side by side",
            )
        )
    if path.exists():
        raise ModelNotFound(
            compose(f"{name}: a file, not a model folder", do=f"name the folder: {path.parent}", expected="a folder")
        )
    looked = [f"embedded models: {', '.join(EMBEDDED)}", f"folder {path.absolute()}"]
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFound(
            compose(
                f"{name!r}: no such model",
                found=_looked(looked),
                expected='"tiny", a folder, or a hub name such as Qwen/Qwen3.5-0.8B',
            )
        )
    snapshot = _cached(name, revision, looked)
    return snapshot if snapshot is not None else _download(name, revision, local_files_only, looked)


def read_json(path):
    """The object in a JSON file, {} when there is no such file; anything else is a fault of the checkpoint."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(compose(f"{path}: cannot be read", found=error)) from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(compose(f"{path}: not JSON", found=error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(compose(f"{path}: not a JSON object", found=type(value).__name__))
    return value


def cache_folder():
    """The Hugging Face cache of this process, by the same variables and ranks as in the hub library."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    named = [os.environ.get("HF_HUB_CACHE"), os.environ.get("HUGGINGFACE_HUB_CACHE"), os.path.join(home, "hub")]
    first = next(folder for folder in named if folder)
    return Path(os.path.expandvars(first)).expanduser()


def _cached(name, revision, looked):
    repository = cache_folder() / ("models--" + name.replace("/", "--"))
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repository / "refs" / commit).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            looked.append(f"cache {repository} (no {commit if repository.is_dir() else 'such model'})")
            return None
    snapshot = repository / "snapshots" / commit
    if _complete(snapshot):
        return snapshot
    looked.append(f"cache {snapshot} (incomplete or absent)")
    return None


def _complete(snapshot):
    """Whether a snapshot has its config and every shard: an interrupted download leaves some behind."""
    if not (snapshot / "config.json").is_file():
        return False
    shards = set(read_json(snapshot / "model.safetensors.index.json").get("weight_map", {}).values())
    return all((snapshot / shard).is_file() for shard in shards) and any(snapshot.glob("*.safetensors"))


def _download(name, revision, local_files_only, looked):
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if local_files_only or offline:
        why = "local_files_only" if local_files_only else "HF_HUB_OFFLINE"
        looked.append(f"download: not tried ({why})")
        raise Unreachable(
            compose(f"{name}: not in the cache", found=_looked(looked), do="allow the download, or name a folder")
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        looked.append("download: not possible without huggingface_hub")
        raise Unreachable(
            compose(f"{name}: not in the cache", found=_looked(looked), do='pip install "qwenref[hub]"')
        ) from CapabilityMissing(f"downloading needs huggingface_hub: {error}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except Exception as error:  # the hub library passes on errors of several network stacks
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        looked.append(f"download: {type(error).__name__}: {first}")
        raise Unreachable(
            compose(
                f"{name}: not in the cache and not to be had from the hub",
                found=_looked(looked),
                do="check the name, the network and, for a private model, the login",
            )
        ) from error


def _looked(places):
    return "looked, in order:\n" + "\n".join(f"{at}. {place}" for at, place in enumerate(places, 1))
