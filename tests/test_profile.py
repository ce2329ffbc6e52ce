"""qwenref.profile: every call is counted, times and work add up, nothing is computed differently."""

import json
import threading

import pytest
from cache_arrays import cache_bits

import qwenref
from qwenref.errors import InputError
from qwenref.profile_display import module_rows, op_rows
from qwenref.rates import Rates, duration, quantity, rates

IDS = list(range(40, 60))


@pytest.fixture(scope="module")
def model():
    return qwenref.from_pretrained("tiny")


@pytest.fixture(scope="module")
def decoded(model):
    """A prefill of 20 tokens and two steps of one."""
    cache = qwenref.Cache(model)
    with qwenref.profile(model) as p:
        model(IDS, cache=cache)
        model([7], cache=cache)
        model([8], cache=cache)
    return p


def test_every_module_is_counted_once_per_call(model, decoded):
    silent = {"ModuleList"}
    called = [path for path, module in model.named_modules() if type(module).__name__ not in silent]
    called = [path for path in called if not path.startswith("model.visual")]  # there is no picture
    assert sorted(decoded.modules) == sorted(called)
    assert {work.calls for work in decoded.modules.values()} == {3}
    kinds = qwenref.mixers(model)
    assert decoded.ops["gated_delta_rule"].calls == 3 * kinds["linear_attention"]
    assert decoded.ops["attention"].calls == 3 * kinds["full_attention"]


def test_times_and_work_add_up(decoded):
    root = decoded.modules[""]
    assert decoded.seconds == pytest.approx(root.seconds, rel=1e-9)  # own times are differences of the same readings
    assert sum(work.seconds for work in decoded.ops.values()) < root.seconds
    for name in ("flops", "bytes"):
        assert sum(getattr(work, name) for work in decoded.ops.values()) == getattr(root, name)
    for path, work in decoded.modules.items():
        inside = [w for p, w in decoded.modules.items() if p.startswith(path + "." if path else "") and p != path]
        assert all(w.seconds <= work.seconds and w.flops <= work.flops for w in inside), path
        assert 0 <= work.own_seconds <= work.seconds


def test_shares_add_up_to_the_whole(decoded):
    for rows in (op_rows(decoded), module_rows(decoded)):
        shares = [float(row[0].removesuffix(" %")) for row in rows]
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))  # each is rounded to 0.1


def test_work_is_that_of_the_shapes(model):
    p = qwenref.profile(model, [IDS, IDS])
    c = model.config.text_config
    done = p.modules["model.language_model.layers.0.mlp.gate_proj"]
    assert done.flops == 2 * 40 * c.hidden_size * c.intermediate_size
    weight = model.text_model.layers[0].mlp.gate_proj.weight
    assert done.bytes == weight.nbytes + 4 * 40 * (c.hidden_size + c.intermediate_size)
    assert done.least_seconds == max(done.bytes / p.rates.read, done.flops / p.rates.fma)
    assert done.of_limit == done.least_seconds / done.seconds


@pytest.mark.parametrize("numerics", ["fp32", "hf", "fp64"])
def test_no_bit_changes(model, numerics):
    with qwenref.numerics(numerics):
        plain = model(IDS, use_cache=True)
        with qwenref.profile(model) as p:
            seen = model(IDS, use_cache=True)
    assert p.numerics == numerics and p.seconds > 0
    assert seen.logits.dtype == plain.logits.dtype and (seen.logits == plain.logits).all()
    assert cache_bits(seen.cache) == cache_bits(plain.cache)


def test_a_models_own_numerics_are_kept():
    model = qwenref.from_pretrained("tiny", numerics="fp64")
    p = qwenref.profile(model, IDS)
    assert p.numerics == "fp64"
    done = p.ops["linear"]
    assert done.least_seconds >= done.flops / (p.rates.fma / 2)


def test_nothing_is_left_behind(model):
    before = len(qwenref.hooks(model))  # those of the process count
    p = qwenref.profile(model, IDS)
    assert len(qwenref.hooks(model)) == before and qwenref._C.numerics_var.get() is None
    calls = p.modules[""].calls
    model(IDS)
    assert p.modules[""].calls == calls
    with p:
        model(IDS)
    assert p.modules[""].calls == 1  # opened again it starts over


