"""The page of the paper's tables and figures as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restorekv.evaluation.charts import Chart
from restorekv.evaluation.report import SVG, Block, Section
from restorekv.evaluation.tables import Table


def render_markdown(title: str, summary: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the page as Markdown; its charts are links to SVG files in the folder SVG."""
    parts = [f"# {title}", *summary]
    for section in sections:
        verdict = f"**{section.verdict}**" if section.verdict else ""
        parts += filter(None, (f"## {section.title}", verdict, section.intro))
        parts += render_blocks(section.blocks)
    return "\n\n".join(parts) + "\n"


def render_blocks(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the Markdown paragraphs of blocks."""
    for block in blocks:
        if isinstance(block, Table):
            yield from filter(None, (f"### {block.title}", block.to_markdown(), block.note))
        elif isinstance(block, Section):
            yield from filter(None, (f"### {block.title}", block.intro))
            yield from render_blocks(block.blocks)
        elif isinstance(block, Chart):
            yield f"![{block.title}. {block.alt}.]({SVG}/{block.name}.svg)"
        elif isinstance(block, str):
            yield str(block)
        else:
            yield "\n".join(f"- {item}" for item in block)
