"""The pictures a conversation holds: found in its messages, or put into them."""

from collections.abc import Mapping

from qwenref.errors import InputError, compose

KINDS = ("image", "video")


def sources(messages):
    """{"image": [...], "video": [...]}: what each picture of a conversation comes from, None where its part says not.

    A part of a content is {"type": "image", "image": source}, or with "image_url" (there also as {"url": source}), or
    the same with "video".  Anything that is no such conversation holds none.
    """
    found = {kind: [] for kind in KINDS}
    for _, _, part, kind in _parts(messages):
        found[kind].append(_source(part, kind))
    return found


def attached(messages, images=None, videos=None):
    """The conversation with these pictures in its parts, one for each in order, in place of what they hold.

    Where it has no part for a picture at all, parts are put in front of its last user message.
    """
    given = {"image": listed(images), "video": listed(videos)}
    given = {kind: entries for kind, entries in given.items() if entries is not None}
    if not any(given.values()) or not isinstance(messages, (list, tuple)):
        return messages
    held = sources(messages)
    if not any(held.values()):
        return _in_front(messages, given)
    for kind, entries in given.items():
        if len(entries) != len(held[kind]):
            raise InputError(
                compose(
                    f"{len(entries)} {kind}{'s' * (len(entries) != 1)} for {len(held[kind])} "
                    f"part{'s' * (len(held[kind]) != 1)} of the messages",
                    expected=f'one for each {{"type": "{kind}"}}, or messages without any',
                )
            )
    queues, changed = {kind: list(entries) for kind, entries in given.items()}, list(messages)
    for at, number, part, kind in _parts(messages):
        if kind in queues:
            content = list(changed[at]["content"])
            rest = {key: value for key, value in part.items() if key not in (kind, f"{kind}_url")}
            content[number] = {**rest, "type": kind, kind: queues[kind].pop(0)}
            changed[at] = {**changed[at], "content": content}
    return changed


def listed(given):
    """A list of the pictures in an argument that takes one or many; None of None."""
    return None if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _in_front(messages, given):
    parts = [{"type": kind, kind: entry} for kind, entries in given.items() for entry in entries]
    users = [
        at for at, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "user"
    ]
    if not users:
        raise InputError(compose("messages: pictures, and no message of a user", expected="one to put them in"))
    message = messages[users[-1]]
    content = message.get("content")
    content = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return [*messages[: users[-1]], {**message, "content": parts + content}, *messages[users[-1] + 1 :]]


def _parts(messages):
    """(message, number of the part, part, kind) of every picture, in the order templates write them."""
    for at, message in enumerate(messages if isinstance(messages, (list, tuple)) else ()):
        content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
        for number, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            for kind in KINDS if isinstance(part, Mapping) else ():
                if part.get("type") in (kind, f"{kind}_url") or kind in part or f"{kind}_url" in part:
                    yield at, number, part, kind
                    break


def _source(part, kind):
    for name in (kind, f"{kind}_url"):
        source = part.get(name)
        if source is not None:
            return source.get("url") if isinstance(source, Mapping) else source
    return None
