"""The roofline as an SVG picture, with nothing but text: the limits as lines, each op as a mark."""

from html import escape

from qwenref.axis import Axis, whole_powers

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 64, 16, 46, 46
COLOURS = {"decode": "#0072b2", "prefill": "#b34700"}  # told apart by shape as well
TINY_SHARE = 0.001  # ops below this share of the time are left out

STYLE = (
    "text{font:12px sans-serif;fill:#1b1b1b}.t{font-size:14px;font-weight:bold}.q{fill:#595959}"
    ".g{stroke:#d0d0d0;stroke-width:1}.r{stroke:#1b1b1b;stroke-width:2;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.q{fill:#a8a8a8}.g{stroke:#444}.r{stroke:#e6e6e6}"
    ".b{fill:#111}}"
)


def points(roofline):
    """(phase, op, flops per byte, flops per second, share of the time) of every op that counts."""
    for phase, found in roofline.items():
        for name, work in found["ops"].items():
            share = work["seconds"] / found["seconds"]
            if work["flops"] and work["bytes"] and share >= TINY_SHARE:
                yield phase, name, work["flops"] / work["bytes"], work["flops"] / work["seconds"], share


def picture(facts, rates, roofline):
    """The SVG text."""
    marks = list(points(roofline))
    ridge = rates.fma / rates.read
    low_x, high_x = whole_powers([ridge, ridge * 10, *(mark[2] for mark in marks)])
    low_y, high_y = whole_powers([rates.fma, rates.read / 10, *(mark[3] for mark in marks)])
    x = Axis(low_x, high_x, LEFT, WIDTH - RIGHT)
    y = Axis(low_y, high_y, HEIGHT - BOTTOM, TOP)
    title = f"{facts['model']}: prompt of {facts['prefill']:,} tokens, and one token more"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>Roofline of {escape(title)}</title><style>{STYLE}</style>',
        f'<rect class="b" width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text class="t" x="{LEFT}" y="18">{escape(title)}</text>',
        f'<text class="q" x="{LEFT}" y="35">{escape(str(rates))}</text>',
    ]
    for tick in x.ticks():
        parts.append(f'<path class="g" d="M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="q" x="{x(tick):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        parts.append(f'<path class="g" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="q" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick / 1e9:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">operations per byte</text>'
    )
    parts.append(f'<text x="14" y="{HEIGHT / 2:.0f}" transform="rotate(-90 14 {HEIGHT / 2:.0f})" '
                 'text-anchor="middle">GFLOP/s</text>')  # fmt: skip
    left = max(low_x, low_y / rates.read)
    parts.append(
        f'<path class="r" d="M{x(left):.1f} {y(rates.read * left):.1f}L{x(ridge):.1f} {y(rates.fma):.1f}'
        f'H{x(high_x):.1f}"/>'
    )
    named = set()
    for phase, name, intensity, rate, share in sorted(marks, key=lambda mark: -mark[4]):
        size, colour = 3 + 9 * share**0.5, COLOURS.get(phase, "#595959")
        px, py = x(intensity), y(min(max(rate, low_y), high_y))
        what = f"<title>{escape(phase)}: {escape(name)}, {100 * share:.1f} % of the time</title>"
        if phase == "prefill":
            shape = f'<rect x="{px - size:.1f}" y="{py - size:.1f}" width="{2 * size:.1f}" height="{2 * size:.1f}"'
            tag = "rect"
        else:
            shape, tag = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{size:.1f}"', "circle"
        parts.append(f'{shape} fill="{colour}" fill-opacity=".75">{what}</{tag}>')
        if share >= 0.03 and (phase, name) not in named:
            named.add((phase, name))
            parts.append(_label(px, py, size, f"{name} {100 * share:.0f} %"))
    for i, (phase, colour) in enumerate(COLOURS.items()):
        px = WIDTH - 170 + 80 * i
        mark = (
            f'<circle cx="{px}" cy="14" r="5"'
            if phase == "decode"
            else f'<rect x="{px - 5}" y="9" width="10" height="10"'
        )
        parts.append(f'{mark} fill="{colour}"/><text x="{px + 9}" y="18">{phase}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(px, py, size, text):
    if px > WIDTH - 160:
        return f'<text x="{px - size - 4:.1f}" y="{py + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    return f'<text x="{px + size + 4:.1f}" y="{py + 4:.1f}">{escape(text)}</text>'
