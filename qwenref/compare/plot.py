"""The frame of a plot as inline SVG: axes, grid, lines, bands, marks.  It takes the colours of the page around it."""

from html import escape

from qwenref.axis import Axis, Linear, whole_powers

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 56, 10, 12, 34

# Mark and colour of each class: told apart by shape as well.
MARKS = {"tie": "ring", "benign": "disc", "ambiguous": "square", "non-benign": "triangle"}

STYLE = (
    ".qr .qr-plot{display:block;max-width:52em;margin:.3em 0 1em}"
    ".qr .qr-plot svg{display:block;width:100%;height:auto;stroke:none}"
    ".qr-plot text{font:11px sans-serif;fill:var(--qr-ink)}"
    ".qr-plot .q{fill:var(--qr-quiet)}"
    ".qr-plot .g{stroke:var(--qr-quiet);stroke-opacity:.25;fill:none}"
    ".qr-plot .l{stroke:var(--qr-ink);stroke-width:1.2;fill:none;stroke-linejoin:round}"
    ".qr-plot .d{stroke:var(--qr-quiet);stroke-dasharray:5 3;fill:none}"
    ".qr-plot .a{fill:var(--qr-delta);fill-opacity:.3}"
    ".qr-plot .b{fill:var(--qr-delta)}"
    ".qr-plot .o{fill:none;stroke:var(--qr-delta)}"
    ".qr-plot .tie{fill:none;stroke:var(--qr-quiet);stroke-width:1.5}"
    ".qr-plot .benign{fill:var(--qr-delta)}"
    ".qr-plot .ambiguous{fill:var(--qr-attention)}"
    ".qr-plot .non-benign{fill:var(--qr-vision)}"
    ".qr-plot .x{fill:none;stroke:black;stroke-width:2}"
)


def points(pairs):
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


class Plot:
    """A plot with named axes.  x: (low, high) · y: (low, high), or the values a logarithmic axis is to hold."""

    def __init__(self, x, y, names, height=200, log=False):
        self._height, self._parts, self._names = height, [], names
        self.x = Linear(*x, LEFT, WIDTH - RIGHT)
        ends = whole_powers(y) if log else y
        self.y = (Axis if log else Linear)(*ends, height - BOTTOM, TOP)

    def grid(self, x_ticks=None):
        across, up = self.x.ticks() if x_ticks is None else x_ticks, self.y.ticks()
        for tick in across:
            self._add(
                f'<text class="q" x="{self.x(tick):.1f}" y="{self._height - 20}" text-anchor="middle">{tick:g}</text>'
            )
        for tick in up[:: -(-len(up) // 7)]:
            y = self.y(tick)
            self._add(f'<path class="g" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            self._add(f'<text class="q" x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        self._add(f'<text x="{middle:.0f}" y="{self._height - 5}" text-anchor="middle">{escape(self._names[0])}</text>')
        centre = (TOP + self._height - BOTTOM) / 2
        turned = f'transform="rotate(-90 10 {centre:.0f})" text-anchor="middle"'
        self._add(f'<text x="10" y="{centre:.0f}" {turned}>{escape(self._names[1])}</text>')
        return self

    def line(self, xs, ys, kind="l"):
        self._add(f'<polyline class="{kind}" points="{points(self._placed(xs, ys))}"/>')
        return self

    def band(self, xs, low, high):
        """The area between two lines."""
        there = [*self._placed(xs, low), *reversed(list(self._placed(xs, high)))]
        self._add(f'<polygon class="a" points="{points(there)}"/>')
        return self

    def across(self, y, words, below=False):
        """A limit: a dashed line with its name above or below."""
        at = self.y(self._inside(y))
        self._add(f'<path class="d" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        self._add(
            f'<text class="q" x="{WIDTH - RIGHT}" y="{at + (11 if below else -3):.1f}" text-anchor="end">'
            f"{escape(words)}</text>"
        )
        return self

    def bar(self, left, right, value, kind="b"):
        a, b, top, foot = self.x(left), self.x(right), self.y(self._inside(value)), self.y(self.y.low)
        self._add(
            f'<rect class="{kind}" x="{a:.1f}" y="{top:.1f}" width="{b - a:.1f}" height="{max(0, foot - top):.1f}"/>'
        )
        return self

    def mark(self, x, y, kind, words):
        self._add(marked(self.x(x), self.y(self._inside(y)), kind, words))
        return self

    def whisker(self, x, low, high):
        at = self.x(x)
        self._add(f'<path class="l" d="M{at:.1f} {self.y(self._inside(low)):.1f}V{self.y(self._inside(high)):.1f}"/>')
        return self

    def figure(self, finding, caption):
        """The whole: `finding` is what a reader who sees no picture is told."""
        return figure("".join(self._parts), self._height, finding, caption)

    def _add(self, part):
        self._parts.append(part)

    def _inside(self, y):
        return min(max(y, self.y.low), self.y.high)

    def _placed(self, xs, ys):
        return ((self.x(x), self.y(self._inside(y))) for x, y in zip(xs, ys, strict=True))


def _tick(value):
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def figure(parts, height, finding, caption):
    picture = f'<svg viewBox="0 0 {WIDTH} {height}" role="img"><title>{escape(finding)}</title>{parts}</svg>'
    return f'<figure class="qr-plot">{picture}<figcaption>{escape(caption)}</figcaption></figure>'


def marked(x, y, kind, words):
    """One mark of a class."""
    title, shape = f"<title>{escape(words)}</title>", MARKS[kind]
    if shape == "square":
        return f'<rect class="{kind}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8">{title}</rect>'
    if shape == "triangle":
        corners = points([(x - 5, y + 4), (x + 5, y + 4), (x, y - 5)])
        return f'<polygon class="{kind}" points="{corners}">{title}</polygon>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'
