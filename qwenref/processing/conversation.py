"""The pictures a conversation holds: found in its messages, or put where its newest question begins."""

from collections.abc import Mapping

from qwenref.errors import InputError, compose

KINDS = ("image", "video")


def parts(messages):
    """[(kind, source or None)] of every picture in a conversation, in the order templates write them.

    A part is {"type": "image"} with the picture under "image" or "image_url" (there also as {"url": ...}), or the same
    with "video".
    """
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping):
                kind = _kind(part)
                if kind is not None:
                    found.append((kind, _source(part, kind)))
    return found


def _kind(part):
    for kind in KINDS:
        if part.get("type") in (kind, f"{kind}_url") or kind in part or f"{kind}_url" in part:
            return kind
    return None


def _source(part, kind):
    for name in (kind, f"{kind}_url"):
        source = part.get(name)
        if source is not None:
            return source.get("url") if isinstance(source, Mapping) else source
    return None


def sources(messages, images, videos):
    """{"images": list or None, "videos": ...}: those handed over, or else those the messages hold.

    None for a kind whose places hold nothing: they stay as the template writes them.
    """
    held = parts(messages)
    result = {}
    for kind, given in zip(KINDS, (images, videos), strict=True):
        own = [source for of, source in held if of == kind]
        missing = [at for at, source in enumerate(own) if source is None]
        if given is None and missing and len(missing) < len(own):
            raise InputError(
                compose(
                    f"messages: {kind} {missing[0]} of {len(own)} holds nothing",
                    expected=f'a picture under "{kind}" in every part, or all of them as {kind}s=[...]',
                )
            )
        result[f"{kind}s"] = given if given is not None else None if missing or not own else own
    return result


def with_places(messages, images, videos):
    """The conversation with a part for each picture in front of its last user message, where it has no part at all."""
    wanted = [{"type": kind} for kind, given in zip(KINDS, (images, videos), strict=True) for _ in given or ()]
    if not wanted or parts(messages):
        return messages
    users = [
        at for at, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "user"
    ]
    if not users:
        raise InputError(
            compose("messages: pictures, and no message of a user", expected='a part {"type": "image"} for each')
        )
    message = messages[users[-1]]
    content = message.get("content")
    content = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    changed = {**message, "content": wanted + content}
    return [*messages[: users[-1]], changed, *messages[users[-1] + 1 :]]
