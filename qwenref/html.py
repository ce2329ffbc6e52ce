"""What all HTML displays share: colours, one style block, escaping.  No script, no network; readable when stripped."""

from html import escape

# What a theme may set, with what stands in where it does not.  Bars tell kinds apart by their lines as well.
LIGHT = {
    "ground": "#ffffff", "ink": "#1b1b1b", "quiet": "#595959", "link": "#0b57a4",
    "delta": "#0072b2", "attention": "#b34700", "vision": "#7b3294",
}  # fmt: skip
DARK = {
    "ground": "#111111", "ink": "#e6e6e6", "quiet": "#a8a8a8", "link": "#7cb8f2",
    "delta": "#56b4e9", "attention": "#e69f00", "vision": "#c39bd3",
}  # fmt: skip
_THEMES = {
    "ground": "--jp-layout-color0,var(--vscode-editor-background,{})",
    "ink": "--jp-content-font-color1,var(--vscode-editor-foreground,{})",
}


def _variables(colours):
    return "".join(
        f"--qr-{name}:var({_THEMES[name].format(colour)});" if name in _THEMES else f"--qr-{name}:{colour};"
        for name, colour in colours.items()
    )


def _style():
    dark = _variables(DARK)
    return (
        "<style>"
        f".qr{{{_variables(LIGHT)}color:var(--qr-ink);background:var(--qr-ground);font:13px/1.45 sans-serif}}"
        f"@media(prefers-color-scheme:dark){{.qr{{{dark}}}}}"
        f'[data-jp-theme-light="false"] .qr,.vscode-dark .qr{{{dark}}}'
        ".qr pre,.qr code{font:12px/1.45 monospace}"
        ".qr pre{margin:0 0 .5em;white-space:pre-wrap;color:inherit;background:none}"
        ".qr em{font-style:normal;color:var(--qr-quiet)}"
        ".qr details{margin-left:1em}"
        ".qr>details{margin-left:0}"
        ".qr summary{cursor:pointer}"
        ".qr-tree summary{display:grid;grid-template-columns:minmax(0,1fr) 6em 9em 6em}"
        ".qr-tree summary>i{display:none}"
        '.qr-tree summary>b::before{content:"▸ "}'
        '.qr-tree details[open]>summary>b::before{content:"▾ "}'
        ".qr-tree summary>b{font-weight:normal;overflow-wrap:anywhere}"
        ".qr-tree code{user-select:all;margin-left:1.2em;color:var(--qr-link)}"
        ".qr-bar{align-self:center;border-top:6px solid var(--qr-quiet)}"
        ".qr-delta{border-top:6px solid var(--qr-delta)}"
        ".qr-attention{border-top:6px double var(--qr-attention)}"
        ".qr-vision{border-top:6px dotted var(--qr-vision)}"
        ".qr table{border-collapse:collapse}"
        ".qr th,.qr td{text-align:left;padding:0 .6em 0 0;font-weight:normal;background:none}"
        ".qr samp{font:12px/1.45 monospace;white-space:pre-wrap;overflow-wrap:anywhere}"
        ".qr-said{border-left:3px solid var(--qr-link);padding-left:.4em}"
        ".qr-frame{border-left:3px dotted var(--qr-quiet);padding-left:.4em;color:var(--qr-quiet)}"
        ".qr-tail{border-left:3px double var(--qr-attention);padding-left:.4em}"
        ".qr ruby{ruby-position:under;margin-right:.3em}"
        ".qr rt{color:var(--qr-quiet);padding-right:.3em}"
        ".qr figure{display:inline-block;margin:.3em .8em .3em 0;vertical-align:top;max-width:16em}"
        ".qr img{image-rendering:pixelated;vertical-align:top;margin:.2em .6em .2em 0}"
        ".qr svg{stroke:var(--qr-delta);fill:none;vertical-align:middle}"
        "</style>"
    )


STYLE = _style()


def styled(rules=""):
    """The style block, with more rules of a display of its own."""
    return STYLE.replace("</style>", f"{rules}</style>")


def block(body, kind="", rules=""):
    """One output: the style block and what it styles."""
    return f'{styled(rules)}<div class="qr{" " + kind if kind else ""}">{body}</div>'


def table(head, rows):
    """A table whose first row and first column are headings; cells stay apart where a viewer strips it."""

    def cells(row, first):
        return "".join(
            f"<{tag}>{' · ' if i else ''}{cell if isinstance(cell, Raw) else escape(str(cell))}</{tag[:2]}>"
            for i, cell in enumerate(row)
            for tag in [('th scope="row"' if first else "td") if i == 0 else "td"]
        )

    top = "".join(f'<th scope="col">{" · " if i else ""}{escape(str(cell))}</th>' for i, cell in enumerate(head))
    body = "".join(f"<tr>{cells(row, True)}</tr>\n" for row in rows)
    return f"<table>{f'<tr>{top}</tr>' if head else ''}{body}</table>"


class Raw(str):
    """HTML that is not escaped again."""
