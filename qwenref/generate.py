"""Continue a prompt token by token through a cache, by which rules to choose and when to stop.

Knows nothing of how logits come about, nor of how the text is kept (`generation.py`).
"""

import warnings
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from qwenref import ops, rendering
from qwenref.cache import Cache
from qwenref.checks import as_whole, is_row
from qwenref.errors import CapabilityMissing, InputError, QwenrefWarning, ShapeError, compose
from qwenref.generation import Generation, Row
from qwenref.inputs import check_text, checked_ids, checked_mask
from qwenref.logprobs import Recorder, checked_options
from qwenref.numerics import active, unless_chosen
from qwenref.pictures import PromptPictures
from qwenref.progress import Progress
from qwenref.rendering import Rendered  # noqa: F401 - what `render` returns
from qwenref.sampling import generator, pick, refuse_non_finite
from qwenref.step import check_cache
from qwenref.tokenizer import stop_ids

_GUARD = "qwenref.check_finite(model) names the first value that is not finite, and what made it"
PROMPT_LOGITS = 2**22  # how many logits of a prompt are held at a time while it is scored
PREFILL_WINDOW = 2048  # tokens of a prompt that are fed in one call


def generate(
    model,
    input_ids,
    max_new_tokens=256,
    attention_mask=None,
    cache=None,
    stop=None,
    sampler=None,
    streamer=None,
    return_logits=False,
    seed=0,
    row_keys=None,
    return_logprobs=None,
    top_logprobs=0,
    prompt_logprobs=False,
    pixel_values=None,
    image_grid_thw=None,
    pixel_values_videos=None,
    video_grid_thw=None,
    mm_token_type_ids=None,
    prefill_window=None,
    progress=None,
):
    """Continue `input_ids` ([T], or [B, T] with pads on the left and `attention_mask`) by up to `max_new_tokens`.

    cache      a `Cache`: its tokens come before these ones.  Afterwards it holds everything but the newest id, so that
               a conversation goes on with `new_ids[-1:]` and what follows.  After an error or Ctrl-C it holds the
               tokens of the calls that came through, and no half of another.
    stop       None: the stop ids of the checkpoint (generation_config.json).  Else ids, strings or a list of both: ids
               replace the checkpoint's, strings are looked for in the text besides; [] stops at nothing.
    sampler    None is greedy over all logit rows, the lowest id wins ties.  Else a `Sampler`; logit rows without a
               token are masked unless it has a mask of its own.  Or an object with `distribution` as Sampler has it,
               or with `sample(logits, context_ids, rng)` -> id.
    seed, row_keys   whole numbers.  Every draw depends on the seed, the key of its row (by default 0, 1, ...) and the
               number of tokens before it, and on nothing else (`sampling.generator`): so the row alone with the same
               key draws the same, and a text goes on through a cache as in one call.
    return_logprobs  "raw" or "processed": `Logprobs` of the new ids, with the `top_logprobs` likeliest at each step;
               `prompt_logprobs` adds those of the prompt, also with max_new_tokens=0.
    pixel_values ... mm_token_type_ids   pictures as the model takes them.  The prompt has to meet all of them, and all
               that the cache waits for.  A placeholder id that is generated is text.
    streamer   called with each piece of text, whole characters only; or an object with `put(text)` and `end()`.
    prefill_window   a longer prompt is fed in calls of so many tokens, so that its activations need no more memory than
               those of a window; 0 feeds it in one call.  None is 2,048 where the profile in force gives a prompt in
               pieces the bits of the whole, else 0.
    progress   None shows a line on a terminal or in a notebook if it takes seconds; False shows nothing; or a function
               of (done, total, what).
    """
    ids = checked_ids(input_ids, model.config.text_config.vocab_size)
    single = np.ndim(input_ids) == 1
    B, T = ids.shape
    max_new_tokens = _count(max_new_tokens)
    cache = Cache(model, batch=B) if cache is None else cache
    check_cache(cache, model.config.text_config)
    if cache.batch != B:
        raise ShapeError(
            compose("generate: cache has another number of rows", found=f"{cache.batch} in the cache, {B} prompts")
        )
    mask = _left_padded(attention_mask, cache, B, T)
    _refuse_overlong(model, cache, mask)
    with unless_chosen(model.numerics):
        images, videos = (pixel_values, image_grid_thw), (pixel_values_videos, video_grid_thw)
        pictures = PromptPictures(model.config, ids, mask, cache, images, videos, mm_token_type_ids)
    _check_streamer(streamer, B)
    tokenizer = _tokenizer_of(model)
    stop = _stop_rule(stop, model, tokenizer)
    if streamer is not None and tokenizer is None:
        raise CapabilityMissing(compose("generate: a streamer needs a tokenizer", do="open the model from its folder"))

    vocab = model.config.text_config.vocab_size
    kind, k = checked_options(return_logprobs, top_logprobs, prompt_logprobs, vocab)
    choose = _chooser(model, sampler, tokenizer, vocab, kind)
    keys = _row_keys(seed, row_keys, B)
    window = _window(prefill_window, model)
    told = Progress(progress)
    _warn_of_a_short_memory(sampler, cache)
    rows = []
    for b in range(B):
        prompt = ids[b, mask[b]].tolist()
        recorder = Recorder(kind, k, prompt, prompt_logprobs) if kind else None
        rows.append(Row(prompt, tokenizer, stop, streamer, vocab if return_logits else None, recorder))
    steps, logits = 0, None
    fed = fed_mask = None  # what the last step chose, [B, 1], and the rows that go on
    try:
        if prompt_logprobs:  # all logits of a piece at a time
            window = min(window or T, max(1, PROMPT_LOGITS // (B * vocab)))
        if prompt_logprobs or max_new_tokens:
            for part in _parts(T, window):
                told.at(part.start, T, "prefill")
                kept, keep = mask[:, part], 0 if prompt_logprobs else 1
                logits = _call(model, ids[:, part], kept, cache, keep, pictures.of(part))
                steps += 1
                if prompt_logprobs:
                    for b, row in enumerate(rows):
                        row.recorder.score(logits[b, kept[b]])
            logits = logits[:, -1]
        for step in range(max_new_tokens):
            if all(row.finish for row in rows):
                break
            told.at(step, max_new_tokens, "decode")
            if logits is None:
                logits = _call(model, fed, fed_mask, cache, 1)[:, -1]
                steps += 1
            fed = np.zeros((B, 1), np.int64)
            for b, row in enumerate(rows):
                if row.finish is None:
                    where, after = f"generate: step {step + 1}, row {b}", f", after {len(row.ids):,} tokens"
                    refuse_non_finite(logits[b], where, after, _GUARD)
                    fed[b], distribution = choose(logits[b], row, (seed, keys[b], int(cache.length[b])))
                    row.take(int(fed[b, 0]), logits[b], distribution)
            logits = None
            _end_full_rows(model, cache, rows)
            # A row that has ended is fed pads: they leave its part of the cache as it is.
            fed_mask = np.array([[row.finish is None] for row in rows])
        for row in rows:
            row.end("max_new_tokens")
    finally:
        told.end()
        if hasattr(streamer, "end"):
            streamer.end()
    return Generation(rows, steps, single)


def render(
    model,
    messages,
    tools=None,
    add_generation_prompt=None,
    enable_thinking=None,
    images=None,
    videos=None,
    processing=None,
    **variables,
):
    """The exact prompt of a conversation: `text, ids = render(...)`, with more in the `Rendered` it is.

    `model` is a model or a Tokenizer; for the options see `ChatTemplate.render`.

    images, videos   pictures for the parts of the messages, in order; where these have none, they are put in front of
                the last message of a user.  None: those the parts hold ({"type": "image", "image": ...}).  With a
                model, they are made ready, and the prompt is a `PicturePrompt`: placeholders filled, `.prepared`, and
                `.inputs` for `model.generate(prompt.ids, **prompt.inputs)`.  With a Tokenizer, or where no part says
                what it shows, placeholders stay as the template writes them.
    processing  {option: value} for the `Processor`, such as {"native_fps": 2}
    """
    from qwenref.processing import conversation, prompt

    tokenizer = getattr(model, "tokenizer", model)
    options = {"add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking, **variables}
    messages = conversation.attached(messages, images, videos)
    rendered = rendering.render(tokenizer, messages, tools, **options)
    prepared = prompt.prepare(model, messages, processing) if model is not tokenizer else None
    return rendered if prepared is None else prompt.fill(rendered, prepared, model.processor, processing)


# Choosing


def _chooser(model, sampler, tokenizer, vocab, kind):
    """A function (logits, row, name of the draw) -> (id, the distribution it was drawn from, or None)."""
    if sampler is None:

        def greedy(logits, row, name):
            with unless_chosen(model.numerics):
                return int(ops.argmax(logits)), None

        return greedy
    if hasattr(sampler, "distribution") and not isinstance(sampler, type):
        mask = () if tokenizer is None else tokenizer.ids_without_token(vocab)

        def drawn(logits, row, name):
            distribution = sampler.distribution(logits, row.ids, len(row.prompt_ids), mask)
            return pick(distribution, generator(*name).random()), distribution

        return drawn
    if not hasattr(sampler, "sample") or isinstance(sampler, type):
        found = f"the class {sampler.__name__}" if isinstance(sampler, type) else type(sampler).__name__
        raise InputError(
            compose(
                f"generate: sampler is {found}",
                expected="None, a Sampler, or an object with sample(logits, context_ids, rng)",
            )
        )
    if kind == "processed":
        raise InputError(
            compose(
                f'generate: return_logprobs="processed" with a {type(sampler).__name__}',
                expected="a sampler that tells its distribution",
                do='return_logprobs="raw"',
            )
        )

    def asked(logits, row, name):
        given = sampler.sample(logits, row.ids, generator(*name))
        id = as_whole(given)
        if id is None or not 0 <= id < vocab:
            what = f"generate: sample of {type(sampler).__name__} gave {given!r}"
            raise InputError(compose(what, expected=f"an id, 0 to {vocab - 1:,}"))
        return id, None

    return asked


def _parts(tokens, window):
    """Slices of so many columns; of all of them where `window` is 0."""
    window = window or tokens
    return [slice(begin, min(begin + window, tokens)) for begin in range(0, tokens, window)]


def _call(model, ids, mask, cache, keep, brought=MappingProxyType({})):
    """Logits [B, n, vocab] of the last `keep` of these tokens, 0 all, which the cache holds then."""
    mask = None if mask.all() else mask
    return model(ids, attention_mask=mask, cache=cache, logits_to_keep=keep, **brought).logits


def _end_full_rows(model, cache, rows):
    limit = model.config.text_config.max_position_embeddings
    for row, length in zip(rows, cache.length, strict=True):
        if row.finish is None and length >= limit:
            row.finish = f"context full ({limit:,} tokens, max_position_embeddings)"


# Checking


class _Stop(NamedTuple):
    ids: frozenset
    texts: tuple


def _stop_rule(stop, model, tokenizer):
    vocab = model.config.text_config.vocab_size
    own = stop_ids(model) if tokenizer is None else tokenizer.stop.ids
    if stop is None:
        return _Stop(frozenset(own), ())
    given = list(stop) if is_row(stop) or isinstance(stop, (set, frozenset)) else [stop]
    ids, texts = set(), []
    for entry in given:
        if isinstance(entry, str) and entry:
            special = tokenizer.special_tokens.get(entry) if tokenizer is not None else None
            if tokenizer is None:
                raise CapabilityMissing(compose(f"generate: stop string {entry!r} needs a tokenizer", do="stop by ids"))
            check_text(entry, "generate: stop")
            ids.add(special) if special is not None else texts.append(entry)
            continue
        id = as_whole(entry)
        if id is None or not 0 <= id < vocab:
            raise InputError(
                compose(
                    "generate: stop",
                    found=repr(entry)[:80],
                    expected=f"token ids (0 to {vocab - 1:,}), strings, or a list of both",
                )
            )
        ids.add(id)
    return _Stop(frozenset(ids if ids or not given else own), tuple(texts))


def _tokenizer_of(model):
    try:
        return model.tokenizer
    except CapabilityMissing:  # no folder, or no tokenizer.json in it: ids in, ids out
        return None


def _count(value):
    count = as_whole(value)
    if count is None or count < 0:
        raise InputError(compose(f"generate: max_new_tokens {value!r}", expected="an integer, 0 or more"))
    return count


def _check_streamer(streamer, rows):
    if streamer is None:
        return
    if isinstance(streamer, type) or not callable(getattr(streamer, "put", streamer)):
        raise InputError(
            compose(
                "generate: streamer",
                found=repr(streamer)[:80],
                expected="a function of a piece of text, or an object with put(text) and end()",
            )
        )
    if rows > 1:
        raise InputError(compose("generate: a streamer takes one row", found=f"{rows} rows"))


def _window(wanted, model):
    """Tokens of a prompt to feed in one call; 0 for all."""
    if wanted is None:
        with unless_chosen(model.numerics):
            return PREFILL_WINDOW if active().splits_freely else 0
    window = as_whole(wanted)
    if window is None or window < 0:
        raise InputError(compose(f"generate: prefill_window {wanted!r}", expected="an integer, 0 or more, or None"))
    return window


def _row_keys(seed, keys, B):
    keys = range(B) if keys is None else list(keys) if is_row(keys) else [keys]
    if len(keys) != B:
        raise ShapeError(compose("generate: row_keys", found=f"{len(keys)} keys", expected=f"one for each of {B} rows"))
    for key in keys:
        generator(seed, key, 0)  # refuses what is no whole number of 64 bits
    return keys


def _warn_of_a_short_memory(sampler, cache):
    if getattr(sampler, "penalises", False) and cache.length.any():
        warnings.warn(
            compose(
                "generate: penalties see only the ids of this call",
                found=f"{int(cache.length.max()):,} tokens in the cache, whose ids are not known",
                do="give all ids and no cache, or take penalties off",
            ),
            QwenrefWarning,
            stacklevel=4,
        )


def _left_padded(mask, cache, B, T):
    mask = checked_mask(mask, B, T, cache.mask)
    if mask is None:
        return np.ones((B, T), bool)
    wrong = np.flatnonzero(~mask[:, -1])
    if wrong.size:
        raise InputError(
            compose(
                f"generate: row {wrong[0]} ends in a pad",
                found=f"{int(mask[wrong[0]].sum())} tokens of {T} kept",
                expected="pads on the left, and at least one token",
            )
        )
    return mask


def _refuse_overlong(model, cache, mask):
    limit = model.config.text_config.max_position_embeddings
    total = cache.length + mask.sum(axis=1)
    if total.max() > limit:
        row = int(total.argmax())
        raise InputError(
            compose(
                f"generate: the prompt is {int(total[row]):,} tokens; the model takes {limit:,}",
                found=f"{int(cache.length[row]):,} in the cache, {int(mask[row].sum()):,} new in row {row}",
                expected=f"at most {limit:,}   (config.max_position_embeddings)",
                do="shorten the prompt",
            )
        )
