"""The questions an engine is asked: who it is, whether it repeats itself, strings, conversations, prompts.

Steps S0 to S6 of a comparison.  An engine that lacks something is asked less; what it refuses is an error or a finding,
never a guess.
"""

import qwenref
from qwenref.compare.asking import ONE, Asked, first_line, kept, listed, request
from qwenref.compare.errors import EngineContractViolation, EngineFailed, EngineUnreachable, VocabMismatch
from qwenref.compare.evidence import Difference, Evidence, Trajectory
from qwenref.compare.repeats import repeats
from qwenref.compare.scoring import continued
from qwenref.engines.model_files import model_facts
from qwenref.errors import CapabilityMissing, compose
from qwenref.tokenizer import stop_ids

PADDING = 1024  # the largest multiple that rows of logits are filled up to: 128 on each of 8 devices
_HASHES = ("config_sha256", "tokenizer_sha256", "template_sha256", "generation_config_sha256")


def gather(model, engine, suite, tell=lambda *step: None, seen=None, draws=None, enough=lambda: False):
    """Evidence of a suite.  tell(done, total, what) after each request.

    seen    Evidence to be filled, so that it is there when the work is interrupted
    draws   tokens to be drawn at temperature 1 in place of greedy answers: prompts are asked again until there are as
            many, each time by another seed
    enough  asked after each prompt that is answered greedily: True leaves the others out
    """
    engine = _checked(model, engine)
    seen = Evidence(engine.name, engine.capabilities()) if seen is None else seen
    identify(model, engine, seen)
    try:
        _strings(model, engine, suite, seen, tell)
        _conversations(model, engine, suite, seen, tell)
        repeats(model, engine, suite, seen, tell)
        if draws is None:
            _prompts(model, engine, suite, seen, tell, enough)
        else:
            _draws(model, engine, suite, seen, tell, draws)
    except EngineUnreachable as error:
        seen.failed = seen.failed or error
        seen.find(error.code, "error", first_line(error), {"said": str(error)})
    return seen


def _checked(model, engine):
    return engine if isinstance(engine, Asked) else Asked(engine, model.config.text_config.vocab_size)


# ---- S0: who it is -------------------------------------------------------------------------------------------------


def identify(model, engine, seen):
    """What the engine says of itself, against the checkpoint; VocabMismatch for another vocabulary."""
    if not seen.gives.config:
        seen.find("config-unknown", "info", "the engine says nothing of its version, dtype or files")
        return
    engine = _checked(model, engine)
    seen.config = said = engine.config()
    for code, words in engine.complaints:
        seen.find(code, "warning", words)
    vocab = model.config.text_config.vocab_size
    theirs = said.get("vocab_size")
    if theirs is not None and theirs != vocab:
        known = _known_ids(model)
        if not (known <= theirs < vocab or _padded(known, theirs) or _padded(vocab, theirs)):
            expected = f"{vocab:,}, with other padding at least {known:,} and the next multiple of 8 to {PADDING:,}"
            raise VocabMismatch(compose(f"{seen.name}: another vocabulary", found=f"{theirs:,} ids", expected=expected))
        seen.find("vocab-padding", "info", f"{theirs:,} logit rows where the checkpoint has {vocab:,}: padding")
    facts = {} if model.path is None else model_facts(model.path)
    for key in _HASHES:
        ours, other = facts.get(key), (said.get("model") or {}).get(key)
        if ours and other and ours != other:
            seen.differing_config.append({"key": key, "ref": ours, "engine": other})


