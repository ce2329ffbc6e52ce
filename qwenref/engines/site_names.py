"""Names of sites between a caller, who may write them in full, and hooks, which know them from `layers` on."""

from qwenref.engines.stepping import lacks
from qwenref.sites import ROOTS


def short_site(site):
    """A name or pattern without what may be left out in front."""
    return next(site[len(root) :] for root in sorted(ROOTS, key=len, reverse=True) if site.startswith(root))


def under_names(engine, recorder, sites, known=None):
    """{site: array} of a Recorder, under the names that were asked for; CapabilityMissing where there is none.

    known: short names; others are the engine's own, and left out
    """
    found = {}
    for site in sites:
        short = short_site(site)
        root = site[: len(site) - len(short)]
        for name, value in recorder.matching(short).items():
            if known is None or name in known:
                found[name if name == "lm_head" else root + name] = value
    if not found:
        raise lacks(engine, f"activations of {', '.join(sites)[:80]}", "hooks on modules do not see them")
    return found
