"""Two engines with the reference between them: which one is outside of its envelope, or where both were near a tie."""

from qwenref.compare.drawn_apart import ALPHA, apart
from qwenref.compare.report import AGREED, Report
from qwenref.compare.statistics import CLASSES

_COPIED = (
    "created", "tier", "mode", "reference", "suite", "envelope", "cause", "confidence", "first_divergence", "summary",
    "strips",
)  # fmt: skip


def between(comparisons):
    """The Report of two comparisons of the same suite, each with its own inside."""
    reports = [each.report() for each in comparisons]
    outside = [each.seen.name for each, report in zip(comparisons, reports, strict=True) if report.status == "DIVERGED"]
    near = _near_tie(*comparisons)
    shown = next((report for report in reports if report.status == "DIVERGED"), reports[0])
    status, code = _status(reports, near)
    fields = {name: shown.document[name] for name in _COPIED}
    if not outside:
        fields |= {"cause": "none", "confidence": None, "summary": _summary(near)}
    return Report(
        {
            **fields, "status": status, "exit_code": code,
            "findings": _drawn(*comparisons),
            "blind_spots": _together(report.blind_spots for report in reports),
            "engine": {"name": " and ".join(each.seen.name for each in comparisons)},
            "arbiter": {"outside": outside, "near_tie": near, "reports": [report.to_dict() for report in reports]},
        },
        {f"{n}.{name}": array for n, report in enumerate(reports, 1) for name, array in report.arrays.items()},
    )  # fmt: skip


def _together(lists):
    """The items of several lists, each once."""
    return list(dict.fromkeys(item for items in lists for item in items))


def distinct(comparisons):
    """Names that tell engines apart: their own, numbered where these are equal."""
    names = [each.engine.name for each in comparisons]
    return names if len(set(names)) == len(names) else [f"{name} ({n})" for n, name in enumerate(names, 1)]


def _status(reports, near):
    statuses = [report.status for report in reports]
    if "DIVERGED" in statuses:
        return "DIVERGED", 1
    if "INVALID" in statuses:
        return "INVALID", 3
    if near is None and "INCONCLUSIVE" in statuses:
        return "INCONCLUSIVE", 2
    return ("AGREE" if set(statuses) == {AGREED[0]} else "AGREE_WITHIN_NOISE"), 0


def _summary(near):
    if near is None:
        return "Both engines are inside, and their answers do not part."
    return "Where the answers part, rounding decides: both tokens are within 4 sigma of the likeliest."


def _near_tie(*comparisons):
    """{prompt, pos} where two answers part first, if neither token is further off than rounding moves it; else None."""
    if any(each.ended is not None for each in comparisons):
        return None
    answers = [_answers(each) for each in comparisons]
    for prompt in sorted(set(answers[0]) & set(answers[1])):
        (a, start_a, kinds_a), (b, start_b, kinds_b) = answers[0][prompt], answers[1][prompt]
        if a[:start_a] != b[:start_b]:
            continue
        apart = next((t for t, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if apart is None:
            continue
        benign = {None, *CLASSES[:2]}
        if kinds_a.get(apart) in benign and kinds_b.get(apart) in benign:
            return {"prompt": comparisons[0].suite.prompts[prompt].id, "pos": int(apart)}
        return None
    return None


def _drawn(*comparisons):
    """The finding that says whether what two engines drew is of one distribution, where both drew enough to tell."""
    if any(each.options.draws is None or each.ended is not None for each in comparisons):
        return []
    answers = [{}, {}]
    for comparison, found in zip(comparisons, answers, strict=True):
        for way in comparison.seen.trajectories:
            if way.origin == "engine":
                found.setdefault(way.prompt, []).append(way.ids[way.start :])
    found = apart(*answers)
    if found is None:
        return []
    differ = found["p"] <= ALPHA
    told = "the two engines draw differently" if differ else "nothing shows that the two engines draw differently"
    words = f"{told}: discrepancy {found['mmd']:.2g}, chance {found['p']:.2g}, of {found['answers']:,} answers"
    return [{"code": "drawn-apart", "severity": "warning" if differ else "info", "message": words, "evidence": found}]


def _answers(comparison):
    """{prompt: (ids, start, {position: class of what is not the reference's choice})} of an engine's answers."""
    found = {}
    flips = comparison.judge.measures["D"].flips if "D" in comparison.judge.measures else []
    for n, way in enumerate(comparison.judge.numbers.ways):
        if way.origin == "engine" and way.prompt not in found:
            kinds = {flip["pos"]: flip["class"] for flip in flips if flip["way"] == n}
            found[way.prompt] = (list(way.ids), way.start, kinds)
    return found
