"""Rows of a report's table, and the colours they get."""

import numpy as np

GREEN, AMBER, RED, SKIPPED = "green", "amber", "red", "skipped"


def stage(id, name, verdict, value=None, gate=None, detail=None):
    """A row of a report's table."""
    return {"id": id, "name": name, "verdict": verdict, "value": value, "gate": gate, "detail": detail}


def graded(value, amber, red):
    """Green up to `amber`, red above `red`."""
    return SKIPPED if value is None or np.isnan(value) else RED if value > red else AMBER if value > amber else GREEN