def _padded(rows, theirs):
    """Whether `theirs` is what engines fill `rows` up to: the next multiple of a power of two."""
    step = 8
    while step <= PADDING:
        if theirs == -(-rows // step) * step:
            return True
        step *= 2
    return False


def _known_ids(model):
    """How many ids have a token."""
    try:
        return len(model.tokenizer)
    except CapabilityMissing:
        return model.config.text_config.vocab_size


# ---- S2, S3: tokenizer and template --------------------------------------------------------------------------------


def _strings(model, engine, suite, seen, tell):
    if not seen.gives.tokenize or not suite.texts:
        return
    differ, failed = [], []
    for done, text in enumerate(suite.texts, 1):
        tell(done, len(suite.texts), "strings")
        try:
            found = engine.tokenize(text)
        except ONE as error:
            failed.append(error)
            continue
        expected = list(map(int, model.tokenizer.encode(text)))
        if found != expected:
            differ.append(Difference("tokenizer", text, found, expected))
    seen.asked["strings"] = len(suite.texts) - len(failed)
    _without_answer(seen, failed, f"{len(suite.texts)} strings")
    if differ:
        seen.differences.append(differ[0]._replace(more=len(differ) - 1))


def _conversations(model, engine, suite, seen, tell):
    if not seen.gives.render or not suite.conversations:
        return
    differ, told, refused, failed = [], 0, [], []
    for done, item in enumerate(suite.conversations, 1):
        begins = {"add_generation_prompt": not item.options.get("continue_final_message", False)}
        options = {**begins, **item.options}
        try:
            found = engine.render(item.messages, **options)
        except CapabilityMissing as error:
            refused.append(f"{item.id}: {first_line(error)}")
            continue
        except (EngineContractViolation, EngineFailed) as error:
            failed.append(error)
            continue
        expected = qwenref.render(model, item.messages, **options)
        tell(done, len(suite.conversations), "conversations")
        told += 1
        if found.text is not None and found.text != expected.text:
            differ.append(Difference("template", item.id, found.text, expected.text))
        elif found.ids is not None and list(found.ids) != list(expected.ids):
            what = "tokenizer" if found.text is not None else "template"
            differ.append(Difference(what, item.id, list(found.ids), list(expected.ids)))
    seen.asked["conversations"] = told
    _without_answer(seen, failed, f"{len(suite.conversations)} conversations")
    if refused:
        words = f"{len(refused)} conversations are not rendered by the engine"
        seen.find("conversations-left-out", "info", words, {"first": refused[0]})
    for what in ("template", "tokenizer"):
        these = [one for one in differ if one.what == what]
        if these:
            seen.differences.append(these[0]._replace(more=len(these) - 1))


def _without_answer(seen, failed, of):
    """A finding for what an engine broke down at, by the first error."""
    if failed:
        words = f"{len(failed)} of {of} have no answer: {first_line(failed[0])}"
        seen.find(failed[0].code, "error", words, {"said": str(failed[0])})


# ---- S5, S6: prompts -----------------------------------------------------------------------------------------------


def _prompts(model, engine, suite, seen, tell, enough):
    vocab = model.config.text_config.vocab_size
    k = listed(vocab, seen.gives.output_logprobs)
    left_out = 0
    for number, item in enumerate(suite.prompts):
        ask = request(item, seen)
        if ask is None:
            left_out += 1
            continue
        done = kept(seen, item, lambda ask=ask, n=item.new: engine.generate(ask, n, k))
        if done is None:
            continue
        seen.completions[number] = done
        _contract(item, done, seen)
        _trajectories(model, engine, number, item, done, seen)
        tell(number + 1, len(suite.prompts), "prompts")
        if enough():
            break
    _left_out(seen, len(suite.prompts), left_out)


def _draws(model, engine, suite, seen, tell, wanted):
    k = listed(model.config.text_config.vocab_size, seen.gives.output_logprobs)
    asked = [(n, item) for n, item in enumerate(suite.prompts) if request(item, seen) is not None]
    _left_out(seen, len(suite.prompts), len(suite.prompts) - len(asked))
    drawn, seed = 0, 0
    while asked and drawn < wanted and seed < wanted:
        number, item = asked[seed % len(asked)]
        sampling = {"temperature": 1.0, "seed": seed}
        seed += 1
        ask = request(item, seen)
        done = kept(seen, item, lambda ask=ask, n=item.new, how=sampling: engine.generate(ask, n, k, how))
        if done is None:
            asked = [each for each in asked if each[0] != number]
            continue
        seen.completions.setdefault(number, done)
        _contract(item, done, seen)
        own = _own(model, number, item, done, seen)
        if own is not None:
            _scored(model, engine, item, own, seen, seed <= len(asked))
            drawn += len(own.ids) - own.start
        tell(min(drawn, wanted), wanted, "drawn tokens")


def _left_out(seen, prompts, left_out):
    seen.asked["prompts"] = prompts - left_out
    if left_out:
        seen.find("prompts-left-out", "info", f"{left_out} prompts have no text and this engine takes no ids")


def _trajectories(model, engine, number, item, done, seen):
    own = _own(model, number, item, done, seen)
    if not seen.gives.prompt_logprobs or not seen.gives.ids_in:
        if own is not None:
            seen.trajectories.append(own)
        return
    reference = continued(model, item.ids, item.new)
    both = [own] if own is not None else []
    if own is None or list(own.ids[own.start :]) != reference:
        both.append(Trajectory(number, "reference", (*item.ids, *reference), len(item.ids)))
    for way in both:
        _scored(model, engine, item, way, seen)


def _scored(model, engine, item, way, seen, ask=True):
    """Take in a trajectory with its prefill, or without one that the engine does not come to: its answer stays."""
    prefill = None
    try:
        prefill = _prefill(model, engine, item, way, seen) if ask else None
    finally:
        if prefill is not None or way.decode is not None:
            seen.trajectories.append(way._replace(prefill=prefill))


def _own(model, number, item, done, seen):
    """The Trajectory of the engine's own answer, behind the ids it says it read; None where there is no answer."""
    prompt = list(item.ids) if done.prompt_ids is None else list(done.prompt_ids)
    output, rows, closing = _output(model, item, done, seen)
    if not output or not prompt:
        what = "the answer is empty" if prompt else "no ids were read"
        severity = "info" if prompt and done.finish == "stop" else "warning"
        seen.find("no-answer", severity, f"prompt {item.id}: {what}", {"finish": done.finish})
        return None
    ids = (*prompt, *output)
    return Trajectory(number, "engine", ids, len(prompt), decode=rows, finish=done.finish, closing=closing)


def _prefill(model, engine, item, way, seen):
    """A row, or None, for each id of a trajectory behind its first; None where the engine gives none at all."""
    if not seen.gives.prompt_logprobs or not seen.gives.ids_in:
        return None
    k = listed(model.config.text_config.vocab_size, seen.gives.prompt_logprobs)
    scores = kept(seen, item, lambda: engine.score(list(way.ids), k))
    if scores is None:
        return None
    if list(scores.ids) != list(way.ids):
        _other_ids(seen, item, len(way.ids), scores.ids)
        return None
    return list(scores.rows[: len(way.ids) - 1])


def _output(model, item, done, seen):
    """(ids, a row or None for each, whether the last id is none of the engine's) of a completion."""
    ids, rows = done.output_ids, list(done.rows or ())
    if ids is None and rows and all(row is not None and row.chosen is not None for row in rows):
        ids = [row.chosen for row in rows]
    if ids is None:
        if not done.text:
            return [], [], False
        seen.assumed = True
        ids, rows = retold(model, item, done.text), []
    ids, stops = list(ids), stop_ids(model)
    if done.finish == "stop" and done.stop_id is not None and ids[-1:] != [done.stop_id]:
        ids.append(done.stop_id)
    closing = done.finish == "stop" and bool(stops) and not (ids and ids[-1] in (done.stop_id, *stops))
    if closing:
        ids.append(stops[0])
    rows += [None] * (len(ids) - len(rows))
    return ids, rows[: len(ids)], closing


def retold(model, item, text):
    """Ids of an answer that is known as text: the reference's own as far as it says the same, the tokenizer's behind.

    A tokenizer need not make the ids of a text that a model wrote, so what says the same is taken to be the same.
    """
    own = continued(model, item.ids, item.new)
    same = [n for n in range(len(own) + 1) if text.startswith(model.tokenizer.decode(own[:n]))]
    kept = own[: same[-1]]
    return [*kept, *map(int, model.tokenizer.encode(text[len(model.tokenizer.decode(kept)) :]))]


def _contract(item, done, seen):
    """Findings where an engine did not do what it was asked for."""
    if seen.gives.ids_in and done.prompt_ids is not None and list(done.prompt_ids) != list(item.ids):
        _other_ids(seen, item, len(item.ids), done.prompt_ids)
    short = done.output_ids is not None and len(done.output_ids) < item.new
    if short and done.finish not in ("stop", "cancelled"):
        words = f"prompt {item.id}: {len(done.output_ids)} tokens of {item.new} asked for, and no stop"
        seen.find("engine-contract", "error", words, {"finish": done.finish})
    cached = (done.meta or {}).get("cached_tokens") or 0
    if cached:
        words = "prompts are answered from a cache although none was to be used"
        seen.find("engine-contract", "warning", words, {"cached_tokens": cached, "prompt": item.id})


def _other_ids(seen, item, sent, read):
    known = [found["evidence"] or {} for found in seen.findings if found["code"] == "engine-contract"]
    if any(evidence.get("prompt") == item.id for evidence in known):
        return
    words = f"prompt {item.id}: {len(read):,} ids read of {sent:,} sent"
    if len(read) == sent:
        words = f"prompt {item.id}: other ids read than were sent"
    seen.find("engine-contract", "error", words, {"sent": sent, "read": len(read), "prompt": item.id})
