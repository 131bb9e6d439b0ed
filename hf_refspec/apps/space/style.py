"""How the page looks: the colours of the sources, and its CSS."""

from __future__ import annotations

# Okabe and Ito's colours, which people with any colour vision can tell apart, in the order of a
# blend's sources. The lines below the words differ as well.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
_LINES = ("solid", "dashed", "dotted", "double", "solid")
_CSS = """
.gradio-container { max-width: 1240px !important; margin: 0 auto; }
.rs { color: var(--body-text-color); --tint: 20%; }
.dark .rs { --tint: 45%; }
.rs span[class^=s] { border-bottom: 2px var(--line) var(--color); border-radius: 2px;
  background: color-mix(in srgb, var(--color) var(--tint), transparent); }
.rs h1 { font-size: 1.5rem; margin: 0 0 .2rem; }
.rs p { margin: .2rem 0; overflow-wrap: anywhere; }
.rs .quiet, .rs .figures { font-size: .85rem; opacity: .75; }
.rs .empty { padding: 2.5rem 1rem; text-align: center;
  border: 1px dashed var(--border-color-primary); border-radius: 10px; }
.rs .message { background: var(--background-fill-secondary); border-radius: 10px;
  border: 1px solid var(--border-color-primary); padding: .5rem .8rem; margin: .8rem 0 .5rem 12%;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.rs .message:first-child { margin-top: 0; }
.rs .lanes { display: grid; gap: .7rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); }
.rs .lane { border: 1px solid var(--border-color-primary); border-radius: 10px;
  padding: .6rem .8rem; min-width: 0; background: var(--background-fill-primary);
  display: flex; flex-direction: column; }
.rs .lane header { display: flex; justify-content: space-between; align-items: baseline;
  gap: .5rem; font-weight: 600; }
.rs .rate { font-variant-numeric: tabular-nums; }
.rs .rate b { font-size: 1.15rem; }
.rs .bar { height: 6px; border-radius: 3px; background: var(--border-color-primary);
  margin: .35rem 0 .5rem; overflow: hidden; }
.rs .bar i { display: block; height: 100%; background: var(--body-text-color-subdued); }
.rs .drafted .bar i { background: #0072b2; }
.rs .text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; min-height: 3.2em; }
.rs .figures { display: flex; justify-content: space-between; margin-top: auto; padding-top: .5rem;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.rs .verdict { margin: .6rem 0; font-weight: 600; }
.rs .verdict.same::before { content: "✓ "; color: #009e73; }
.rs .verdict.differs { color: #d55e00; }
.rs .error { border-left: 4px solid #d55e00; padding: .5rem .8rem; margin: .6rem 0;
  background: color-mix(in srgb, #d55e00 10%, transparent); border-radius: 4px;
  overflow-wrap: anywhere; }
.rs .legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; margin: .4rem 0; }
.rs .tree { contain: inline-size; overflow: auto; max-height: 26rem;
  border: 1px solid var(--border-color-primary);
  border-radius: 10px; background: var(--background-fill-primary); }
.rs .tree svg { display: block; }
.rs .tree text { fill: var(--body-text-color); font: 12px ui-monospace, monospace; }
.rs .tree .percent { font-size: 9px; }
.rs .tree rect { fill: var(--background-fill-primary); stroke: var(--border-color-primary); }
.rs .tree [class*=" s"] rect {
  fill: color-mix(in srgb, var(--color) 25%, var(--background-fill-primary)); }
.rs .tree path { fill: none; stroke: var(--border-color-primary); stroke-width: 1.5; }
.rs .tree path.accepted, .rs .tree path.own { stroke: var(--body-text-color); stroke-width: 2.5; }
.rs .tree .rejected { opacity: .55; }
.rs .tree .accepted rect { stroke: var(--body-text-color); stroke-width: 2; }
.rs .tree .own rect { stroke-dasharray: 3 3; stroke: var(--body-text-color); }
@media (max-width: 640px) { .rs .message { margin-left: 0; } .rs h1 { font-size: 1.3rem; } }
#rs-send, #rs-stop, #rs-new { font-size: 1rem; padding: .5rem .3rem; white-space: nowrap; }
#rs-message textarea, #rs-document textarea { font-size: .95rem; }
"""


def source_class(source: int) -> str:
    """The CSS class of a blend's source, by its index."""
    return f"s{source % len(_COLORS)}"


def css() -> str:
    """The page's CSS."""
    rules = (
        f".rs .{source_class(i)} {{ --color: {color}; --line: {line}; }}\n"
        for i, (color, line) in enumerate(zip(_COLORS, _LINES, strict=True))
    )
    return _CSS + "".join(rules)