def test_a_call_that_fails_is_counted_and_the_next_one_is_whole(model):
    def fails(module, args):
        raise RuntimeError("asked to")

    handle = model.text_model.layers[2].mlp.register_forward_pre_hook(fails)
    with qwenref.profile(model) as p:
        with pytest.raises(RuntimeError, match="asked to"):
            model(IDS)
        handle.remove()
        model(IDS)
    assert p.modules[""].calls == 2
    assert p.modules["model.language_model.layers.7"].calls == 1
    assert p.seconds == pytest.approx(p.modules[""].seconds, rel=1e-9)


def test_calls_in_another_thread_are_not_seen(model):
    with qwenref.profile(model) as p:
        other = threading.Thread(target=model, args=(IDS,))
        other.start()
        other.join()
    assert p.modules == {} and p.ops == {} and "no call yet" in repr(p)


def test_two_profiles_may_be_nested(model):
    with qwenref.profile(model) as outer, qwenref.profile(model.text_model.layers[0]) as inner:
        model(IDS)
    assert inner.modules[""].calls == outer.modules["model.language_model.layers.0"].calls == 1
    assert inner.ops["linear"].calls == outer.ops["linear"].calls


def test_the_trace_is_what_chrome_reads(decoded, tmp_path):
    path = decoded.save_trace(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert path == str(tmp_path / "trace.json") and document["displayTimeUnit"] == "ms"
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(w.calls for w in decoded.modules.values()) + sum(w.calls for w in decoded.ops.values())
    assert {event["cat"] for event in spans} == {"module", "op"}
    open_until = []  # ends of the spans a span is inside of: each lies wholly in the one before it
    for event in spans:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and begin >= open_until[-1] - 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3
        open_until.append(end)
        assert begin >= 0 and event["dur"] >= 0 and event["args"]["bytes"] >= 0


def test_events_have_a_limit_and_counts_do_not(model, tmp_path):
    with qwenref.ModelProfile(model, max_events=10) as p:
        model(IDS)
    p.save_trace(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    assert len([e for e in document["traceEvents"] if e["ph"] == "X"]) == 10
    assert document["otherData"]["events left out"] == p.dropped > 0
    assert p.modules[""].calls == 1


def test_displays_have_the_same_figures(decoded, tmp_path):
    text, shown = decoded.text(), decoded._repr_html_()
    assert len(repr(decoded).splitlines()) <= 40 and len(shown) < 100_000
    for rows in (op_rows(decoded), module_rows(decoded)):
        for row in rows:
            assert all(cell in text for cell in row) and row[0] in shown and row[1] in shown
    assert "<script" not in shown and "http" not in shown
    decoded.save_html(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text().count("<table>") == 2
    assert json.loads(json.dumps(decoded.to_dict()))["modules"][""]["calls"] == 3


def test_what_is_no_model_is_refused():
    with pytest.raises(InputError, match="a list in place of a model"):
        qwenref.profile([1, 2])


def test_limits_are_the_slower_of_memory_and_arithmetic():
    limits = Rates(read=10.0, fma=100.0, bf16=200.0, threads=2, level="avx512bf16")
    assert limits.least_seconds(flops=1000, nbytes=10) == 10
    assert limits.least_seconds(flops=1000, nbytes=500) == 50
    assert limits.least_seconds(1000, 10, double=True) == 20
    assert limits.least_seconds(1000, 10, rounded=True) == 5
    assert limits._replace(bf16=50.0).peak(rounded=True) == 100


def test_the_best_rates_seen_stay():
    first = rates()
    assert rates() is first
    again = rates(again=True)
    assert all(new >= old for new, old in zip(again[:3], first[:3], strict=True)) and again[3:] == first[3:]


def test_numbers_for_people():
    assert quantity(14_240_000_000, "B/s") == "14.24 GB/s" and quantity(0, "FLOP") == "0 FLOP"
    assert quantity(999.96, "B") == "1 kB" and quantity(5_760, "B") == "5.76 kB"
    assert [duration(s) for s in (3.14159, 0.0421, 0.00042, 5e-6, 600)] == [
        "3.14 s", "42.1 ms", "0.42 ms", "5 µs", "10 min"
    ]  # fmt: skip
