"""A random model whose rounding variants part by 20 nats at a few positions: faults elsewhere are seen and named."""

from qwenref.compare import selftest
from qwenref.compare.planted import ROWS


def test_a_small_fault_is_named_as_what_it_is_on_both_paths(tmp_path):
    folder = selftest.folder(2, tmp_path)
    (job,) = selftest.jobs({2: folder}, ["A"], 0, False, only="04 rope-theta-1e4")
    found = selftest.perform(job)
    assert ROWS[job.row].causes == ("config",) and not found.wrong
    assert found.cause == "config" and "rope-theta-1e4" in found.names
    assert {"P R", "P KL"} & set(found.alarms)
